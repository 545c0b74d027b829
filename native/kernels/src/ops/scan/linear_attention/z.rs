//! Calls that need `z`, on any backend: the recurrence in the type of the arithmetic, with `z` as a further column of the
//! state, and before and after it passes over rows that add this column and take it away.

use super::Problem;
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state;
use crate::place::Place;
use crate::tensor::Spec;

/// A backend with the recurrence of `S`, and the passes over rows. Rows are the last axes of tensors.
pub trait Columns: Place {
    /// Computes the recurrence.
    fn recurrence(
        &self,
        problem: &matrix_state::Problem,
        inputs: &Named<Self::View<'_>>,
        outputs: Named<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// Computes its gradient.
    fn gradient(
        &self,
        problem: &matrix_state::Problem,
        inputs: &Named<Self::View<'_>>,
        outputs: Named<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// Widens the rows of `from`, or zeros where it is absent. Where the rows of `to` have a number more, it is that of
    /// `last`, or `otherwise` where that is absent.
    fn append(
        &self,
        from: Option<&Self::View<'_>>,
        last: Option<&Self::View<'_>>,
        otherwise: f64,
        to: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Rounds the rows of `from` to those of `to`, with `divide` over the last number of a row, `d + 1e-10`. Where the
    /// rows of `from` have a number more, it goes to `last`. Either may be absent.
    fn split(
        &self,
        from: &Self::View<'_>,
        divide: bool,
        to: Option<Self::ViewMut<'_>>,
        last: Option<Self::ViewMut<'_>>,
    ) -> Result<()>;
    /// The cotangents of `products`, rows of `n` and `d`, given that of `y`: `dn = dy / (d + 1e-10)` and `dd = -(dn . n) /
    /// (d + 1e-10)` with `divide`, or `dn = dy` and `dd = 0`.
    fn cotangents(
        &self,
        products: &Self::View<'_>,
        dy: &Self::View<'_>,
        divide: bool,
        to: Self::ViewMut<'_>,
    ) -> Result<()>;
}

/// Computes the op.
pub fn forward<P: Columns>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'_>>,
    mut outputs: Named<P::ViewMut<'_>>,
) -> Result<()> {
    let call = Call { place, problem, inputs };
    let wide = call.inputs()?;
    let (state, z) = (outputs.take("last_state"), outputs.take("last_z"));
    let mut last = (state.is_some() || z.is_some()).then(|| place.empty(call.spec(State)?)).transpose()?;
    let products = call.products(&wide, last.as_mut())?;
    place.split(&P::view(&products), problem.normalize, Some(outputs.expect("y")?), None)?;
    match last {
        Some(last) => place.split(&P::view(&last), false, state, z),
        None => Ok(()),
    }
}

/// Computes the gradient.
pub fn backward<P: Columns>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'_>>,
    mut outputs: Named<P::ViewMut<'_>>,
) -> Result<()> {
    let call = Call { place, problem, inputs };
    let mut wide = call.inputs()?;
    let (products, mut dy) = (call.products(&wide, None)?, place.empty(call.spec(Values)?)?);
    place.cotangents(&P::view(&products), inputs.get("dy")?, problem.normalize, P::view_mut(&mut dy))?;
    wide.push("dy", dy);
    wide.extend_with("dlast_state", call.state("dlast_state", "dlast_z")?);
    let mut gradients = Named::default();
    for (name, rows) in [("dq", Keys), ("dk", Keys), ("dv", Values)] {
        gradients.push(name, place.empty(call.spec(rows)?)?);
    }
    let (state, z) = (outputs.take("dinitial_state"), outputs.take("dinitial_z"));
    if state.is_some() || z.is_some() {
        gradients.push("dinitial_state", place.empty(call.spec(State)?)?);
    }
    let mut to: Named<P::ViewMut<'_>> =
        gradients.iter_mut().map(|(name, tensor)| (name.clone(), P::view_mut(tensor))).collect();
    to.extend_with("dg", outputs.take("dg").map(P::briefly_mut));
    place.gradient(&problem.with_z(), &call.views(&wide), to)?;
    for name in ["dq", "dk", "dv"] {
        place.split(&P::view(gradients.get(name)?), false, Some(outputs.expect(name)?), None)?;
    }
    match gradients.find("dinitial_state") {
        Some(gradient) => place.split(&P::view(gradient), false, state, z),
        None => Ok(()),
    }
}

/// What a tensor of the recurrence with `z` consists of.
#[derive(Clone, Copy)]
enum Rows {
    /// Keys of groups.
    Keys,
    /// Values of heads.
    Values,
    /// The states of heads.
    State,
}
use Rows::{Keys, State, Values};

/// A call and its backend.
struct Call<'c, 'v, P: Columns> {
    place: &'c P,
    problem: &'c Problem,
    inputs: &'c Named<P::View<'v>>,
}

impl<P: Columns> Call<'_, '_, P> {
    fn spec(&self, rows: Rows) -> Result<Spec> {
        let matrix_state::Problem { batch, length, heads, groups, keys, values, dtype, .. } = self.problem.with_z();
        let dims = match rows {
            Keys => [batch, length, groups, keys],
            Values => [batch, length, heads, values],
            State => [batch, heads, keys, values],
        };
        Spec::new(dtype, &dims)
    }

