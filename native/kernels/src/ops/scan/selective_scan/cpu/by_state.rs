//! One state per lane: the rows of `A`, `B`, `C` and the state are loaded as they are stored, and `y` is a sum over
//! lanes.

use super::call::{Block, Call, ChannelRows, Segment, State, Step};
use crate::cpu::sum::write_sums;
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::tensor::Element;
use std::ops::Range;

/// Scans a segment, and writes the sums of its steps' rates to `rates`. Writes outputs only with `emit`.
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
        let (start, h) = (state.start.map(|start| &start[states.clone()]), &mut state.end[states]);
        match start {
            None => h.fill(S::Wide::from_f64(0.0)),
            Some(start) if segment.time.is_empty() => h.copy_from_slice(start),
            Some(_) => {}
        }
        let block = Block::<V, S>::new(call, segment);
        scan_block(&block, call, start, h, emit).store_partial(&mut rates[done..][..channels]);
        done += channels;
    }
}

/// Scans a block, advancing `h`, whose first step goes on from `start` if there is one; returns the sum of rates.
#[inline(always)]
fn scan_block<V: Vector<Element = S::Wide>, S: Storage>(
    block: &Block<V, S>,
    call: &Call<S>,
    mut start: Option<&[S::Wide]>,
    h: &mut [S::Wide],
    emit: bool,
) -> V {
    let segment = &block.segment;
    let a = call.a_rows(&segment.channels);
    let mut total = V::zero();
    for t in segment.time.clone() {
        let step = block.step(t);
        total = total.add(step.rate);
        let sums = update_block::<V, S>(call, segment, t, &step, a, States { start: start.take(), h });
        if emit {
            call.write_states(segment, t, h);
            call.write(block, t, step.y.add(sums));
        }
    }
    total
}

/// Advances the states of a block by one step; returns each channel's sum weighted by `C`.
///
/// This takes one vector of states of all channels at a time, and all sums over lanes at the end, so that the channels'
/// chains of dependent operations overlap.
#[inline(always)]
fn update_block<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    t: usize,
    step: &Step<V>,
    a: &[S::Wide],
    mut states: States<S::Wide>,
) -> V {
    let lanes = Lanes { rates: step.rate.lanes(), inputs: step.input.lanes(), n: call.problem.state };
    let (b, c) = (call.rows(&call.b, segment, t), call.rows(&call.c, segment, t));
    let mut sums = [V::zero(); MAX_LANES];
    for first in (0..lanes.n).step_by(V::LANES) {
        let range = first..lanes.n.min(first + V::LANES);
        match range.len() == V::LANES && !b.differ && !c.differ {
            true => update_whole::<V, S>(first, &lanes, a, &b, &c, &mut states, &mut sums),
            false => update_any::<V, S>(range, &lanes, a, &b, &c, &mut states, &mut sums),
        }
    }
    let mut values = [S::Wide::from_f64(0.0); MAX_LANES];
    write_sums(&sums[..V::LANES], &mut values, 1);
    V::load(&values)
}

/// The states of a block, and those that a step goes on from, if they are elsewhere.
struct States<'a, E> {
    start: Option<&'a [E]>,
    h: &'a mut [E],
}

impl<E> States<'_, E> {
    /// For each channel of `n` states those before a step, if they are elsewhere, and those that it changes.
    #[inline(always)]
    fn rows(&mut self, n: usize) -> impl Iterator<Item = (Option<&[E]>, &mut [E])> {
        let start = self.start;
        let rows = self.h.chunks_exact_mut(n).enumerate();
        rows.map(move |(lane, h)| (start.map(|start| &start[lane * n..][..n]), h))
    }
}

/// The operands of a step for each channel of a block, and the number of states of a channel.
struct Lanes<E> {
    rates: [E; MAX_LANES],
    inputs: [E; MAX_LANES],
    n: usize,
}

/// Advances a whole vector of states of all channels, which share their rows of `B` and `C`. This is the hot loop, so
/// all that is constant is outside of it.
#[inline(always)]
fn update_whole<V: Vector<Element = S::Wide>, S: Storage>(
    first: usize,
    lanes: &Lanes<S::Wide>,
    a: &[S::Wide],
    b: &ChannelRows<S>,
    c: &ChannelRows<S>,
    states: &mut States<S::Wide>,
    sums: &mut [V; MAX_LANES],
) {
    let (b, c): (V, V) = (S::load(&b.row(0)[first..]), S::load(&c.row(0)[first..]));
    let steps = lanes.rates.iter().zip(&lanes.inputs).zip(sums);
    for ((a, (start, h)), ((&rate, &input), sum)) in a.chunks_exact(lanes.n).zip(states.rows(lanes.n)).zip(steps) {
        let before = V::load(&start.unwrap_or(h)[first..]);
        let new = advance(V::load(&a[first..]), before, V::splat(rate), V::splat(input).mul(b));
        *sum = new.mul_add(c, *sum);
        new.store(&mut h[first..]);
    }
}

/// Advances up to a vector of states of all channels, each with rows of its own.
#[inline(always)]
fn update_any<V: Vector<Element = S::Wide>, S: Storage>(
    range: Range<usize>,
    lanes: &Lanes<S::Wide>,
    a: &[S::Wide],
    b: &ChannelRows<S>,
    c: &ChannelRows<S>,
    states: &mut States<S::Wide>,
    sums: &mut [V; MAX_LANES],
) {
    for (lane, (a, (start, h))) in a.chunks_exact(lanes.n).zip(states.rows(lanes.n)).enumerate() {
        let before = V::load_partial(&start.unwrap_or(h)[range.clone()]);
        let (b, c): (V, V) = (S::load(&b.row(lane)[range.clone()]), S::load(&c.row(lane)[range.clone()]));
        let (rate, input) = (V::splat(lanes.rates[lane]), V::splat(lanes.inputs[lane]));
        let new = advance(V::load_partial(&a[range.clone()]), before, rate, input.mul(b));
        sums[lane] = new.mul_add(c, sums[lane]);
        new.store_partial(&mut h[range.clone()]);
    }
}

/// The recurrence.
#[inline(always)]
fn advance<V: Vector>(a: V, h: V, rate: V, input: V) -> V {
    rate.mul(a).exp2().mul_add(h, input)
}
