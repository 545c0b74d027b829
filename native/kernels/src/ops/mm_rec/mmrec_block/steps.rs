//! The block as a sequence of ops, on any backend.

use super::Problem;
use crate::base::activation::Activation;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{self, Named, named};
use crate::ops::mm_rec::block_recurrence::{self, BlockRecurrence};
use crate::ops::mm_rec::hds::{self, HdsConstruct};
use crate::ops::mm_rec::mdi::gamma::{MdiGamma, NETWORKS};
use crate::ops::mm_rec::multi_memory_attention::{self, MultiMemoryAttention};
use crate::ops::norm::RmsNorm;
use crate::ops::products::linear;
use crate::place::{self, Place};
use crate::tensor::{Described, Spec};

mod backward;

pub use backward::backward;

const GELU: Activation = Activation::GeluErf;

/// The inputs of the recurrence, with their names in this block.
const RECURRENCE: [[&str; 2]; 5] =
    [["w_gate", "wgate"], ["b_gate", "bgate"], ["w_mix", "wm"], ["b_mix", "bm"], ["initial_state", "initial_state"]];
/// The weights of attention.
const ATTENTION: [&str; 4] = ["waq", "baq", "wao", "bao"];

/// Checks inputs and options of the steps that have not been checked yet.
pub fn check(problem: &Problem, inputs: &Named<Spec>) -> Result<()> {
    let (x, options) = (problem.x, &problem.options);
    block_recurrence::mixed(inputs, ["wm", "bm"], options.mix)?;
    hds::Levels::new("k_mem", &problem.memory, &options.hierarchy())?;
    // Attention is checked last, as it checks `v_mem` too: if `k_mem` has no slots, that is the error to report.
    let mut all: Named<Spec> =
        [("h", x), ("k_mem", problem.memory), ("v_mem", *inputs.get("v_mem")?)].into_iter().collect();
    ATTENTION.into_iter().for_each(|name| all.extend_with(name, inputs.find(name).copied()));
    op::part::<MultiMemoryAttention>(&all, &multi_memory_attention::Options { heads: options.heads })?;
    Ok(())
}

/// Computes the block, and writes all outputs.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let between = steps.between(&mut outputs)?;
    let u = steps.activated(&between.hidden)?;
    let (mut f, mut y) = (steps.like_x()?, outputs.expect("y")?);
    steps.linear(P::view(&u), ["wf2", "bf2"], P::view_mut(&mut f))?;
    place.map(Map::Sum, &[P::view(&between.r), P::view(&f)], P::reborrow(&mut y))?;
    steps.summary(P::read(&y), outputs.expect("summary")?)
}

/// An intermediate tensor: given as an input, one of the outputs, or a temporary.
enum Tensor<'a, P: Place> {
    Given(P::View<'a>),
    Output(P::ViewMut<'a>),
    Own(P::Owned),
}

impl<'a, P: Place> Tensor<'a, P> {
    fn view(&self) -> P::View<'_> {
        match self {
            Tensor::Given(view) => P::briefly(view),
            Tensor::Output(output) => P::read(output),
            Tensor::Own(own) => P::view(own),
        }
    }

    /// Computes the tensor, unless it is given.
    fn fill(&mut self, compute: impl FnOnce(P::ViewMut<'_>) -> Result<()>) -> Result<()> {
        match self {
            Tensor::Given(_) => Ok(()),
            Tensor::Output(output) => compute(P::reborrow(output)),
            Tensor::Own(own) => compute(P::view_mut(own)),
        }
    }
}

/// Intermediate tensors, by their names in the formula.
struct Between<'a, P: Place> {
    xn: P::Owned,
    q: Tensor<'a, P>,
    k: Tensor<'a, P>,
    z: Tensor<'a, P>,
    gamma: Tensor<'a, P>,
    h: Tensor<'a, P>,
    top: Top<P>,
    r: P::Owned,
    rn: P::Owned,
    hidden: Tensor<'a, P>,
}

