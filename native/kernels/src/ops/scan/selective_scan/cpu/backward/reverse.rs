//! The innermost loops: a few states of a block over a tile, forwards to recompute them, then backwards.

use super::super::call::{BackStep, Soon};
use super::super::coefficients::Rows;
use crate::cpu::{Vector, unrolled};

/// The most states that go through a tile together, limited by the registers. The values that are kept between the two
/// loops, and the sums, should stay in the first-level cache.
pub const MOST: usize = 4;

/// The number of states, out of `left`, that go through a tile together next.
pub fn together(left: usize) -> usize {
    if left < MOST { 1 } else { MOST }
}

/// A state in the forward loop: its decay in a step, and its value before the step.
#[derive(Clone, Copy)]
pub struct Kept<V> {
    decay: V,
    before: V,
}

impl<V: Vector> Kept<V> {
    pub fn zero() -> Self {
        Kept { decay: V::zero(), before: V::zero() }
    }
}

/// The states of a block: one vector each.
pub struct States<'s, V> {
    /// The first of the states that go through the tile.
    pub first: usize,
    pub a: &'s [V],
    /// The states before the tile.
    pub start: &'s [V],
    /// `a[t+1] g[t+1]`: after the tile, then before it.
    pub carry: &'s mut [V],
    /// The gradient of `A` so far, times `log2(e)`.
    pub da: &'s mut [V],
}

/// The sums for the gradient of B or C, with channels still in lanes: a row of states for each step.
pub struct Sums<'s, V> {
    pub values: &'s mut [V],
    /// Vectors from row to row, or 0 where all steps add to the same row.
    pub stride: usize,
}

/// Whether a row of `states` states is folded into one vector by [`Vector::fold`]. That is for blocks whose channels
/// share B and C: it saves loads and stores.
const fn folds<V: Vector>(shared: bool, states: usize) -> bool {
    shared && states == MOST && V::LANES >= MOST
}

/// Vectors of a row of `states` states.
pub const fn stride<V: Vector>(shared: bool, states: usize) -> usize {
    if folds::<V>(shared, states) { 1 } else { states }
}

impl<V: Vector> Sums<'_, V> {
    /// Adds the products of `a` and `b` for `K` states at a step.
    #[inline(always)]
    fn add<B: Rows<V>, const K: usize>(&mut self, step: usize, a: [V; K], b: V) {
        if folds::<V>(B::SHARED, K) {
            let products = [a[0].mul(b), a[1 % K].mul(b), a[2 % K].mul(b), a[3 % K].mul(b)];
            self.values[step] = self.values[step].add(V::fold(products));
        } else {
            let row: &mut [V; K] = self.values[step * self.stride..].first_chunk_mut().expect("a full row");
            unrolled!(k < K, {
                row[k] = a[k].mul_add(b, row[k]);
            });
        }
    }
}

/// Cotangents of the states themselves, if there are any.
pub trait Cotangents<V>: Copy {
    /// `g` plus the cotangent of a state at a step; `state` counts from the first of those that go through the tile
    /// together.
    fn add_to(self, g: V, step: usize, state: usize) -> V;
}

impl<V> Cotangents<V> for () {
    #[inline(always)]
    fn add_to(self, g: V, _step: usize, _state: usize) -> V {
        g
    }
}

/// One vector for each step and state, with a stride of [`MOST`] states.
#[derive(Clone, Copy)]
pub struct Given<'s, V> {
    pub values: &'s [V],
}

impl<V: Vector> Cotangents<V> for Given<'_, V> {
    #[inline(always)]
    fn add_to(self, g: V, step: usize, state: usize) -> V {
        g.add(self.values[step * MOST + state])
    }
}

/// Takes `K` states of a block through a tile, forwards and back. Prefetches a row each step.
#[inline(always)]
pub fn reverse<V: Vector, B: Rows<V>, C: Rows<V>, G: Cotangents<V>, const NEARBY: bool, const K: usize>(
    steps: &mut [BackStep<V>],
    states: &mut States<'_, V>,
    (b, c): (B, C),
    [db, dc]: [&mut Sums<'_, V>; 2],
    cotangents: G,
    kept: &mut [Kept<V>],
    soon: Soon,
) {
    let first = states.first;
    let a: &[V; K] = states.a[first..].first_chunk().expect("a full block");
    let mut h: [V; K] = *states.start[first..].first_chunk().expect("a full block");
    // Loops with a counter: the compiler does not inline the equivalent iterators, which are too large.
    let count = steps.len();
    let kept = &mut kept.as_chunks_mut::<K>().0[..count];
    let mut t = 0;
    while t < count {
        soon.ask(t);
        let (step, kept, b) = (&steps[t], &mut kept[t], b.row::<K>(t, first));
        unrolled!(k < K, {
            let log_decay = step.rate.mul(a[k]);
            let decay = if NEARBY { log_decay.exp2_near() } else { log_decay.exp2() };
            kept[k] = Kept { decay, before: h[k] };
            h[k] = decay.mul_add(h[k], step.input.mul(B::vector(b[k])));
        });
        t += 1;
    }

    let carried: &mut [V; K] = states.carry[first..].first_chunk_mut().expect("a full block");
    let summed: &mut [V; K] = states.da[first..].first_chunk_mut().expect("a full block");
    let (mut carry, mut da) = (*carried, *summed);
    while t > 0 {
        t -= 1;
        let (step, kept) = (&mut steps[t], &kept[t]);
        let (b, c) = (b.row::<K>(t, first), c.row::<K>(t, first));
        let (mut ddelta, mut dinput, mut gs) = (step.ddelta, step.dinput, [V::zero(); K]);
        dc.add::<B, K>(t, h, step.dy);
        unrolled!(k < K, {
            let g = cotangents.add_to(C::vector(c[k]).mul_add(step.dy, carry[k]), t, k);
            carry[k] = kept[k].decay.mul(g);
            let dlog_decay = carry[k].mul(kept[k].before);
            ddelta = a[k].mul_add(dlog_decay, ddelta);
            dinput = B::vector(b[k]).mul_add(g, dinput);
            da[k] = step.rate.mul_add(dlog_decay, da[k]);
            gs[k] = g;
            h[k] = kept[k].before;
        });
        db.add::<B, K>(t, gs, step.input);
        (step.ddelta, step.dinput) = (ddelta, dinput);
    }
    (*carried, *summed) = (carry, da);
}
