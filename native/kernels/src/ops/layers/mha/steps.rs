//! Self-attention as a sequence of ops, on any backend.

use super::Problem;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::attention::decode::Decode;
use crate::ops::attention::{self, Attention, AttentionBackward, Layout};
use crate::ops::positions::rope::{self, Rope, RopeBackward};
use crate::ops::products::linear;
use crate::place::{self, Place};
use crate::tensor::Spec;

/// Self-attention: `y`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let cache = [outputs.take("keys"), outputs.take("values")];
    let Between { a, .. } = steps.between(cache)?;
    let bo = steps.optional("bo");
    linear::at(place, [P::view(&a), steps.input("wo")?], bo, P::briefly_mut(outputs.expect("y")?))
}

/// The gradients of all given inputs.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let between = steps.between([None, None])?;
    let mut da = steps.like_x()?;
    linear::backward_at(
        place,
        [P::view(&between.a), steps.input("wo")?, steps.input("dy")?],
        steps.optional("bo"),
        [P::view_mut(&mut da), P::briefly_mut(outputs.expect("dwo")?)],
        outputs.take("dbo").map(P::briefly_mut),
    )?;
    let gradients = steps.attention_backward(&between, &da)?;
    steps.projections_backward(&gradients, &mut outputs)
}

/// Inputs and outputs of attention; all are (B, L, D) but `lse`.
struct Between<T> {
    qkv: [T; 3],
    a: T,
    lse: T,
}

type Steps<'p, 'i, 'a, P> = place::Steps<'p, 'i, 'a, P, Problem>;

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    /// Allocates a tensor like `x`.
    fn like_x(&self) -> Result<P::Owned> {
        let Problem { batch, length, width, dtype, .. } = *self.problem;
        self.place.empty(Spec::new(dtype, &[batch, length, width])?)
    }

    fn view<'s>(&self, of: &'s P::Owned) -> Result<P::View<'s>> {
        P::reshape(&P::view(of), &self.problem.in_heads())
    }

    fn view_mut<'s>(&self, of: &'s mut P::Owned) -> Result<P::ViewMut<'s>> {
        P::reshape_mut(P::view_mut(of), &self.problem.in_heads())
    }

    fn between(&self, [keys, values]: [Option<P::ViewMut<'a>>; 2]) -> Result<Between<P::Owned>> {
        let Problem { batch, length, heads, dtype, .. } = *self.problem;
        let lse = self.place.empty(Spec::new(dtype.wide(), &[batch, heads, length])?)?;
        let qkv = [self.projected(0)?, self.projected(1)?, self.projected(2)?];
        let mut between = Between { qkv, a: self.like_x()?, lse };
        let (y, inputs) = (Some(self.view_mut(&mut between.a)?), self.attention_inputs(&between.qkv)?);
        if self.problem.cache.is_some() {
            let [keys, values] = [keys, values].map(|held| held.map(P::briefly_mut));
            let outputs = named([("y", y), ("keys", keys), ("values", values)]);
            self.place.call::<Decode>(&self.problem.decode(), inputs, outputs)?;
        } else {
            let outputs = named([("y", y), ("lse", Some(P::view_mut(&mut between.lse)))]);
            self.place.call::<Attention>(&self.attention(), inputs, outputs)?;
        }
        Ok(between)
    }

    /// Queries, keys or values: the product with the third of the rows of wqkv that belongs to them.
    fn projected(&self, which: usize) -> Result<P::Owned> {
        let (width, mut to) = (self.problem.width, self.like_x()?);
        let w = P::rows(&self.input("wqkv")?, which * width..(which + 1) * width)?;
        linear::at(self.place, [self.input("x")?, w], None, P::view_mut(&mut to))?;
        match self.rope() {
            Some(options) if which < 2 => {
                let mut turned = self.like_x()?;
                let inputs = named([("x", Some(self.view(&to)?))]);
                self.place.call::<Rope>(&options, inputs, named([("y", Some(self.view_mut(&mut turned)?))]))?;
                Ok(turned)
            }
            _ => Ok(to),
        }
    }

    fn rope(&self) -> Option<rope::Options> {
        let Problem { rope_theta, pairing, cached, .. } = *self.problem;
        let (layout, first_position) = (Layout::HeadsLast, cached as i64);
        Some(rope::Options { theta: rope_theta?, pairing, layout, first_position, ..Default::default() })
    }

    fn attention(&self) -> attention::Options {
        attention::Options { causal: self.problem.causal, layout: Layout::HeadsLast, ..Default::default() }
    }

    fn attention_inputs<'s>(&self, [q, k, v]: &'s [P::Owned; 3]) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        let mask = self.optional("mask");
        Ok(named([("q", Some(self.view(q)?)), ("k", Some(self.view(k)?)), ("v", Some(self.view(v)?)), ("mask", mask)]))
    }

    /// The gradients of queries, keys and values before rotation.
    fn attention_backward(&self, between: &Between<P::Owned>, da: &P::Owned) -> Result<[P::Owned; 3]> {
        let [mut dq, mut dk, mut dv] = [self.like_x()?, self.like_x()?, self.like_x()?];
        let mut inputs = self.attention_inputs(&between.qkv)?;
        inputs.push("y", self.view(&between.a)?);
        inputs.push("lse", P::view(&between.lse));
        inputs.push("dy", self.view(da)?);
        let outputs = named([
            ("dq", Some(self.view_mut(&mut dq)?)),
            ("dk", Some(self.view_mut(&mut dk)?)),
            ("dv", Some(self.view_mut(&mut dv)?)),
        ]);
        self.place.call::<AttentionBackward>(&self.attention(), inputs, outputs)?;
        Ok([self.turned_back(&between.qkv[0], dq)?, self.turned_back(&between.qkv[1], dk)?, dv])
    }

    fn turned_back(&self, x: &P::Owned, dy: P::Owned) -> Result<P::Owned> {
        let Some(options) = self.rope() else { return Ok(dy) };
        let mut dx = self.like_x()?;
        let inputs = named([("x", Some(self.view(x)?)), ("dy", Some(self.view(&dy)?))]);
        self.place.call::<RopeBackward>(&options, inputs, named([("dx", Some(self.view_mut(&mut dx)?))]))?;
        Ok(dx)
    }

    fn projections_backward(&self, [dq, dk, dv]: &[P::Owned; 3], outputs: &mut Named<P::ViewMut<'a>>) -> Result<()> {
        let width = self.problem.width;
        let (of_q, rest) = P::split_rows(outputs.expect("dwqkv")?, width)?;
        let (of_k, of_v) = P::split_rows(rest, width)?;
        let mut terms = [self.like_x()?, self.like_x()?, self.like_x()?];
        let each = [(dq, of_q), (dk, of_k), (dv, of_v)].into_iter().zip(&mut terms);
        for (which, ((dy, dw), term)) in each.enumerate() {
            let w = P::rows(&self.input("wqkv")?, which * width..(which + 1) * width)?;
            let to = [P::view_mut(term), P::briefly_mut(dw)];
            linear::backward_at(self.place, [self.input("x")?, w, P::view(dy)], None, to, None)?;
        }
        let terms = [P::view(&terms[0]), P::view(&terms[1]), P::view(&terms[2])];
        self.place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dx")?))
    }
}
