//! The tensors of a call, and the common part of both kernels: the step size before the states
//! are advanced, and skip and gate after.

use crate::cpu::pool::Shared;
use crate::cpu::{Storage, Vector, math, prefetch, unrolled};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::selective_scan::{Form, Problem};
use crate::ops::scan::step_size::Lanes;
use crate::tensor::{View, ViewMut};
use std::ops::{Deref, Range};

/// The part of a call that one run of a kernel covers: a batch, a range of channels and a range of time.
#[derive(Clone)]
pub struct Segment {
    pub batch: usize,
    pub channels: Range<usize>,
    pub time: Range<usize>,
}

/// The states at both ends of a segment, one row per channel.
pub struct State<'h, E> {
    /// The states at its start; `None` stands for zeros.
    pub start: Option<&'h [E]>,
    /// The states at its end.
    pub end: &'h mut [E],
    /// Whether `end` is used afterwards.
    pub keep: bool,
}

impl Segment {
    /// The segment of each block of at most `lanes` channels.
    #[inline(always)]
    pub fn blocks(&self, lanes: usize) -> impl Iterator<Item = Segment> + '_ {
        let Range { start, end } = self.channels;
        (start..end)
            .step_by(lanes)
            .map(move |first| Segment { channels: first..end.min(first + lanes), ..self.clone() })
    }
}

/// Rows to prefetch while others are computed, of sequences like `x`.
#[derive(Clone, Copy)]
pub struct Soon<'s> {
    /// The addresses of the sequences, and the size of their elements.
    arrays: &'s [*const u8],
    size: usize,
    ahead: Ahead,
}

impl<'s> Soon<'s> {
    /// The rows of a segment, or none.
    pub fn of<S: Storage>(arrays: &'s [*const u8], inputs: &Inputs<S>, segment: Option<&Segment>) -> Self {
        Soon { arrays, size: size_of::<S>(), ahead: Ahead::of(inputs, segment) }
    }

    /// The rows of the block that begins `channels` after the first.
    #[inline(always)]
    pub fn block(self, channels: usize) -> Self {
        Soon { ahead: self.ahead.block(channels), ..self }
    }

    /// The share of the sequences to prefetch while the states `some` of `count` are computed.
    #[inline(always)]
    pub fn share(self, some: &Range<usize>, count: usize) -> Self {
        let len = self.arrays.len();
        Soon { arrays: &self.arrays[some.start * len / count..some.end * len / count], ..self }
    }

    /// Prefetches the row of a step, if there is one.
    #[inline(always)]
    pub fn ask(self, step: usize) {
        if let Some(at) = self.ahead.row(step) {
            let at = at * self.size;
            // The forward scan has four, which need no loop.
            let (fours, rest) = self.arrays.as_chunks::<4>();
            for four in fours {
                unrolled!(i < 4, {
                    prefetch(four[i], at);
                });
            }
            for &array in rest {
                prefetch(array, at);
            }
        }
    }
}

/// The offsets of rows.
#[derive(Clone, Copy)]
struct Ahead {
    at: usize,
    stride: usize,
    rows: usize,
}

impl Ahead {
    /// The rows of a segment, or none.
    fn of<S: Storage>(inputs: &Inputs<S>, segment: Option<&Segment>) -> Ahead {
        let stride = inputs.problem.channels;
        match segment {
            Some(segment) => Ahead { at: inputs.offset(segment, segment.time.start), stride, rows: segment.time.len() },
            None => Ahead { at: 0, stride, rows: 0 },
        }
    }

    /// The rows of the block that begins `channels` further on.
    #[inline(always)]
    fn block(self, channels: usize) -> Ahead {
        Ahead { at: self.at + channels, ..self }
    }

    /// The offset of a row in sequences like `x`, or `None` past the last row.
    #[inline(always)]
    fn row(self, step: usize) -> Option<usize> {
        if step < self.rows { Some(self.at + step * self.stride) } else { None }
    }
}

/// `B` or `C`: rows of states, in any form.
pub struct Coefficient<'a, S> {
    values: &'a [S],
    pub form: Form,
}

/// The rows of `B` or `C` at one time, by channel.
pub struct ChannelRows<'a, S> {
    values: &'a [S],
    /// The length of a row.
    pub state: usize,
    first: usize,
    /// The number of channels that share a row.
    per_row: usize,
    /// Whether the segment's channels have different rows.
    pub differ: bool,
}

