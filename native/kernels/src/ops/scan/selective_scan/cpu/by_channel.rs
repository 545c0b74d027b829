//! One channel per lane, time as the loop, up to [`MOST`] states at once in registers.
//!
//! Time is divided into tiles, and within a tile the work goes block by block: the step sizes are computed first, then
//! the states are advanced, a few at a time, then the outputs are gated and written. So the data of a block stays in
//! the first-level cache while it advances, for any number of states. Memory is read and written nearly in order, where
//! one block over all time would take a line from each of many pages. The next tile is prefetched while this one is
//! computed.
//!
//! The limit, for AVX-512 and 16 state steps (one state of 16 channels): 12 vector operations, of
//! which 9 need a multiplier (the rate, five of `2^f`, the input, the state, the output). Two 512-bit
//! ports do the 12 in 6 cycles; Zen 4, whose multipliers do one 512-bit operation a cycle between
//! them, needs 9, and a loop of nothing else takes 2.53 ns there (3.6 GHz). So on two such cores the
//! reference workload (32 x 60 x 512 x 16) cannot take less than 1.24 ms, and the layer of
//! mamba-130m (1 x 2048 x 1536 x 16) not less than 3.98 ms.
//!
//! History, milliseconds on two Zen 4 cores for these two, with one thread and with two:
//!
//! ```text
//! version 1  one block at a time over all its steps                       5.0  2.3   20.2  20.2
//! version 2  eight blocks to a row                                        4.1  2.4   15.3  15.7
//! version 3  a tile of time at a time, block by block, and prefetching    3.2  1.65  10.7   5.3
//! ```
//!
//! The time above the limit is first reads of `x` and `dt` and writes of `y`. Tried without gain: 2^f from a table of
//! 16 with a shorter polynomial (the permutation shares a port), rounding by adding a large number (as fast),
//! prefetching within one block's tile (its rows share few sets).

use super::call::{Block, Call, Segment, Soon, State, Step};
use super::coefficients::{Both, Rows, Tile, are_shared, fill};
use crate::cpu::vector::{Loops, MAX_LANES, NEAR};
use crate::cpu::{Storage, Vector, unrolled};
use crate::tensor::Element;
use std::ops::Range;

/// Steps in a tile.
const TILE: usize = 32;

/// The most blocks of a segment: more would push a tile out of the second-level cache.
pub const BLOCKS: usize = 64;

/// The most states that are advanced together.
const MOST: usize = 16;

/// The workspace of a thread.
pub struct Scratch<V: Vector> {
    steps: Vec<Step<V>>,
    /// Block after block.
    a: Vec<V>,
    /// The channels that `a` belongs to.
    a_of: Range<usize>,
    /// Block after block.
    h: Vec<V>,
    totals: Vec<V>,
    b: Tile<V>,
    c: Tile<V>,
}

impl<V: Vector> Scratch<V> {
    /// Allocates the workspace for segments of at most `blocks` blocks.
    pub fn new(blocks: usize, state: usize) -> Self {
        let zero = V::zero();
        Scratch {
            steps: vec![Step::zero(); TILE.min(blocks * TILE)],
            a: vec![zero; blocks * state],
            a_of: 0..0,
            h: vec![zero; blocks * state],
            totals: vec![zero; blocks],
            b: Tile::new(),
            c: Tile::new(),
        }
    }
}

