//! The scan on the CPU: how the work is divided.
//!
//! A block is `V::LANES` channels. Within a block, [`by_channel`] gives each channel a lane and keeps states in
//! registers over many steps, which is fast for long sequences. [`by_state`] gives each state a lane. It needs no
//! transposition, and so is fast for single steps, for few channels, and where every state is written out.
//!
//! Blocks are independent. Where there are far fewer of them than threads, time is split as well. All chunks are
//! scanned in parallel from zero for the states at their ends. Composing these gives the true states: the decay over a
//! chunk is `exp(A * sum of delta)`. Then the chunks are scanned again from there. [`backward`] is the gradient.

mod backward;
mod by_channel;
mod by_state;
mod call;
mod coefficients;

use super::Problem;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
pub use backward::backward;
use call::{Call, Segment, State};
use std::ops::Range;

/// Scans on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => Plan::<S>::new(problem, inputs, outputs, exec)?.run())
}

/// Below this many state updates waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 16;

/// The fewest steps of a chunk: its end state costs an additional pass.
const SHORTEST_CHUNK: usize = 64;

/// Pieces of work per thread: several, so that other threads can take over from one that is delayed.
const PIECES_PER_THREAD: usize = 8;

/// A call, cut into segments: by channels, then batch, then chunk of time.
struct Plan<'a, S: Storage> {
    call: Call<'a, S>,
    exec: Exec,
    /// Channels of a segment; the last one may have fewer.
    width: usize,
    chunks: usize,
    by_state: bool,
}

/// The initial states of a pass over all segments, and its outputs.
#[derive(Clone, Copy)]
enum Pass<'p, E> {
    /// Scans from the initial state and writes the outputs. For segments as long as the sequence.
    Whole,
    /// Scans from zero, and writes each segment's end state and its sum of rates.
    Ends { states: &'p Shared<'p, E>, rates: &'p Shared<'p, E> },
    /// Scans from the end state of the segment before, and writes the outputs.
    From { states: &'p [E] },
}

impl<'a, S: Storage> Plan<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, outputs: Named<ViewMut<'a>>, exec: &Exec) -> Result<Self> {
        let Problem { batch, length, channels, state, .. } = *problem;
        let lanes = S::Wide::dispatch(exec.level, Lanes);
        let updates = batch.saturating_mul(length).saturating_mul(channels * state.max(1));
        let threads = pool::worth(pool::checked(exec.threads)?, updates, WORTH_SHARING);
        let chunks = chunks(batch * channels.div_ceil(lanes), length, threads);
        let by_state = problem.options.return_states || by_state_is_faster(problem, lanes);
        let width = lanes * blocks_together(batch * channels.div_ceil(lanes) * chunks, threads);
        let call = Call::new(problem, inputs, outputs)?;
        Ok(Plan { call, exec: Exec { threads, ..*exec }, width, chunks, by_state })
    }

    fn run(&self) -> Result<()> {
        if self.chunks == 1 {
            return self.each(Pass::Whole);
        }
        let zero = S::Wide::from_f64(0.0);
        let mut states = vec![zero; self.segments() * self.states()];
        let mut rates = vec![zero; self.segments() * self.width];
        let (s, r) = (Shared::new(&mut states), Shared::new(&mut rates));
        self.each(Pass::Ends { states: &s, rates: &r })?;
        self.compose(&mut states, &rates);
        self.each(Pass::From { states: &states })
    }

    /// States in a segment of full width.
    fn states(&self) -> usize {
        self.width * self.call.problem.state
    }

    fn segments(&self) -> usize {
        let Problem { batch, channels, .. } = *self.call.problem;
        channels.div_ceil(self.width) * batch * self.chunks
    }

    // Channels outermost: segments of the same channels follow each other and share transposed `A`.
    fn segment(&self, i: usize) -> Segment {
        let Problem { batch, length, channels, .. } = *self.call.problem;
        let (i, chunk) = (i / self.chunks, i % self.chunks);
        let (panel, batch) = (i / batch, i % batch);
        let first = panel * self.width;
        let start = |chunk: usize| chunk * length / self.chunks;
        Segment { batch, channels: first..channels.min(first + self.width), time: start(chunk)..start(chunk + 1) }
    }

    fn each(&self, pass: Pass<S::Wide>) -> Result<()> {
        let segments = self.segments();
        let pieces = segments.min(self.exec.threads * PIECES_PER_THREAD);
        pool::for_each(self.exec.threads, pieces, |piece| {
            let range = piece * segments / pieces..(piece + 1) * segments / pieces;
            S::Wide::dispatch(self.exec.level, Piece { plan: self, pass, range });
        })
    }

    /// Turns end states of chunks that were scanned from zero into true ones, in place. The first chunk started from
    /// the initial state, so its end state is true already.
    fn compose(&self, states: &mut [S::Wide], rates: &[S::Wide]) {
        for i in (0..self.segments()).filter(|i| i % self.chunks > 0) {
            let channels = self.segment(i).channels;
            let (before, from_zero) = states.split_at_mut(i * self.states());
            let before = &before[(i - 1) * self.states()..];
            for (lane, channel) in channels.enumerate() {
                let rate = rates[i * self.width + lane];
                let n = self.call.problem.state;
                let row = lane * n..(lane + 1) * n;
                let a = self.call.a_row(channel);
                for ((end, &start), &a) in from_zero[row.clone()].iter_mut().zip(&before[row]).zip(a) {
                    *end = rate.mul(a).exp2().mul_add(start, *end);
                }
            }
        }
    }
}