impl<'a, S> ChannelRows<'a, S> {
    /// The row of the channel that comes `lane` after the first.
    #[inline(always)]
    pub fn row(&self, lane: usize) -> &'a [S] {
        &self.values[(self.first + lane) / self.per_row * self.state..][..self.state]
    }
}

/// The typed inputs of a scan.
pub struct Inputs<'a, S: Storage> {
    pub problem: &'a Problem,
    pub b: Coefficient<'a, S>,
    pub c: Coefficient<'a, S>,
    pub x: &'a [S],
    pub dt: &'a [S],
    pub z: Option<&'a [S]>,
    a: &'a [S::Wide],
    d: Option<&'a [S::Wide]>,
    dt_bias: Option<&'a [S::Wide]>,
    initial_state: Option<&'a [S::Wide]>,
}

impl<'a, S: Storage> Inputs<'a, S> {
    pub fn new(problem: &'a Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        let storage = |name: &str| inputs.get(name)?.slice::<S>();
        let wide = |name: &str| inputs.find(name).map(View::slice::<S::Wide>).transpose();
        Ok(Inputs {
            problem,
            b: Coefficient { values: storage("B")?, form: problem.b },
            c: Coefficient { values: storage("C")?, form: problem.c },
            x: storage("x")?,
            dt: storage("dt")?,
            z: inputs.find("z").map(View::slice::<S>).transpose()?,
            a: inputs.get("A")?.slice::<S::Wide>()?,
            d: wide("D")?,
            dt_bias: wide("dt_bias")?,
            initial_state: wide("initial_state")?,
        })
    }

    /// The row of `A` of one channel.
    #[inline(always)]
    pub fn a_row(&self, channel: usize) -> &'a [S::Wide] {
        &self.a[channel * self.problem.state..][..self.problem.state]
    }

    /// The rows of `A` of a range of channels.
    #[inline(always)]
    pub fn a_rows(&self, channels: &Range<usize>) -> &'a [S::Wide] {
        &self.a[channels.start * self.problem.state..channels.end * self.problem.state]
    }

    /// The index of the row of `B` or `C` for a batch, a time and a channel.
    #[inline(always)]
    pub fn row_index(&self, of: &Coefficient<'a, S>, batch: usize, t: usize, channel: usize) -> usize {
        let Problem { length, channels, .. } = *self.problem;
        match of.form {
            Form::Constant => channel,
            Form::PerStep { groups: 1 } => batch * length + t,
            Form::PerStep { groups } => (batch * length + t) * groups + channel / (channels / groups),
        }
    }

    /// The row of `B` or `C` for a batch, a time and a channel.
    #[inline(always)]
    pub fn row(&self, of: &Coefficient<'a, S>, batch: usize, t: usize, channel: usize) -> &'a [S] {
        let state = self.problem.state;
        &of.values[self.row_index(of, batch, t, channel) * state..][..state]
    }

    /// The rows of `B` or `C` of a segment's channels at a time.
    #[inline(always)]
    pub fn rows(&self, of: &Coefficient<'a, S>, segment: &Segment, t: usize) -> ChannelRows<'a, S> {
        let Problem { channels, state, .. } = *self.problem;
        let start = self.row_index(of, segment.batch, t, 0) * state;
        let per_row = match of.form {
            Form::Constant => 1,
            Form::PerStep { groups } => channels / groups,
        };
        ChannelRows {
            values: &of.values[start..],
            state,
            first: segment.channels.start,
            per_row,
            differ: segment.channels.start / per_row != (segment.channels.end - 1) / per_row,
        }
    }

    /// A segment's rows of `initial_state`, if it was given.
    pub fn initial_state(&self, segment: &Segment) -> Option<&'a [S::Wide]> {
        let len = segment.channels.len() * self.problem.state;
        Some(&self.initial_state?[self.state_offset(segment)..][..len])
    }

    /// The offset of a segment's states in `initial_state` and `last_state`.
    #[inline(always)]
    pub fn state_offset(&self, segment: &Segment) -> usize {
        (segment.batch * self.problem.channels + segment.channels.start) * self.problem.state
    }

    /// The offset of step `t` of a segment in `x`, `dt`, `z` and `y`.
    #[inline(always)]
    pub fn offset(&self, segment: &Segment, t: usize) -> usize {
        (segment.batch * self.problem.length + t) * self.problem.channels + segment.channels.start
    }
}