/// Scans a segment, and writes the sums of its steps' rates to `rates`. Writes outputs only with `emit`. Prefetches the
/// start of the `next` segment of this thread.
#[inline(always)]
pub fn scan<V: Vector<Element = S::Wide>, S: Storage>(
    call: &Call<S>,
    segment: &Segment,
    next: Option<&Segment>,
    h: State<'_, S::Wide>,
    rates: &mut [S::Wide],
    scratch: &mut Scratch<V>,
    emit: bool,
) {
    let state = call.problem.state;
    if scratch.a_of != segment.channels {
        transpose_in(call.a_rows(&segment.channels), state, &mut scratch.a);
        scratch.a_of = segment.channels.clone();
    }
    match h.start {
        None => scratch.h.fill(V::zero()),
        Some(start) => transpose_in(start, state, &mut scratch.h),
    }
    scratch.totals.fill(V::zero());
    let arrays = call.sequences();
    for start in segment.time.clone().step_by(TILE) {
        let tile = Segment { time: start..segment.time.end.min(start + TILE), ..segment.clone() };
        let soon = Soon::of(&arrays, call, after(&tile, segment, next).as_ref());
        for (i, block) in tile.blocks(V::LANES).enumerate() {
            scan_block(&Block::<V, S>::new(call, block), i, call, scratch, soon.block(i * V::LANES), emit);
        }
    }
    if h.keep {
        transpose_out(&scratch.h, state, h.end);
    }
    for (rates, &total) in rates.chunks_mut(V::LANES).zip(&scratch.totals) {
        total.store_partial(rates);
    }
}

/// The tile after a tile: later in this segment, or at the start of the next one.
fn after(tile: &Segment, segment: &Segment, next: Option<&Segment>) -> Option<Segment> {
    let (from, start) = match next {
        _ if tile.time.end < segment.time.end => (segment, tile.time.end),
        Some(next) => (next, next.time.start),
        None => return None,
    };
    Some(Segment { time: start..from.time.end.min(start + TILE), ..from.clone() })
}

/// Scans block number `i` over a tile.
#[inline(always)]
fn scan_block<V: Vector<Element = S::Wide>, S: Storage>(
    block: &Block<V, S>,
    i: usize,
    call: &Call<S>,
    scratch: &mut Scratch<V>,
    soon: Soon,
    emit: bool,
) {
    let time = block.segment.time.clone();
    let steps = &mut scratch.steps[..time.len()];
    for (step, t) in steps.iter_mut().zip(time.clone()) {
        *step = block.step(t);
        scratch.totals[i] = scratch.totals[i].add(step.rate);
    }
    let states = i * call.problem.state..(i + 1) * call.problem.state;
    let (a, h) = (&scratch.a[states.clone()], &mut scratch.h[states]);
    let shared = are_shared(call, &block.segment);
    let both = fill(call, &block.segment, shared, 0..call.problem.state, [&mut scratch.b, &mut scratch.c]);
    V::apart(Advance { steps, a, h, both, soon });
    if emit {
        for (step, t) in steps.iter().zip(time) {
            call.write(block, t, step.y);
        }
    }
}

/// Advances all states over a tile, and prefetches other rows meanwhile.
pub struct Advance<'s, V: Vector> {
    pub steps: &'s mut [Step<V>],
    pub a: &'s [V],
    pub h: &'s mut [V],
    pub both: Both<'s, V>,
    pub soon: Soon<'s>,
}

impl<V: Vector> Loops for Advance<'_, V> {
    #[inline(always)]
    fn run(self) {
        let Advance { steps, a, h, both, soon } = self;
        match both {
            Both::Same(b, c) if decays_are_near(steps.iter().map(|step| &step.rate), a) => {
                advance_as::<V, _, _, true>(steps, a, h, b, c, soon)
            }
            Both::Same(b, c) => advance_as::<V, _, _, false>(steps, a, h, b, c, soon),
            Both::Own(b, c) => advance_as::<V, _, _, false>(steps, a, h, b, c, soon),
        }
    }
}

