//! The networks as a sequence of ops, on any backend.

use super::{MdiGamma, NETWORKS, Problem};
use crate::base::activation::Activation;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::products::linear::{self, Linear};
use crate::place::{self, Place, gradient};
use crate::tensor::{Shape, Spec};

const GELU: Activation = Activation::GeluErf;

/// The coefficient `gamma`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let logits = steps.networks().map(|network| steps.logits(network)).collect::<Result<Vec<_>>>()?;
    let logits: Vec<_> = logits.iter().map(P::view).collect();
    place.map(Map::Decay, &logits, P::briefly_mut(outputs.expect("gamma")?))
}

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let passes = steps.networks().map(|network| steps.pass(network)).collect::<Result<Vec<_>>>()?;
    let mut dlogits = place.empty(problem.z)?;
    for (i, network) in steps.networks().enumerate() {
        // The network's own logits first, then those of the other one.
        let mut given: Vec<_> = passes[i..].iter().chain(&passes[..i]).map(|pass| P::view(&pass.logits)).collect();
        given.push(steps.input("dgamma")?);
        place.map(Map::DecaySlope, &given, P::view_mut(&mut dlogits))?;
        steps.pass_backward(network, &passes[i], &dlogits, &mut outputs)?;
    }
    Ok(())
}

/// The intermediate tensors of a network.
struct Pass<T> {
    /// The hidden layer before and after the activation.
    inner: T,
    activated: T,
    logits: T,
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    /// The networks that are given.
    fn networks(&self) -> impl Iterator<Item = [&'static str; 5]> + use<P> {
        NETWORKS.into_iter().take(1 + usize::from(self.problem.context))
    }

    /// Allocates a tensor of the inner width.
    fn like_inner(&self) -> Result<P::Owned> {
        let Spec { dtype, shape } = self.problem.z;
        let mut dims = shape.to_vec();
        dims.pop();
        dims.push(self.problem.inner);
        self.place.empty(Spec { dtype, shape: Shape::new(&dims)? })
    }

    fn logits(&self, [x, w1, b1, w2, b2]: [&str; 5]) -> Result<P::Owned> {
        let (mut inner, mut logits) = (self.like_inner()?, self.place.empty(self.problem.z)?);
        let given = named([("x", Some(self.input(x)?)), ("w", Some(self.input(w1)?)), ("b", Some(self.input(b1)?))]);
        let options = linear::Options { activation: Some(GELU) };
        self.place.call::<Linear>(&options, given, named([("y", Some(P::view_mut(&mut inner)))]))?;
        let factors = [P::view(&inner), self.input(w2)?];
        linear::at(self.place, factors, Some(self.input(b2)?), P::view_mut(&mut logits))?;
        Ok(logits)
    }

    /// Like [`Self::logits`], and keeps all tensors that the gradient needs.
    fn pass(&self, [x, w1, b1, w2, b2]: [&str; 5]) -> Result<Pass<P::Owned>> {
        let (mut inner, mut activated) = (self.like_inner()?, self.like_inner()?);
        let mut logits = self.place.empty(self.problem.z)?;
        let (factors, bias) = ([self.input(x)?, self.input(w1)?], self.input(b1)?);
        linear::at(self.place, factors, Some(bias), P::view_mut(&mut inner))?;
        self.place.map(Map::Activate(GELU), &[P::view(&inner)], P::view_mut(&mut activated))?;
        let (factors, bias) = ([P::view(&activated), self.input(w2)?], self.input(b2)?);
        linear::at(self.place, factors, Some(bias), P::view_mut(&mut logits))?;
        Ok(Pass { inner, activated, logits })
    }

    fn pass_backward(
        &self,
        [x, w1, b1, w2, b2]: [&str; 5],
        pass: &Pass<P::Owned>,
        dlogits: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let (mut dactivated, mut dinner) = (self.like_inner()?, self.like_inner()?);
        linear::backward_at(
            self.place,
            [P::view(&pass.activated), self.input(w2)?, P::view(dlogits)],
            Some(self.input(b2)?),
            [P::view_mut(&mut dactivated), gradient::<P, MdiGamma>(outputs, w2)?],
            Some(gradient::<P, MdiGamma>(outputs, b2)?),
        )?;
        let given = [P::view(&pass.inner), P::view(&dactivated)];
        self.place.map(Map::SlopeTimes(GELU), &given, P::view_mut(&mut dinner))?;
        linear::backward_at(
            self.place,
            [self.input(x)?, self.input(w1)?, P::view(&dinner)],
            Some(self.input(b1)?),
            [gradient::<P, MdiGamma>(outputs, x)?, gradient::<P, MdiGamma>(outputs, w1)?],
            Some(gradient::<P, MdiGamma>(outputs, b1)?),
        )
    }
}