    /// The inputs of the recurrence but `g`.
    fn inputs(&self) -> Result<Named<P::Owned>> {
        let mut all = Named::default();
        for (name, rows) in [("q", Keys), ("k", Keys), ("v", Values)] {
            let mut wide = self.place.empty(self.spec(rows)?)?;
            self.place.append(Some(self.inputs.get(name)?), None, 1.0, P::view_mut(&mut wide))?;
            all.push(name, wide);
        }
        all.extend_with("initial_state", self.state("initial_state", "initial_z")?);
        Ok(all)
    }

    /// States of `S` and `z` as one, if either is given.
    fn state(&self, s: &str, z: &str) -> Result<Option<P::Owned>> {
        let (s, z) = (self.inputs.find(s), self.inputs.find(z));
        if s.is_none() && z.is_none() {
            return Ok(None);
        }
        let mut state = self.place.empty(self.spec(State)?)?;
        self.place.append(s, z, 0.0, P::view_mut(&mut state))?;
        Ok(Some(state))
    }

    /// Views of these inputs, and of `g`.
    fn views<'s>(&'s self, wide: &'s Named<P::Owned>) -> Named<P::View<'s>> {
        let mut views = wide.map(P::view);
        views.extend_with("g", self.inputs.find("g").map(P::briefly));
        views
    }

    /// The rows of `n` and `d`, `scale S^T q` and `scale z . q`; writes the last states where asked for.
    fn products(&self, wide: &Named<P::Owned>, last: Option<&mut P::Owned>) -> Result<P::Owned> {
        let mut products = self.place.empty(self.spec(Values)?)?;
        let mut to = Named::default();
        to.push("y", P::view_mut(&mut products));
        to.extend_with("last_state", last.map(P::view_mut));
        self.place.recurrence(&self.problem.with_z(), &self.views(wide), to)?;
        Ok(products)
    }
}

/// A pass over rows: their number, their width, and whether rows of the wide tensor have a number more.
#[derive(Clone, Copy)]
pub struct Pass {
    pub rows: usize,
    pub width: usize,
    pub more: bool,
}

impl Pass {
    /// A pass over the rows of `wide`, and of `narrow`, without which they have a number more.
    pub fn new(wide: Spec, narrow: Option<Spec>) -> Pass {
        let last = |spec: Spec| spec.shape.last().copied().unwrap_or(0);
        let (all, columns) = (wide.shape.elements(), last(wide));
        let width = narrow.map_or(columns.saturating_sub(1), last);
        Pass { rows: all / columns.max(1), width, more: width < columns }
    }

    /// The width of the wide tensor's rows.
    pub fn wide(&self) -> usize {
        self.width + usize::from(self.more)
    }
}
