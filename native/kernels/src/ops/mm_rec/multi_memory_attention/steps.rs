//! Attention over a memory as a sequence of ops, on any backend.
//!
//! There is no mask, so sequences that share a memory are one long sequence for attention, and the gradients of that
//! memory are sums over all of it. Only `lse`, in which heads precede rows, then has another order of axes.

use super::Problem;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::attention::{self, Attention, AttentionBackward, Layout};
use crate::ops::products::linear;
use crate::place::copy_rows::CopyRows;
use crate::place::{self, Place};
use crate::tensor::{Described, Spec};

const ATTENTION: attention::Options =
    attention::Options { scale: None, causal: false, q_offset: None, layout: Layout::HeadsLast, cache: None };

/// Attention over a memory: `y` and `lse`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let q = steps.queries()?;
    let mut a = steps.like_h()?;
    let lse = P::briefly_mut(outputs.expect("lse")?);
    if problem.shared {
        let mut by_head = steps.lse_by_head()?;
        steps.attention(&q, &mut a, P::view_mut(&mut by_head))?;
        steps.turn(&P::view(&by_head), [problem.heads, problem.batch], lse)?;
    } else {
        steps.attention(&q, &mut a, lse)?;
    }
    let bao = steps.optional("bao");
    linear::at(place, [P::view(&a), steps.input("wao")?], bao, P::briefly_mut(outputs.expect("y")?))
}

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let q = steps.queries()?;
    let [mut a, mut da, mut dq] = [steps.like_h()?, steps.like_h()?, steps.like_h()?];
    let mut lse = steps.lse_by_head()?;
    steps.attention(&q, &mut a, P::view_mut(&mut lse))?;
    linear::backward_at(
        place,
        [P::view(&a), steps.input("wao")?, steps.input("dy")?],
        steps.optional("bao"),
        [P::view_mut(&mut da), P::briefly_mut(outputs.expect("dwao")?)],
        outputs.take("dbao").map(P::briefly_mut),
    )?;
    steps.attention_backward([&q, &a, &da], &lse, &mut dq, &mut outputs)?;
    if let Some(dq_in) = outputs.take("dq_in") {
        place.map(Map::Scaled(0.5), &[P::view(&dq)], P::briefly_mut(dq_in))?;
    }
    linear::backward_at(
        place,
        [steps.input("h")?, steps.input("waq")?, P::view(&dq)],
        steps.optional("baq"),
        [P::briefly_mut(outputs.expect("dh")?), P::briefly_mut(outputs.expect("dwaq")?)],
        outputs.take("dbaq").map(P::briefly_mut),
    )
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    /// Allocates a tensor like `h`.
    fn like_h(&self) -> Result<P::Owned> {
        let Problem { batch, length, width, dtype, .. } = *self.problem;
        self.place.empty(Spec::new(dtype, &[batch, length, width])?)
    }

    /// The shape of queries as attention gets them.
    fn in_heads(&self) -> [usize; 4] {
        let Problem { batch, length, width, heads, shared, .. } = *self.problem;
        let [batch, length] = if shared { [1, batch * length] } else { [batch, length] };
        [batch, length, heads, width / heads]
    }

    /// A tensor of the memory, split into heads.
    fn memory<'s>(&self, name: &str) -> Result<P::View<'s>>
    where
        'a: 's,
    {
        P::reshape(self.inputs.get(name)?, &self.memory_in_heads())
    }

    fn memory_in_heads(&self) -> [usize; 4] {
        let Problem { batch, width, slots, heads, shared, .. } = *self.problem;
        [if shared { 1 } else { batch }, slots, heads, width / heads]
    }

    fn queries(&self) -> Result<P::Owned> {
        let mut projected = self.like_h()?;
        let baq = self.optional("baq");
        linear::at(self.place, [self.input("h")?, self.input("waq")?], baq, P::view_mut(&mut projected))?;
        let Some(q_in) = self.inputs.find("q_in") else { return Ok(projected) };
        let mut q = self.like_h()?;
        self.place.map(Map::PlusScaled(0.5), &[P::view(&projected), P::briefly(q_in)], P::view_mut(&mut q))?;
        Ok(q)
    }

    /// Allocates `lse` with attention's order of axes.
    fn lse_by_head(&self) -> Result<P::Owned> {
        let [batch, length, heads, _] = self.in_heads();
        self.place.empty(Spec::new(self.problem.dtype.wide(), &[batch, heads, length])?)
    }

    /// Transposes the first two axes of `lse` or of its cotangent, which have these sizes.
    fn turn(&self, from: &P::View<'_>, [first, second]: [usize; 2], to: P::ViewMut<'_>) -> Result<()> {
        let length = self.problem.length;
        let from = P::reshape(from, &[1, first, second, length])?;
        let mut to = P::reshape_mut(to, &[1, second, first, length])?;
        let spec = P::read(&to).spec();
        self.place.copy_rows(&CopyRows::into_heads_first(from.spec(), Layout::HeadsLast, spec, 0), &from, &mut to)
    }

    fn attention_inputs<'s>(&self, q: &'s P::Owned) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        let q = P::reshape(&P::view(q), &self.in_heads())?;
        Ok(named([("q", Some(q)), ("k", Some(self.memory("k_mem")?)), ("v", Some(self.memory("v_mem")?))]))
    }

    fn attention<'s>(&self, q: &'s P::Owned, a: &'s mut P::Owned, lse: P::ViewMut<'s>) -> Result<()>
    where
        'a: 's,
    {
        let [batch, length, heads, _] = self.in_heads();
        let lse = P::reshape_mut(lse, &[batch, heads, length])?;
        let y = P::reshape_mut(P::view_mut(a), &self.in_heads())?;
        let outputs = named([("y", Some(y)), ("lse", Some(lse))]);
        self.place.call::<Attention>(&ATTENTION, self.attention_inputs(q)?, outputs)
    }

    fn attention_backward(
        &self,
        [q, a, da]: [&P::Owned; 3],
        lse: &P::Owned,
        dq: &mut P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let (mut dk, dv) = (outputs.expect("dk_mem")?, outputs.expect("dv_mem")?);
        let dlse = self.lse_cotangent()?;
        let mut inputs = self.attention_inputs(q)?;
        inputs.push("y", P::reshape(&P::view(a), &self.in_heads())?);
        inputs.push("lse", P::view(lse));
        inputs.push("dy", P::reshape(&P::view(da), &self.in_heads())?);
        if let Some(dlse) = &dlse {
            inputs.push("dlse", P::view(dlse));
        } else if let Some(dlse) = self.inputs.find("dlse") {
            inputs.push("dlse", P::briefly(dlse));
        }
        let outputs = named([
            ("dq", Some(P::reshape_mut(P::view_mut(dq), &self.in_heads())?)),
            ("dk", Some(P::reshape_mut(P::reborrow(&mut dk), &self.memory_in_heads())?)),
            ("dv", Some(P::reshape_mut(dv, &self.memory_in_heads())?)),
        ]);
        self.place.call::<AttentionBackward>(&ATTENTION, inputs, outputs)?;
        if self.problem.slots == 1 && self.inputs.find("dlse").is_none() {
            self.clear(P::view_mut(dq))?;
            self.clear(dk)?;
        }
        Ok(())
    }

    /// Writes zeros. A single slot has weight 1 whatever its score is, so that the score has no gradient: what was
    /// computed is rounding error.
    fn clear(&self, to: P::ViewMut<'_>) -> Result<()> {
        let zeros = self.place.zeros(to.spec())?;
        self.place.map(Map::Sum, &[P::view(&zeros)], to)
    }

    /// The cotangent of `lse` with attention's order of axes, where that is not the given one.
    fn lse_cotangent(&self) -> Result<Option<P::Owned>> {
        let Some(given) = self.inputs.find("dlse").filter(|_| self.problem.shared) else { return Ok(None) };
        let mut turned = self.lse_by_head()?;
        self.turn(given, [self.problem.batch, self.problem.heads], P::view_mut(&mut turned))?;
        Ok(Some(turned))
    }
}
