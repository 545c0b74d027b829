//! The block as a sequence of ops, on any backend.

mod backward;
mod sequences;

use super::{Norms, Problem, Weights};
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::norm::{RmsNorm, RmsOptions};
use crate::ops::products::linear;
use crate::ops::products::matrices::{self, Dense, Matrix};
use crate::place::Place;
use crate::tensor::{Described, Spec};
pub use backward::{backward, backward_with};
pub use sequences::{Sequences, State};
use std::ops::Range;

/// The block: `y`, and on request `conv_state` and `ssm_state`.
pub fn forward<'a, P: Place>(
    place: &P,
    _: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let weights = among::<P>(inputs)?;
    let block = Block { place, weights: &weights };
    let states = ["conv_state", "ssm_state"]
        .map(|name| State { before: inputs.find(name).map(P::briefly), after: outputs.take(name) });
    block.run(inputs.get("x")?, &mut Sequences::new(&block, states)?, outputs.expect("y")?)
}

/// The weights, from the inputs of the op.
fn among<'a, P: Place>(inputs: &Named<P::View<'a>>) -> Result<Weights<P::View<'a>>> {
    Weights::new(|name| inputs.find(name).cloned().map(Matrix::Float))
}

/// A block on a backend.
pub struct Block<'b, 'w, P: Place> {
    /// The backend.
    pub place: &'b P,
    /// The weights on this backend.
    pub weights: &'b Weights<P::View<'w>>,
}

/// The steps of a block that differ between whole sequences and single tokens.
pub trait Recurrence<P: Place> {
    /// The convolution: `c` from `u`.
    fn conv(&mut self, block: &Block<P>, u: &P::Owned, c: &mut P::Owned) -> Result<()>;
    /// `delta`, `B` and `C` from `c`.
    fn x_proj(&self, block: &Block<P>, c: &P::Owned) -> Result<[P::Owned; 3]>;
    /// The scan: `s` from the tensors before it.
    fn scan(&mut self, block: &Block<P>, of: &Between<P::Owned>, s: &mut P::Owned) -> Result<()>;
}

/// The intermediate tensors before the scan, by their names in the formula.
pub struct Between<T> {
    u: T,
    /// The gate.
    pub z: T,
    /// The output of the convolution.
    pub c: T,
    delta: T,
    /// `B`.
    pub b_t: T,
    /// `C`.
    pub c_t: T,
    /// The step sizes, before bias and softplus.
    pub dt: T,
    /// `delta`, `B` and `C` before their norms, if the block has any.
    projected: Option<[T; 3]>,
}

impl<'w, P: Place> Block<'_, 'w, P> {
    /// Computes `y` from `x`; both have equal leading axes.
    pub fn run(&self, x: &P::View<'_>, recurrence: &mut impl Recurrence<P>, y: P::ViewMut<'_>) -> Result<()> {
        let between = self.between(x, recurrence)?;
        let s = self.scan(&between, recurrence)?;
        matrices::multiply(self.place, P::view(&s), &self.weights.out_proj, P::briefly_mut(y))
    }

    /// Computes the intermediate tensors before the scan.
    fn between(&self, x: &P::View<'_>, recurrence: &mut impl Recurrence<P>) -> Result<Between<P::Owned>> {
        let inner = self.sizes()[0];
        let u = self.rows(x, &self.weights.in_proj, 0..inner)?;
        let z = self.rows(x, &self.weights.in_proj, inner..2 * inner)?;
        let mut c = self.like(x, inner)?;
        recurrence.conv(self, &u, &mut c)?;
        let parts = recurrence.x_proj(self, &c)?;
        let ([delta, b_t, c_t], projected) = match self.normed(&parts)? {
            Some(normed) => (normed, Some(parts)),
            None => (parts, None),
        };
        let mut dt = self.like(x, inner)?;
        linear::at(self.place, [P::view(&delta), P::briefly(&self.weights.dt_w)], None, P::view_mut(&mut dt))?;
        Ok(Between { u, z, c, delta, b_t, c_t, dt, projected })
    }

    /// `delta`, `B` and `C`, normed; `None` for a block without norms.
    fn normed(&self, [delta, b_t, c_t]: &[P::Owned; 3]) -> Result<Option<[P::Owned; 3]>> {
        let Some(Norms { eps, w: [of_delta, of_b, of_c] }) = &self.weights.norms else {
            return Ok(None);
        };
        let norm = |part: &P::Owned, w: &P::View<'w>| {
            let mut y = self.place.empty(P::view(part).spec())?;
            let inputs = named([("x", Some(P::view(part))), ("w", Some(P::briefly(w)))]);
            let options = RmsOptions { eps: *eps, ..Default::default() };
            self.place.call::<RmsNorm>(&options, inputs, named([("y", Some(P::view_mut(&mut y)))]))?;
            Ok(y)
        };
        Ok(Some([norm(delta, of_delta)?, norm(b_t, of_b)?, norm(c_t, of_c)?]))
    }

    fn scan(&self, between: &Between<P::Owned>, recurrence: &mut impl Recurrence<P>) -> Result<P::Owned> {
        let mut s = self.like(&P::view(&between.c), self.sizes()[0])?;
        recurrence.scan(self, between, &mut s)?;
        Ok(s)
    }

    /// The sizes `D`, `N` and `R`.
    pub fn sizes(&self) -> [usize; 3] {
        let [a, dt_w] = [&self.weights.a_log, &self.weights.dt_w].map(|weight| weight.spec().shape);
        [a[0], a[1], dt_w[1]]
    }

    /// The product of `x` with a range of rows of a dense layer's matrix, plus their bias.
    pub fn rows(&self, x: &P::View<'_>, of: &Dense<P::View<'w>>, rows: Range<usize>) -> Result<P::Owned> {
        let mut y = self.like(x, rows.len())?;
        matrices::multiply(self.place, P::briefly(x), &matrices::rows::<P>(of, rows)?, P::view_mut(&mut y))?;
        Ok(y)
    }

    /// Allocates a tensor of this width, with the type and the leading axes of `x`.
    fn like(&self, x: &P::View<'_>, width: usize) -> Result<P::Owned> {
        let Spec { dtype, shape } = x.spec();
        let mut dims = shape.to_vec();
        *dims.last_mut().expect("rows have a width") = width;
        self.place.empty(Spec::new(dtype, &dims)?)
    }
}
