//! The block as a sequence of ops, on any backend.

use super::{Options, Problem};
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{self, Named, Op, named};
use crate::ops::layers::mha::{Mha, MhaBackward};
use crate::ops::layers::swiglu_mlp::{SwigluMlp, SwigluMlpBackward};
use crate::ops::norm::{LayerNorm, LayerNormBackward, LayerOptions};
use crate::place::{self, Place};
use crate::tensor::Spec;

/// The inputs of self-attention without `x`.
const MHA: [&str; 4] = ["wqkv", "wo", "bo", "mask"];
/// The inputs of the feed-forward layer without `x`.
const MLP: [&str; 3] = ["wg", "wu", "wd"];

/// Checks mask, cache and options of self-attention; all other shapes have been checked.
pub fn check(inputs: &Named<Spec>, options: &Options) -> Result<()> {
    let names = ["x"].into_iter().chain(MHA).chain(Mha::IN_PLACE.iter().copied());
    let given: Named<Spec> = names.filter_map(|name| Some((name, *inputs.find(name)?))).collect();
    op::part::<Mha>(&given, &options.mha()).map(|_| ())
}

/// The block: `y`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let cache = [outputs.take("keys"), outputs.take("values")];
    let Between { h, n2, .. } = steps.between(cache)?;
    let mut m = steps.like_x()?;
    let given = steps.inputs_of(&n2, &MLP);
    place.call::<SwigluMlp>(&Default::default(), given, named([("y", Some(P::view_mut(&mut m)))]))?;
    place.map(Map::Sum, &[P::view(&h), P::view(&m)], P::briefly_mut(outputs.expect("y")?))
}

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let Between { n1, h, n2 } = steps.between([None, None])?;
    let [mut dn2, mut of_n2, mut dh] = [steps.like_x()?, steps.like_x()?, steps.like_x()?];
    let dy = steps.input("dy")?;
    let mut given = steps.inputs_of(&n2, &MLP);
    given.push("dy", P::briefly(&dy));
    let to = steps.gradients(&mut dn2, &mut outputs, &["dwg", "dwu", "dwd"]);
    place.call::<SwigluMlpBackward>(&Default::default(), given, to)?;
    steps.norm_backward(P::view(&h), 2, &dn2, &mut of_n2, &mut outputs)?;
    place.map(Map::Sum, &[P::briefly(&dy), P::view(&of_n2)], P::view_mut(&mut dh))?;

    let [mut dn1, mut of_n1] = [steps.like_x()?, steps.like_x()?];
    let mut given = steps.inputs_of(&n1, &MHA);
    given.push("dy", P::view(&dh));
    let to = steps.gradients(&mut dn1, &mut outputs, &["dwqkv", "dwo", "dbo"]);
    place.call::<MhaBackward>(&problem.options.mha(), given, to)?;
    steps.norm_backward(steps.input("x")?, 1, &dn1, &mut of_n1, &mut outputs)?;
    place.map(Map::Sum, &[P::view(&dh), P::view(&of_n1)], P::briefly_mut(outputs.expect("dx")?))
}

/// Intermediate tensors: the outputs of both norms, and `h`.
struct Between<T> {
    n1: T,
    h: T,
    n2: T,
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    fn like_x(&self) -> Result<P::Owned> {
        self.place.empty(self.problem.x)
    }

    /// The inputs of a step: its `x`, and the block's inputs of these names.
    fn inputs_of<'s>(&self, x: &'s P::Owned, names: &[&'static str]) -> Named<P::View<'s>>
    where
        'a: 's,
    {
        let own = names.iter().filter_map(|&name| Some((name, self.optional(name)?)));
        [("x", P::view(x))].into_iter().chain(own).collect()
    }

    /// The outputs of a step's gradient: its `dx`, and the block's outputs for inputs of these names.
    fn gradients<'s>(
        &self,
        dx: &'s mut P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
        names: &[&'static str],
    ) -> Named<P::ViewMut<'s>>
    where
        'a: 's,
    {
        let own = names.iter().filter_map(|&name| Some((name, P::briefly_mut(outputs.take(name)?))));
        [("dx", P::view_mut(dx))].into_iter().chain(own).collect()
    }

    fn between(&self, cache: [Option<P::ViewMut<'a>>; 2]) -> Result<Between<P::Owned>> {
        let [mut n1, mut a, mut h, mut n2] = [self.like_x()?, self.like_x()?, self.like_x()?, self.like_x()?];
        let x = self.input("x")?;
        self.norm(P::briefly(&x), 1, &mut n1)?;
        let [keys, values] = cache.map(|held| held.map(P::briefly_mut));
        let to = named([("y", Some(P::view_mut(&mut a))), ("keys", keys), ("values", values)]);
        self.place.call::<Mha>(&self.problem.options.mha(), self.inputs_of(&n1, &MHA), to)?;
        self.place.map(Map::Sum, &[x, P::view(&a)], P::view_mut(&mut h))?;
        self.norm(P::view(&h), 2, &mut n2)?;
        Ok(Between { n1, h, n2 })
    }

    /// The weights of the first or second norm.
    fn weights<'s>(&self, which: usize) -> Result<[P::View<'s>; 2]>
    where
        'a: 's,
    {
        let weight = |kind: &str| self.input(&format!("ln{which}_{kind}"));
        Ok([weight("w")?, weight("b")?])
    }

    fn layer(&self) -> LayerOptions {
        LayerOptions { eps: self.problem.options.eps }
    }

    fn norm<'s>(&self, x: P::View<'s>, which: usize, to: &'s mut P::Owned) -> Result<()>
    where
        'a: 's,
    {
        let (rows, [w, b]) = (&self.problem.x.shape[..2], self.weights(which)?);
        let statistic = || self.place.empty(Spec::new(self.problem.x.dtype.wide(), rows)?);
        let (mut mean, mut rstd) = (statistic()?, statistic()?);
        let outputs = named([
            ("y", Some(P::view_mut(to))),
            ("mean", Some(P::view_mut(&mut mean))),
            ("rstd", Some(P::view_mut(&mut rstd))),
        ]);
        let inputs = named([("x", Some(P::briefly(&x))), ("w", Some(P::briefly(&w))), ("b", Some(P::briefly(&b)))]);
        self.place.call::<LayerNorm>(
            &self.layer(),
            inputs,
            outputs.into_iter().map(|(n, v)| (n, P::briefly_mut(v))).collect(),
        )
    }

    fn norm_backward<'s>(
        &self,
        x: P::View<'s>,
        which: usize,
        dy: &'s P::Owned,
        dx: &'s mut P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<()>
    where
        'a: 's,
    {
        let [w, b] = self.weights(which)?;
        let mut of = |kind: &str| Ok(P::briefly_mut(outputs.expect(&format!("dln{which}_{kind}"))?));
        let to = named([("dx", Some(P::view_mut(dx))), ("dw", Some(of("w")?)), ("db", Some(of("b")?))]);
        let inputs = named([("x", Some(x)), ("w", Some(w)), ("b", Some(b)), ("dy", Some(P::view(dy)))]);
        self.place.call::<LayerNormBackward>(&self.layer(), inputs, to)
    }
}
