//! One state a lane: the rows of `A`, `B`, `C` and the state are read as they lie in memory, and
//! `y` is a sum over lanes.

use super::call::{Block, Call, ChannelRows, Segment, State, Step};
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::tensor::Element;
use std::ops::Range;

/// Scans a segment, and turns `rates` into the sums of its steps' rates. Writes outputs only if told
/// to `emit`.
#[inline(always)]
pub fn scan<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    state: State<'_, S::Wide>,
    rates: &mut [S::Wide],
    emit: bool,
) {
    let mut done = 0;
    for segment in segment.blocks(V::LANES) {
        let channels = segment.channels.len();
        let states = done * call.problem.state..(done + channels) * call.problem.state;
        let h = &mut state.end[states.clone()];
        match state.start {
            Some(start) => h.copy_from_slice(&start[states]),
            None => h.fill(S::Wide::from_f64(0.0)),
        }
        scan_block(&Block::<V, S>::new(call, segment), call, h, emit).store_partial(&mut rates[done..][..channels]);
        done += channels;
    }
}

/// Scans a block, advancing `h`; returns the sum of rates.
#[inline(always)]
fn scan_block<V: Vector<Element = S::Wide>, S: Storage>(
    block: &Block<V, S>,
    call: &Call<S>,
    h: &mut [S::Wide],
    emit: bool,
) -> V {
    let segment = &block.segment;
    let a = call.a_rows(&segment.channels);
    let mut total = V::zero();
    for t in segment.time.clone() {
        let step = block.step(t);
        total = total.add(step.rate);
        let sums = update_block::<V, S>(call, segment, t, &step, a, h);
        if emit {
            call.write_states(segment, t, h);
            block.write(t, step.y.add(sums));
        }
    }
    total
}

/// Advances the states of a block by one step; returns each channel's sum weighted by `C`.
///
/// A vector of states at a time for all channels, and all sums over lanes at the end: so the
/// channels' chains of dependent operations overlap.
#[inline(always)]
fn update_block<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    t: usize,
    step: &Step<V>,
    a: &[S::Wide],
    h: &mut [S::Wide],
) -> V {
    let (rates, inputs, n) = (step.rate.lanes(), step.input.lanes(), call.problem.state);
    let (b, c) = (call.rows(&call.b, segment, t), call.rows(&call.c, segment, t));
    let mut sums = [V::zero(); MAX_LANES];
    for first in (0..n).step_by(V::LANES) {
        let states = first..n.min(first + V::LANES);
        match states.len() == V::LANES {
            true => update::<V, S, true>(states, &rates, &inputs, a, &b, &c, h, &mut sums),
            false => update::<V, S, false>(states, &rates, &inputs, a, &b, &c, h, &mut sums),
        }
    }
    let mut lanes = [S::Wide::from_f64(0.0); MAX_LANES];
    for (lane, sum) in lanes.iter_mut().zip(sums) {
        *lane = sum.sum();
    }
    V::load(&lanes)
}

/// Advances some states of all channels of a block: as many as a vector has lanes, if `FULL`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn update<V: Vector<Element = S::Wide>, S: Storage, const FULL: bool>(
    states: Range<usize>,
    rates: &[S::Wide; MAX_LANES],
    inputs: &[S::Wide; MAX_LANES],
    a: &[S::Wide],
    b: &ChannelRows<S>,
    c: &ChannelRows<S>,
    h: &mut [S::Wide],
    sums: &mut [V; MAX_LANES],
) {
    let n = b.state;
    let (mut b_lane, mut c_lane) = (S::load(&b.row(0)[states.clone()]), S::load(&c.row(0)[states.clone()]));
    let rows = a.chunks_exact(n).zip(h.chunks_exact_mut(n)).zip(sums.iter_mut());
    let steps = rates.iter().zip(inputs);
    for (lane, (((a, h), sum), (&rate, &input))) in rows.zip(steps).enumerate() {
        if b.differ {
            b_lane = S::load(&b.row(lane)[states.clone()]);
        }
        if c.differ {
            c_lane = S::load(&c.row(lane)[states.clone()]);
        }
        let (a, h) = (&a[states.clone()], &mut h[states.clone()]);
        let (a, old) = if FULL { (V::load(a), V::load(h)) } else { (V::load_partial(a), V::load_partial(h)) };
        let new = V::splat(rate).mul(a).exp2().mul_add(old, V::splat(input).mul(b_lane));
        *sum = new.mul_add(c_lane, *sum);
        if FULL { new.store(h) } else { new.store_partial(h) }
    }
}