/// The typed tensors of a call.
pub struct Call<'a, S: Storage> {
    inputs: Inputs<'a, S>,
    y: Shared<'a, S>,
    last_state: Option<Shared<'a, S::Wide>>,
    states: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Deref for Call<'a, S> {
    type Target = Inputs<'a, S>;
    #[inline(always)]
    fn deref(&self) -> &Inputs<'a, S> {
        &self.inputs
    }
}

impl<'a, S: Storage> Call<'a, S> {
    pub fn new(problem: &'a Problem, inputs: &Named<View<'a>>, mut outputs: Named<ViewMut<'a>>) -> Result<Self> {
        let mut wide_output = |name: &str| {
            let view = outputs.take(name).map(ViewMut::slice::<S::Wide>).transpose();
            Ok(view?.map(Shared::new))
        };
        Ok(Call {
            inputs: Inputs::new(problem, inputs)?,
            last_state: wide_output("last_state")?,
            states: wide_output("states")?,
            y: Shared::new(outputs.expect("y")?.slice::<S>()?),
        })
    }

    /// Gates and writes `y` of step `t` of a block.
    #[inline(always)]
    pub fn write<V: Vector<Element = S::Wide>>(&self, block: &Block<V, S>, t: usize, y: V) {
        let segment = &block.segment;
        // SAFETY: segments share no element of (batch, time, channel).
        let to = unsafe { self.y.part(self.offset(segment, t), segment.channels.len()) };
        S::store(block.gated(t, y), to);
    }

    /// A segment's rows of `last_state`, if it is wanted.
    ///
    /// # Safety
    /// May be called at most once for these channels of this batch.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn last_state(&self, segment: &Segment) -> Option<&mut [S::Wide]> {
        let len = segment.channels.len() * self.problem.state;
        // SAFETY: segments share no channels within a batch, and the caller calls this once for each.
        Some(unsafe { self.last_state.as_ref()?.part(self.state_offset(segment), len) })
    }

    /// Writes the states after step `t`, if they are wanted.
    #[inline(always)]
    pub fn write_states(&self, segment: &Segment, t: usize, h: &[S::Wide]) {
        if let Some(states) = &self.states {
            let start = self.offset(segment, t) * self.problem.state;
            // SAFETY: segments share no element of (batch, time, channel).
            unsafe { states.part(start, h.len()) }.copy_from_slice(h);
        }
    }

    /// The addresses of the sequences that a step reads and writes, for prefetches.
    pub fn sequences(&self) -> [*const u8; 4] {
        let x = self.x.as_ptr();
        // Four in any case; a line that is asked for twice costs nothing.
        [x, self.dt.as_ptr(), self.z.map_or(x, <[S]>::as_ptr), self.y.as_ptr()].map(<*const S>::cast)
    }
}

/// One time step of a block of channels, each in its lane.
#[derive(Clone, Copy)]
pub struct Step<V> {
    /// `delta * log2(e)`: the decay of a state is `2^(rate * A)`.
    pub rate: V,
    /// `delta * x`.
    pub input: V,
    /// The part of `y` that is summed so far.
    pub y: V,
}

impl<V: Vector> Step<V> {
    pub fn zero() -> Self {
        Step { rate: V::zero(), input: V::zero(), y: V::zero() }
    }
}

/// A block of channels with its values that are constant over time.
pub struct Block<'b, 'a, V, S: Storage> {
    inputs: &'b Inputs<'a, S>,
    /// The part of the call that it covers; at most `V::LANES` channels.
    pub segment: Segment,
    bias: Option<V>,
    skip: Option<V>,
    step_size: Lanes<V>,
}

impl<'b, 'a, S: Storage, V: Vector<Element = S::Wide>> Block<'b, 'a, V, S> {
    #[inline(always)]
    pub fn new(inputs: &'b Inputs<'a, S>, segment: Segment) -> Self {
        Block {
            inputs,
            bias: Self::per_channel(inputs.dt_bias, &segment),
            skip: Self::per_channel(inputs.d, &segment),
            step_size: Lanes::new(&inputs.problem.options.step_size()),
            segment,
        }
    }

