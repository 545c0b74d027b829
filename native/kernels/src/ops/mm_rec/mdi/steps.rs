//! The step as a sequence of ops, on any backend.

use super::gamma::{MdiGamma, MdiGammaBackward, Problem, SLOTS};
use super::update::{MdiUpdate, MdiUpdateBackward};
use crate::base::activation::Activation::Sigmoid;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::products::linear;
use crate::place::copy_rows;
use crate::place::{self, Place};
use crate::tensor::{Shape, Spec};

/// The step: `h_new`, `gamma` and `gate`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let mut logits = place.empty(problem.z)?;
    steps.gate_logits(&steps.joined()?, &mut logits)?;
    let (mut gate, mut gamma) = (outputs.expect("gate")?, outputs.expect("gamma")?);
    place.map(Map::Activate(Sigmoid), &[P::view(&logits)], P::reborrow(&mut gate))?;
    let of_gamma = named([("gamma", Some(P::reborrow(&mut gamma)))]);
    place.call::<MdiGamma>(&Default::default(), steps.gamma_inputs(), of_gamma)?;
    let given = steps.update_inputs(P::read(&gate), P::read(&gamma))?;
    let h = named([("h", Some(P::briefly_mut(outputs.expect("h_new")?)))]);
    place.call::<MdiUpdate>(&Default::default(), given, h)
}

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let joined = steps.joined()?;
    let mut logits = steps.like_z()?;
    steps.gate_logits(&joined, &mut logits)?;
    let OfUpdate { dz, dh_old, dgate, dgamma } = steps.update_backward(&logits)?;

    let mut dlogits = steps.like_z()?;
    place.map(Map::SlopeTimes(Sigmoid), &[P::view(&logits), P::view(&dgate)], P::view_mut(&mut dlogits))?;
    let [dz_of_gate, dh_of_gate] = steps.gate_backward(&joined, &dlogits, &mut outputs)?;

    let mut dz_of_gamma = steps.like_z()?;
    let mut given = steps.gamma_inputs();
    given.push("dgamma", P::view(&dgamma));
    let mut to = named([("dz", Some(P::view_mut(&mut dz_of_gamma)))]);
    for slot in SLOTS.iter().filter(|slot| slot.name != "z") {
        to.extend_with(slot.gradient(), outputs.take(slot.gradient()).map(P::briefly_mut));
    }
    place.call::<MdiGammaBackward>(&Default::default(), given, to)?;

    let terms = [P::view(&dz), P::view(&dz_of_gate), P::view(&dz_of_gamma)];
    place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dz")?))?;
    let terms = [P::view(&dh_old), P::view(&dh_of_gate)];
    place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dh_prev")?))
}

/// The gradients of the update's inputs, plus the cotangents of `gate` and `gamma`.
struct OfUpdate<T> {
    dz: T,
    dh_old: T,
    dgate: T,
    dgamma: T,
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    fn like_z(&self) -> Result<P::Owned> {
        self.place.empty(self.problem.z)
    }

    fn gamma_inputs<'s>(&self) -> Named<P::View<'s>>
    where
        'a: 's,
    {
        SLOTS.iter().filter_map(|slot| Some((slot.name, self.optional(slot.name)?))).collect()
    }

    fn update_inputs<'s>(&self, gate: P::View<'s>, gamma: P::View<'s>) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        let (z, h) = (self.input("z")?, self.input("h_prev")?);
        Ok(named([("z", Some(z)), ("h_old", Some(h)), ("gate", Some(gate)), ("gamma", Some(gamma))]))
    }

    fn width(&self) -> usize {
        self.problem.z.shape.last().copied().unwrap_or(0)
    }

    /// Allocates the concatenation `[z; h_prev]`.
    fn like_joined(&self) -> Result<P::Owned> {
        let Spec { dtype, shape } = self.problem.z;
        let mut dims = shape.to_vec();
        dims.pop();
        dims.push(2 * self.width());
        self.place.empty(Spec { dtype, shape: Shape::new(&dims)? })
    }

    fn joined(&self) -> Result<P::Owned> {
        let mut joined = self.like_joined()?;
        copy_rows::put_columns(self.place, &self.input("z")?, P::view_mut(&mut joined), 0)?;
        copy_rows::put_columns(self.place, &self.input("h_prev")?, P::view_mut(&mut joined), self.width())?;
        Ok(joined)
    }

    fn gate_logits(&self, joined: &P::Owned, to: &mut P::Owned) -> Result<()> {
        let factors = [P::view(joined), self.input("wm")?];
        linear::at(self.place, factors, Some(self.input("bm")?), P::view_mut(to))
    }

    fn update_backward(&self, logits: &P::Owned) -> Result<OfUpdate<P::Owned>> {
        let (mut gate, mut gamma) = (self.like_z()?, self.like_z()?);
        self.place.map(Map::Activate(Sigmoid), &[P::view(logits)], P::view_mut(&mut gate))?;
        let to = named([("gamma", Some(P::view_mut(&mut gamma)))]);
        self.place.call::<MdiGamma>(&Default::default(), self.gamma_inputs(), to)?;
        let mut of =
            OfUpdate { dz: self.like_z()?, dh_old: self.like_z()?, dgate: self.like_z()?, dgamma: self.like_z()? };
        let mut given = self.update_inputs(P::view(&gate), P::view(&gamma))?;
        given.push("dh", self.input("dh_new")?);
        let to = named([
            ("dz", Some(P::view_mut(&mut of.dz))),
            ("dh_old", Some(P::view_mut(&mut of.dh_old))),
            ("dgate", Some(P::view_mut(&mut of.dgate))),
            ("dgamma", Some(P::view_mut(&mut of.dgamma))),
        ]);
        self.place.call::<MdiUpdateBackward>(&Default::default(), given, to)?;
        let OfUpdate { dz, dh_old, dgate, dgamma } = of;
        Ok(OfUpdate { dz, dh_old, dgate: self.with(dgate, "dgate")?, dgamma: self.with(dgamma, "dgamma")? })
    }

    /// A gradient plus the cotangent of that name, if given.
    fn with(&self, gradient: P::Owned, cotangent: &str) -> Result<P::Owned> {
        let Some(more) = self.inputs.find(cotangent) else { return Ok(gradient) };
        let mut sum = self.like_z()?;
        self.place.map(Map::Sum, &[P::view(&gradient), P::briefly(more)], P::view_mut(&mut sum))?;
        Ok(sum)
    }

    /// Goes back through the gate's layer; returns its parts of the gradients of `z` and `h_prev`.
    fn gate_backward(
        &self,
        joined: &P::Owned,
        dlogits: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<[P::Owned; 2]> {
        let (mut djoined, mut parts) = (self.like_joined()?, [self.like_z()?, self.like_z()?]);
        linear::backward_at(
            self.place,
            [P::view(joined), self.input("wm")?, P::view(dlogits)],
            Some(self.input("bm")?),
            [P::view_mut(&mut djoined), P::briefly_mut(outputs.expect("dwm")?)],
            Some(P::briefly_mut(outputs.expect("dbm")?)),
        )?;
        for (i, part) in parts.iter_mut().enumerate() {
            copy_rows::take_columns(self.place, &P::view(&djoined), i * self.width(), P::view_mut(part))?;
        }
        Ok(parts)
    }
}
