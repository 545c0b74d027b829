//! Top-k search down the hierarchy on the CPU: threads divide queries.

use super::Problem;
use super::reference::order;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::ops::mm_rec::hds::cpu::pool as pool_levels;
use crate::tensor::{Element, Owned, Spec, View, ViewMut};
use crate::with_type;

/// Below this many products waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// Computes `context` and `slots` on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (levels, counts) = (&problem.levels, problem.candidates());
    let k = inputs.get("k")?.slice::<S>()?;
    let empty =
        |&size: &usize| Owned::try_zeros(Spec::new(<S::Wide as Element>::DTYPE, &[levels.batch, size, levels.width])?);
    let mut above: Vec<Owned> = levels.sizes[1..].iter().map(empty).collect::<Result<_>>()?;
    let to = above.iter_mut().map(|level| Ok(Shared::new(level.view_mut().slice::<S::Wide>()?)));
    pool_levels(levels, &[k], &[to.collect::<Result<Vec<_>>>()?], exec)?;
    let call = Call::<S> {
        problem,
        q: inputs.get("q")?.slice()?,
        k,
        v: inputs.get("v")?.slice()?,
        above: above.iter().map(|level| level.view().slice()).collect::<Result<_>>()?,
        context: Shared::new(outputs.expect("context")?.slice()?),
        slots: Shared::new(outputs.expect("slots")?.slice()?),
    };
    let queries = problem.batch * problem.length;
    let work = queries * (counts.iter().sum::<usize>() + counts[0]) * levels.width;
    pool::for_each(pool::worth(exec.threads, work, WORTH_SHARING), queries, |query| {
        S::Wide::dispatch(exec.level, Query { call: &call, query });
    })
}

struct Call<'a, S: Storage> {
    problem: &'a Problem,
    q: &'a [S],
    k: &'a [S],
    v: &'a [S],
    /// The levels above the bank.
    above: Vec<&'a [S::Wide]>,
    context: Shared<'a, S>,
    slots: Shared<'a, i32>,
}

struct Query<'c, 'a, S: Storage> {
    call: &'c Call<'a, S>,
    query: usize,
}

impl<S: Storage> Work<S::Wide> for Query<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Call { problem, ref above, .. } = *self.call;
        let (sizes, width) = (&problem.levels.sizes, problem.levels.width);
        let q: Vec<S::Wide> = self.call.q[self.query * width..][..width].iter().map(|v| v.widen()).collect();
        let memory = problem.memory(self.query / problem.length);
        let scale = S::Wide::from_f64(problem.scale());
        let mut candidates: Vec<usize> = (0..sizes[sizes.len() - 1]).collect();
        let mut scored = Vec::new();
        for level in (1..sizes.len()).rev() {
            let rows = &above[level - 1][memory * sizes[level] * width..];
            scored.clear();
            for &slot in &candidates {
                scored.push((dot::<S::Wide, V>(&q, &rows[slot * width..][..width]).mul(scale), slot));
            }
            keep(&mut scored, problem.top_k);
            candidates.clear();
            for (_, slot) in &scored {
                candidates.extend(slot * problem.ratio..(slot + 1) * problem.ratio);
            }
        }
        let bank = memory * sizes[0] * width;
        let mut weights = Vec::with_capacity(candidates.len());
        for &slot in &candidates {
            weights.push(dot::<S, V>(&q, &self.call.k[bank + slot * width..][..width]).mul(scale));
        }
        let sum = exponentials::<V>(&mut weights);
        self.attend::<V>(&candidates, &weights, sum, &self.call.v[bank..]);
    }
}

impl<S: Storage> Query<'_, '_, S> {
    /// Writes the average of the candidates' values by their weights, and the candidates' slots.
    #[inline(always)]
    fn attend<V: Vector<Element = S::Wide>>(&self, candidates: &[usize], weights: &[S::Wide], sum: S::Wide, v: &[S]) {
        let width = self.call.problem.levels.width;
        let mut means = vec![V::zero(); width.div_ceil(V::LANES)];
        for (&slot, &weight) in candidates.iter().zip(weights) {
            let weight = V::splat(weight);
            for (mean, values) in means.iter_mut().zip(v[slot * width..][..width].chunks(V::LANES)) {
                *mean = weight.mul_add(S::load(values), *mean);
            }
        }
        // SAFETY: queries share no element of either.
        let (context, slots) = unsafe {
            let slots = self.call.slots.part(self.query * candidates.len(), candidates.len());
            (self.call.context.part(self.query * width, width), slots)
        };
        for (mean, to) in means.iter().zip(context.chunks_mut(V::LANES)) {
            S::store(mean.div(V::splat(sum)), to);
        }
        for (to, &slot) in slots.iter_mut().zip(candidates) {
            *to = slot as i32;
        }
    }
}

/// The dot product of a query and a row.
#[inline(always)]
fn dot<R: Storage, V: Vector<Element = R::Wide>>(q: &[R::Wide], row: &[R]) -> R::Wide {
    let (mut even, mut odd) = (V::zero(), V::zero());
    let (mut of_q, mut of_row) = (q.chunks(2 * V::LANES), row.chunks(2 * V::LANES));
    while let (Some(q), Some(row)) = (of_q.next(), of_row.next()) {
        let half = V::LANES.min(q.len());
        even = V::load_partial(&q[..half]).mul_add(R::load(&row[..half]), even);
        odd = V::load_partial(&q[half..]).mul_add(R::load(&row[half..]), odd);
    }
    even.add(odd).sum()
}

/// Keeps the candidates with the largest scores, in the order of their slots.
fn keep<E: PartialOrd>(scored: &mut Vec<(E, usize)>, most: usize) {
    if scored.len() > most {
        scored.select_nth_unstable_by(most - 1, order);
        scored.truncate(most);
    }
    scored.sort_unstable_by_key(|&(_, slot)| slot);
}

/// Replaces each score by its exponential relative to the largest score; returns their sum.
#[inline(always)]
fn exponentials<V: Vector>(scores: &mut [V::Element]) -> V::Element {
    let mut largest = V::Element::from_f64(f64::NEG_INFINITY);
    for &score in scores.iter() {
        largest = if score > largest { score } else { largest };
    }
    let mut sum = V::zero();
    for scores in scores.chunks_mut(V::LANES) {
        let powers = V::load_partial(scores).sub(V::splat(largest)).exp();
        powers.store_partial(scores);
        // Lanes past the end must not add to the sum.
        sum = sum.add(V::load_partial(scores));
    }
    sum.sum()
}