/// The top level of the hierarchy; `None` if that is the memory itself.
type Top<P> = Option<[<P as Place>::Owned; 2]>;

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    fn like_x(&self) -> Result<P::Owned> {
        self.place.empty(self.problem.x)
    }

    fn tensor(&self, name: &str, spec: Spec, outputs: &mut Named<P::ViewMut<'a>>) -> Result<Tensor<'a, P>> {
        Ok(match (self.inputs.find(name), outputs.take(name)) {
            (Some(given), _) => Tensor::Given(given.clone()),
            (None, Some(output)) => Tensor::Output(output),
            (None, None) => Tensor::Own(self.place.empty(spec)?),
        })
    }

    fn between(&self, outputs: &mut Named<P::ViewMut<'a>>) -> Result<Between<'a, P>> {
        let x = self.problem.x;
        let xn = self.norm(self.input("x")?, "n1")?;
        let mut projected = |name, weights| -> Result<Tensor<'a, P>> {
            let mut to = self.tensor(name, x, outputs)?;
            to.fill(|to| self.linear(P::view(&xn), weights, to))?;
            Ok(to)
        };
        let (q, k) = (projected("q", ["wq", "bq"])?, projected("k", ["wk", "bk"])?);
        let (v, z) = (projected("v", ["wv", "bv"])?, projected("z", ["wz", "bz"])?);
        let mut gamma = self.tensor("gamma", x, outputs)?;
        gamma.fill(|to| self.gamma(z.view(), k.view(), to))?;
        let (mut h, mut last) =
            (self.tensor("h", x, outputs)?, self.tensor("last_state", self.problem.last_state()?, outputs)?);
        h.fill(|h| last.fill(|last| self.recurrence(z.view(), gamma.view(), h, last)))?;
        let top = self.top()?;
        let mut context = self.tensor("context", x, outputs)?;
        context.fill(|to| self.attention(h.view(), &top, q.view(), to))?;
        let mut r = self.like_x()?;
        let sum = Map::PlusScaled(self.problem.options.v_mix);
        self.place.map(sum, &[self.input("x")?, h.view(), context.view(), v.view()], P::view_mut(&mut r))?;
        let rn = self.norm(P::view(&r), "n2")?;
        let mut hidden = self.tensor("hidden", self.problem.hidden()?, outputs)?;
        hidden.fill(|to| self.linear(P::view(&rn), ["wf1", "bf1"], to))?;
        Ok(Between { xn, q, k, z, gamma, h, top, r, rn, hidden })
    }

    fn norm(&self, x: P::View<'_>, weight: &str) -> Result<P::Owned> {
        let mut to = self.like_x()?;
        let inputs = named([("x", Some(P::briefly(&x))), ("w", Some(self.input(weight)?))]);
        self.place.call::<RmsNorm>(&self.problem.options.norm(), inputs, named([("y", Some(P::view_mut(&mut to)))]))?;
        Ok(to)
    }

    fn linear(&self, x: P::View<'_>, [w, b]: [&str; 2], to: P::ViewMut<'_>) -> Result<()> {
        linear::at(self.place, [P::briefly(&x), self.input(w)?], Some(self.input(b)?), P::briefly_mut(to))
    }

    fn activated(&self, hidden: &Tensor<'a, P>) -> Result<P::Owned> {
        let mut to = self.place.empty(self.problem.hidden()?)?;
        self.place.map(Map::Activate(GELU), &[hidden.view()], P::view_mut(&mut to))?;
        Ok(to)
    }

    fn gamma_inputs<'s>(&self, z: P::View<'s>, k: P::View<'s>) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        let mut given = named([("z", Some(z)), ("context", Some(k))]);
        for [_, weights @ ..] in NETWORKS {
            for name in weights {
                given.push(name, self.input(name)?);
            }
        }
        Ok(given)
    }

    fn gamma(&self, z: P::View<'_>, k: P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        let given = self.gamma_inputs(P::briefly(&z), P::briefly(&k))?;
        self.place.call::<MdiGamma>(&Default::default(), given, named([("gamma", Some(P::briefly_mut(to)))]))
    }

    fn recurrence_inputs<'s>(&self, z: P::View<'s>, gamma: P::View<'s>) -> Named<P::View<'s>>
    where
        'a: 's,
    {
        let mut given = named([("z", Some(z)), ("gamma", Some(gamma))]);
        RECURRENCE.into_iter().for_each(|[to, from]| given.extend_with(to, self.optional(from)));
        given
    }

    fn recurrence(&self, z: P::View<'_>, gamma: P::View<'_>, h: P::ViewMut<'_>, last: P::ViewMut<'_>) -> Result<()> {
        let given = self.recurrence_inputs(P::briefly(&z), P::briefly(&gamma));
        let to = named([("h", Some(P::briefly_mut(h))), ("last_state", Some(P::briefly_mut(last)))]);
        self.place.call::<BlockRecurrence>(&self.problem.options.recurrence(), given, to)
    }

    fn top(&self) -> Result<Top<P>> {
        let options = self.problem.options.hierarchy();
        if options.levels == 1 {
            return Ok(None);
        }
        let spec = |name| Ok(Some(self.inputs.get(name)?.spec()));
        let specs = named([("k", spec("k_mem")?), ("v", spec("v_mem")?)]);
        let (_, levels) = op::part::<HdsConstruct>(&specs, &options)?;
        let mut all = levels.try_map(|&spec| self.place.empty(spec))?;
        let to = all.iter_mut().map(|(name, level)| (name.clone(), P::view_mut(level))).collect();
        let given = named([("k", Some(self.input("k_mem")?)), ("v", Some(self.input("v_mem")?))]);
        self.place.call::<HdsConstruct>(&options, given, to)?;
        let [k, v, ..] = hds::NAMES[options.levels - 2];
        Ok(Some([all.expect(k)?, all.expect(v)?]))
    }

    fn attention_inputs<'s>(&self, h: P::View<'s>, top: &'s Top<P>, q: P::View<'s>) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        let [k, v] = match top {
            Some([k, v]) => [P::view(k), P::view(v)],
            None => [self.input("k_mem")?, self.input("v_mem")?],
        };
        let mut given = named([("h", Some(h)), ("k_mem", Some(k)), ("v_mem", Some(v)), ("q_in", Some(q))]);
        for name in ATTENTION {
            given.push(name, self.input(name)?);
        }
        Ok(given)
    }

    fn attention(&self, h: P::View<'_>, top: &Top<P>, q: P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        let [batch, length, _] = self.problem.sizes();
        let heads = self.problem.options.heads;
        let mut lse = self.place.empty(Spec::new(self.problem.x.dtype.wide(), &[batch, heads, length])?)?;
        let given = self.attention_inputs(P::briefly(&h), top, P::briefly(&q))?;
        let to = named([("y", Some(P::briefly_mut(to))), ("lse", Some(P::view_mut(&mut lse)))]);
        self.place.call::<MultiMemoryAttention>(&multi_memory_attention::Options { heads }, given, to)
    }

    /// The mean over time as the second level of a hierarchy: the options for it, and its spec.
    fn mean(&self) -> Result<(hds::Options, Spec)> {
        let [batch, length, width] = self.problem.sizes();
        let options = hds::Options { levels: 2, ratio: length.max(2), cursor: 0 };
        Ok((options, Spec::new(self.problem.x.dtype, &[batch, 1, width])?))
    }

    fn summary(&self, y: P::View<'_>, to: P::ViewMut<'_>) -> Result<()> {
        let ((options, spec), [_, length, _]) = (self.mean()?, self.problem.sizes());
        let to = P::reshape_mut(P::briefly_mut(to), &spec.shape)?;
        if length == 0 {
            let zeros = self.place.zeros(spec)?;
            return self.place.map(Map::Sum, &[P::view(&zeros)], to);
        }
        let mut twice = self.place.empty(spec)?;
        let given = named([("k", Some(P::briefly(&y))), ("v", Some(P::briefly(&y)))]);
        let to = named([("k1", Some(P::briefly_mut(to))), ("v1", Some(P::view_mut(&mut twice)))]);
        self.place.call::<HdsConstruct>(&options, given, to)
    }
}
