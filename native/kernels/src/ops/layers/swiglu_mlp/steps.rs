//! The layer as a sequence of ops, on any backend.

use super::Problem;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::linear;
use crate::place::{self, Place};
use crate::tensor::Spec;

/// The layer: `y`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let [_, _, h] = steps.hidden()?;
    linear::at(place, [P::view(&h), steps.input("wd")?], None, P::briefly_mut(outputs.expect("y")?))
}

/// The gradients of all inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let [g, u, h] = steps.hidden()?;
    let [mut e, mut dg, mut du] = [steps.like_hidden()?, steps.like_hidden()?, steps.like_hidden()?];
    let given = [P::view(&h), steps.input("wd")?, steps.input("dy")?];
    let to = [P::view_mut(&mut e), P::briefly_mut(outputs.expect("dwd")?)];
    linear::backward_at(place, given, None, to, None)?;
    let gated = [P::view(&g), P::view(&u), P::view(&e)];
    place.map(Map::GateSlope(problem.activation), &gated, P::view_mut(&mut dg))?;
    place.map(Map::Gate(problem.activation), &[P::view(&g), P::view(&e)], P::view_mut(&mut du))?;
    let mut terms = [place.empty(problem.x)?, place.empty(problem.x)?];
    for ((w, dw, d), term) in [("wg", "dwg", &dg), ("wu", "dwu", &du)].into_iter().zip(&mut terms) {
        let given = [steps.input("x")?, steps.input(w)?, P::view(d)];
        let to = [P::view_mut(term), P::briefly_mut(outputs.expect(dw)?)];
        linear::backward_at(place, given, None, to, None)?;
    }
    let terms = [P::view(&terms[0]), P::view(&terms[1])];
    place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dx")?))
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<P: Place> Steps<'_, '_, '_, P> {
    /// Allocates a tensor of hidden width.
    fn like_hidden(&self) -> Result<P::Owned> {
        let mut dims = self.problem.x.shape.to_vec();
        dims.pop();
        dims.push(self.problem.hidden);
        self.place.empty(Spec::new(self.problem.x.dtype, &dims)?)
    }

    /// The intermediate tensors `g`, `u` and `h`.
    fn hidden(&self) -> Result<[P::Owned; 3]> {
        let [mut g, mut u, mut h] = [self.like_hidden()?, self.like_hidden()?, self.like_hidden()?];
        for (name, to) in [("wg", &mut g), ("wu", &mut u)] {
            linear::at(self.place, [self.input("x")?, self.input(name)?], None, P::view_mut(to))?;
        }
        self.place.map(Map::Gate(self.problem.activation), &[P::view(&g), P::view(&u)], P::view_mut(&mut h))?;
        Ok([g, u, h])
    }
}
