//! The layer as a sequence of ops, on any backend.

use super::Problem;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::linear;
use crate::place::Place;
use crate::tensor::Spec;

/// The layer: `y`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let [_, _, h] = hidden::<P>(place, problem, inputs)?;
    let y = P::briefly_mut(outputs.expect("y")?);
    linear::at(place, [P::view(&h), P::briefly(inputs.get("wd")?)], None, y)
}

/// Memory for a tensor of hidden width.
fn like_hidden<P: Place>(place: &P, problem: &Problem) -> Result<P::Owned> {
    let mut dims = problem.x.shape.to_vec();
    dims.pop();
    dims.push(problem.hidden);
    place.empty(Spec::new(problem.x.dtype, &dims)?)
}

/// `g`, `u` and `h`.
fn hidden<'a, P: Place>(place: &P, problem: &Problem, inputs: &Named<P::View<'a>>) -> Result<[P::Owned; 3]> {
    let empty = || like_hidden(place, problem);
    let [mut g, mut u, mut h] = [empty()?, empty()?, empty()?];
    for (name, to) in [("wg", &mut g), ("wu", &mut u)] {
        let factors = [P::briefly(inputs.get("x")?), P::briefly(inputs.get(name)?)];
        linear::at(place, factors, None, P::view_mut(to))?;
    }
    place.map(Map::Gate(problem.activation), &[P::view(&g), P::view(&u)], P::view_mut(&mut h))?;
    Ok([g, u, h])
}

/// The gradients of all inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let [g, u, h] = hidden::<P>(place, problem, inputs)?;
    let empty = || like_hidden(place, problem);
    let [mut e, mut dg, mut du] = [empty()?, empty()?, empty()?];
    let given = [P::view(&h), P::briefly(inputs.get("wd")?), P::briefly(inputs.get("dy")?)];
    let to = [P::view_mut(&mut e), P::briefly_mut(outputs.expect("dwd")?)];
    linear::backward_at(place, given, None, to, None)?;
    let gated = [P::view(&g), P::view(&u), P::view(&e)];
    place.map(Map::GateSlope(problem.activation), &gated, P::view_mut(&mut dg))?;
    place.map(Map::Gate(problem.activation), &[P::view(&g), P::view(&e)], P::view_mut(&mut du))?;
    let mut terms = [place.empty(problem.x)?, place.empty(problem.x)?];
    for ((w, dw, d), term) in [("wg", "dwg", &dg), ("wu", "dwu", &du)].into_iter().zip(&mut terms) {
        let given = [P::briefly(inputs.get("x")?), P::briefly(inputs.get(w)?), P::view(d)];
        let to = [P::view_mut(term), P::briefly_mut(outputs.expect(dw)?)];
        linear::backward_at(place, given, None, to, None)?;
    }
    let terms = [P::view(&terms[0]), P::view(&terms[1])];
    place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dx")?))
}