/// Whether every rate times every `a` is in the range of [`Vector::exp2_near`].
#[inline(always)]
pub fn decays_are_near<'s, V: Vector + 's>(rates: impl Iterator<Item = &'s V>, a: &[V]) -> bool {
    let (mut rate, mut most, mut zeros) = (V::zero(), V::zero(), V::zero());
    // A maximum may drop a NaN, so sums of products with zero propagate it.
    for value in rates {
        rate = rate.max(value.abs());
        zeros = value.mul_add(V::zero(), zeros);
    }
    for value in a {
        most = most.max(value.abs());
        zeros = value.mul_add(V::zero(), zeros);
    }
    let mut near = true;
    for lane in &rate.mul_add(most, zeros).lanes()[..V::LANES] {
        near &= lane.to_f64() <= NEAR;
    }
    near
}

/// Advances all states, in groups that fit in registers.
#[inline(always)]
fn advance_as<V: Vector, B: Rows<V>, C: Rows<V>, const NEARBY: bool>(
    steps: &mut [Step<V>],
    a: &[V],
    h: &mut [V],
    b: B,
    c: C,
    soon: Soon,
) {
    let mut first = 0;
    while h.len() - first >= MOST {
        advance::<V, B, C, NEARBY, MOST>(steps, a, h, b, c, first, soon);
        first += MOST;
    }
    while h.len() - first >= 4 {
        advance::<V, B, C, NEARBY, 4>(steps, a, h, b, c, first, soon);
        first += 4;
    }
    while h.len() > first {
        advance::<V, B, C, NEARBY, 1>(steps, a, h, b, c, first, soon);
        first += 1;
    }
}

/// Advances states `first` to `first + K` over a tile and adds their part of `y`.
#[inline(always)]
fn advance<V: Vector, B: Rows<V>, C: Rows<V>, const NEARBY: bool, const K: usize>(
    steps: &mut [Step<V>],
    a: &[V],
    h: &mut [V],
    b: B,
    c: C,
    first: usize,
    soon: Soon,
) {
    let a: &[V; K] = a[first..].first_chunk().expect("a full block");
    let h: &mut [V; K] = h[first..].first_chunk_mut().expect("a full block");
    let mut state = *h;
    for (t, step) in steps.iter_mut().enumerate() {
        if first == 0 {
            soon.ask(t);
        }
        let (b, c) = (b.row::<K>(t, first), c.row::<K>(t, first));
        // Two sums, since one would be a chain of K dependent additions.
        let mut y = [step.y, V::zero()];
        unrolled!(k < K, {
            let log_decay = step.rate.mul(a[k]);
            let decay = if NEARBY { log_decay.exp2_near() } else { log_decay.exp2() };
            state[k] = decay.mul_add(state[k], step.input.mul(B::vector(b[k])));
            y[k % 2] = C::vector(c[k]).mul_add(state[k], y[k % 2]);
        });
        step.y = y[0].add(y[1]);
    }
    *h = state;
}

/// Transposes rows of states, one per channel, to vectors of channels, one per state, block after block. Missing
/// channels are zero.
#[inline(always)]
pub fn transpose_in<V: Vector>(rows: &[V::Element], state: usize, vectors: &mut [V]) {
    let mut from = 0;
    while from < rows.len() {
        let rows = &rows[from..rows.len().min(from + V::LANES * state)];
        for n in 0..state {
            let mut lanes = [V::Element::from_f64(0.0); MAX_LANES];
            for lane in 0..rows.len() / state {
                lanes[lane] = rows[lane * state + n];
            }
            vectors[from / V::LANES + n] = V::load(&lanes);
        }
        from += V::LANES * state;
    }
}

/// The inverse of [`transpose_in`], for the channels of `rows`.
#[inline(always)]
pub fn transpose_out<V: Vector>(vectors: &[V], state: usize, rows: &mut [V::Element]) {
    let mut from = 0;
    while from < rows.len() {
        let to = rows.len().min(from + V::LANES * state);
        let rows = &mut rows[from..to];
        for n in 0..state {
            let lanes = vectors[from / V::LANES + n].lanes();
            for lane in 0..rows.len() / state {
                rows[lane * state + n] = lanes[lane];
            }
        }
        from += V::LANES * state;
    }
}