/// The number of chunks of time: 1 unless at least three can run in parallel, since chunks are scanned twice.
fn chunks(independent: usize, length: usize, threads: usize) -> usize {
    let chunks = (threads / independent.max(1)).min(length / SHORTEST_CHUNK);
    if chunks >= 3 { chunks } else { 1 }
}

/// The number of blocks of a segment: several, if that leaves at least two segments for each thread.
fn blocks_together(blocks: usize, threads: usize) -> usize {
    (blocks / (threads * 2)).clamp(1, by_channel::BLOCKS)
}

/// Compares numbers of vector operations: with states in lanes, the sum over lanes adds about half to the cost of a
/// state.
fn by_state_is_faster(problem: &Problem, lanes: usize) -> bool {
    const TOO_SHORT_TO_TRANSPOSE: usize = 4;
    let Problem { length, channels, state, .. } = *problem;
    let by_state = channels * state.div_ceil(lanes) * 3;
    let by_channel = channels.div_ceil(lanes) * state * 2;
    length <= TOO_SHORT_TO_TRANSPOSE || by_state < by_channel
}

/// Returns the number of lanes of a level.
struct Lanes;

impl<E: Real> Work<E> for Lanes {
    type Output = usize;
    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) -> usize {
        V::LANES
    }
}

/// A range of segments, scanned by one thread.
struct Piece<'p, 'a, S: Storage> {
    plan: &'p Plan<'a, S>,
    pass: Pass<'p, S::Wide>,
    range: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for Piece<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (plan, zero) = (self.plan, S::Wide::from_f64(0.0));
        let blocks = if plan.by_state { 0 } else { plan.width / V::LANES };
        let mut scratch = by_channel::Scratch::<V>::new(blocks, plan.call.problem.state);
        let (mut spare_h, mut spare_rates) = (Vec::new(), vec![zero; plan.width]);
        let mut next = Some(plan.segment(self.range.start));
        for i in self.range.clone() {
            let Some(segment) = next else { break };
            next = if self.range.contains(&(i + 1)) { Some(plan.segment(i + 1)) } else { None };
            let (h, rates) = self.ends(i, &segment, &mut spare_h, &mut spare_rates);
            let emit = !matches!(self.pass, Pass::Ends { .. });
            if plan.by_state {
                by_state::scan::<V, S>(&plan.call, &segment, h, rates, emit);
            } else {
                by_channel::scan::<V, S>(&plan.call, &segment, next.as_ref(), h, rates, &mut scratch, emit);
            }
        }
    }
}

impl<S: Storage> Piece<'_, '_, S> {
    /// The states of segment `i` at its start and its end, and the buffer for its sums of rates.
    fn ends<'s>(
        &'s self,
        i: usize,
        segment: &Segment,
        spare_h: &'s mut Vec<S::Wide>,
        spare_rates: &'s mut [S::Wide],
    ) -> (State<'s, S::Wide>, &'s mut [S::Wide]) {
        let (plan, channels) = (self.plan, segment.channels.len());
        let states = channels * plan.call.problem.state;
        let last = segment.time.end == plan.call.problem.length;
        let (wanted, rates) = match self.pass {
            // SAFETY: every segment has its own part of both.
            Pass::Ends { states: ends, rates } => unsafe {
                (Some(ends.part(i * plan.states(), states)), rates.part(i * plan.width, channels))
            },
            // SAFETY: of the segments of the same channels and batch only one is the last.
            _ if last => (unsafe { plan.call.last_state(segment) }, &mut spare_rates[..channels]),
            _ => (None, &mut spare_rates[..channels]),
        };
        let keep = wanted.is_some();
        let end = wanted.unwrap_or_else(|| {
            spare_h.resize(plan.states(), S::Wide::from_f64(0.0));
            &mut spare_h[..states]
        });
        (State { start: self.start(i, segment, states), end, keep }, rates)
    }

    /// The `len` states that a segment starts from; `None` stands for zeros.
    fn start(&self, i: usize, segment: &Segment, len: usize) -> Option<&[S::Wide]> {
        match self.pass {
            _ if segment.time.start == 0 => self.plan.call.initial_state(segment),
            Pass::From { states } => Some(&states[(i - 1) * self.plan.states()..][..len]),
            _ => None,
        }
    }
}