    #[inline(always)]
    fn per_channel(values: Option<&[S::Wide]>, segment: &Segment) -> Option<V> {
        match values {
            Some(values) => Some(V::load_partial(&values[segment.channels.clone()])),
            None => None,
        }
    }

    /// The values of step `t` in a sequence like `x`.
    #[inline(always)]
    pub fn load(&self, from: &[S], t: usize) -> V {
        S::load(&from[self.inputs.offset(&self.segment, t)..][..self.segment.channels.len()])
    }

    /// The values of step `t` that do not depend on the states.
    #[inline(always)]
    pub fn step(&self, t: usize) -> Step<V> {
        let x = self.load(self.inputs.x, t);
        let delta = self.step_size.delta(self.raw(t));
        Step {
            rate: delta.mul(V::constant(std::f64::consts::LOG2_E)),
            input: delta.mul(x),
            y: match self.skip {
                Some(skip) => skip.mul(x),
                None => V::zero(),
            },
        }
    }

    #[inline(always)]
    fn raw(&self, t: usize) -> V {
        let dt = self.load(self.inputs.dt, t);
        match self.bias {
            Some(bias) => dt.add(bias),
            None => dt,
        }
    }

    /// A value of step `t` times its gate: turns `y` into the output, and the output's cotangent into that of `y`.
    #[inline(always)]
    fn gated(&self, t: usize, y: V) -> V {
        match self.inputs.z {
            Some(z) => y.mul(math::silu(self.load(z, t))),
            None => y,
        }
    }

    /// The gradient of the gate at step `t`, where `y` is the gate's input.
    #[inline(always)]
    pub fn gate_gradient(&self, t: usize, dy: &[S], y: V) -> Option<V> {
        let z = self.load(self.inputs.z?, t);
        Some(self.load(dy, t).mul(y).mul(math::silu_slope(z)))
    }

    /// The values of step `t` for the gradient: those for the loops over states, and those for afterwards.
    #[inline(always)]
    pub fn back_step(&self, t: usize, dy: &[S]) -> (BackStep<V>, StepEnd<V>) {
        let x = self.load(self.inputs.x, t);
        let (delta, slope) = self.step_size.delta_and_slope(self.raw(t));
        let step = BackStep {
            rate: delta.mul(V::constant(std::f64::consts::LOG2_E)),
            input: delta.mul(x),
            dy: self.gated(t, self.load(dy, t)),
            ddelta: V::zero(),
            dinput: V::zero(),
        };
        (step, StepEnd { x, slope })
    }

    /// The gradients of `x` and `dt`, from the sums over all states.
    #[inline(always)]
    pub fn gradients(&self, step: &BackStep<V>, end: &StepEnd<V>) -> [V; 2] {
        let delta = step.rate.mul(V::constant(std::f64::consts::LN_2));
        let dx = step.dinput.mul(delta);
        let ddelta = step.dinput.mul_add(end.x, step.ddelta);
        let dx = match self.skip {
            Some(skip) => skip.mul_add(step.dy, dx),
            None => dx,
        };
        [dx, ddelta.mul(end.slope)]
    }
}

/// One time step of a block of channels in the backward pass: the operands and sums of the loops over states.
#[derive(Clone, Copy)]
pub struct BackStep<V> {
    /// `delta * log2(e)`.
    pub rate: V,
    /// `delta * x`.
    pub input: V,
    /// The cotangent of `y` before its gate.
    pub dy: V,
    /// The gradient of `delta` through the decays, so far.
    pub ddelta: V,
    /// The sum of `g B`, so far: the gradient of `input`.
    pub dinput: V,
}

/// The values of that step that are used after the loops over states.
#[derive(Clone, Copy)]
pub struct StepEnd<V> {
    pub x: V,
    /// The derivative of `delta` by `dt`.
    slope: V,
}

impl<V: Vector> BackStep<V> {
    pub fn zero() -> Self {
        let zero = V::zero();
        BackStep { rate: zero, input: zero, dy: zero, ddelta: zero, dinput: zero }
    }
}

impl<V: Vector> StepEnd<V> {
    pub fn zero() -> Self {
        StepEnd { x: V::zero(), slope: V::zero() }
    }
}
