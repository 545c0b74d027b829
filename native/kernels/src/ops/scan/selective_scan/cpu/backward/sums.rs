//! The gradients that are sums over more than a block of channels: those of B and C over the
//! channels of a group, those of weights over batch and time.
//!
//! The order of all sums follows from the problem alone. Channels are divided into strips, and a strip of a batch is
//! done by one thread. Where a group spans several strips, each has its own partial sum, and these are added up at the
//! end. A slot is the intersection of a strip and a group.

use super::super::by_channel::transpose_out;
use super::super::call::Segment;
use super::reverse::Sums;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector};
use crate::error::Result;
use crate::ops::scan::selective_scan::{Form, Problem};
use crate::tensor::{Element, ViewMut};
use std::ops::Range;

/// How the channels are divided into slots, for one coefficient.
#[derive(Clone, Copy)]
pub struct Slots {
    /// Channels of a strip.
    width: usize,
    /// Channels of a group.
    share: usize,
    /// The period, in channels, after which strips and groups begin together again.
    both: usize,
    channels: usize,
    /// The number of slots.
    count: usize,
}

impl Slots {
    fn new(problem: &Problem, groups: usize, width: usize) -> Slots {
        let share = (problem.channels / groups).max(1);
        let both = width / gcd(width, share) * share;
        let slots = Slots { width, share, both, channels: problem.channels, count: 0 };
        let count = if problem.channels == 0 { 0 } else { slots.of(problem.channels - 1) + 1 };
        Slots { count, ..slots }
    }

    /// The slot of a channel: the number of slots that begin up to it, without the first.
    #[inline(always)]
    fn of(&self, channel: usize) -> usize {
        channel / self.width + channel / self.share - channel / self.both
    }

    /// The slots of some channels.
    #[inline(always)]
    fn over(&self, channels: &Range<usize>) -> Range<usize> {
        self.of(channels.start)..self.of(channels.end - 1) + 1
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Partial sums, one for each part of the batches.
pub struct Parts<E> {
    values: Vec<E>,
    len: usize,
}

impl<E: Real> Parts<E> {
    pub fn new(parts: usize, len: usize) -> Self {
        Parts { values: vec![E::from_f64(0.0); parts * len], len }
    }

    pub fn shared(&mut self) -> Shared<'_, E> {
        Shared::new(&mut self.values)
    }

    /// Adds up the parts, in their order.
    pub fn total<S: Storage<Wide = E>>(&self, to: &mut [S]) {
        let mut total = vec![E::from_f64(0.0); to.len()];
        for part in self.values.chunks_exact(self.len.max(1)) {
            add(&mut total, part);
        }
        round(&total, to);
    }
}

fn add<E: Real>(total: &mut [E], part: &[E]) {
    for (total, &value) in total.iter_mut().zip(part) {
        *total = total.add(value);
    }
}

fn round<S: Storage>(values: &[S::Wide], to: &mut [S]) {
    for (&value, to) in values.iter().zip(to.chunks_exact_mut(1)) {
        S::store(value, to);
    }
}

/// The gradient of B or C.
pub struct Coefficient<'a, S: Storage> {
    form: Form,
    slots: Slots,
    state: usize,
    out: &'a mut [S],
    /// Sums over the channels of a slot, (B, L, slots, N), where slots are not groups; for a constant coefficient, sums
    /// over a part of the batches, (parts, D, N).
    parts: Parts<S::Wide>,
}

impl<'a, S: Storage> Coefficient<'a, S> {
    pub fn new(problem: &Problem, form: Form, width: usize, batch_parts: usize, out: ViewMut<'a>) -> Result<Self> {
        let Problem { batch, length, channels, state, .. } = *problem;
        let groups = match form {
            Form::Constant => 1,
            Form::PerStep { groups } => groups,
        };
        let slots = Slots::new(problem, groups, width);
        let parts = match form {
            Form::Constant => Parts::new(batch_parts, channels * state),
            _ if slots.count == groups => Parts::new(0, 0),
            _ => Parts::new(1, batch * length * slots.count * state),
        };
        Ok(Coefficient { form, slots, state, out: out.slice()?, parts })
    }

    /// The destination of the panels' sums.
    pub fn shared(&mut self) -> Writer<'_, S> {
        let Coefficient { form, slots, state, .. } = *self;
        let to = match self.parts.values.is_empty() {
            true => To::Final(Shared::new(self.out)),
            false => To::Parts(self.parts.shared()),
        };
        Writer { form, slots, state, to }
    }

    /// Adds up the partial sums.
    pub fn finish(self, exec: &Exec) -> Result<()> {
        match self.form {
            Form::Constant => self.parts.total(self.out),
            _ if self.slots.channels == 0 => round(&vec![S::Wide::from_f64(0.0); self.out.len()], self.out),
            _ if self.parts.values.is_empty() => {}
            Form::PerStep { groups } => self.add_slots(groups, exec)?,
        }
        Ok(())
    }

    fn add_slots(self, groups: usize, exec: &Exec) -> Result<()> {
        let Coefficient { slots, state, out, parts, .. } = self;
        let rows = slots.count * state;
        let out_rows = groups * state;
        let pieces = exec.threads.min(out.len().div_ceil(4096)).max(1);
        let steps = parts.values.len() / rows;
        let out = Shared::new(out);
        pool::for_each(exec.threads, pieces, |piece| {
            let mut total = vec![S::Wide::from_f64(0.0); state];
            for step in piece * steps / pieces..(piece + 1) * steps / pieces {
                for group in 0..groups {
                    total.fill(S::Wide::from_f64(0.0));
                    let channels = group * slots.share..(group + 1) * slots.share;
                    for slot in slots.over(&channels) {
                        add(&mut total, &parts.values[step * rows + slot * state..][..state]);
                    }
                    // SAFETY: pieces share no step.
                    round(&total, unsafe { out.part(step * out_rows + group * state, state) });
                }
            }
        })
    }
}

/// Where a gradient of B or C is written.
pub struct Writer<'w, S: Storage> {
    form: Form,
    slots: Slots,
    state: usize,
    to: To<'w, S>,
}

enum To<'w, S: Storage> {
    Final(Shared<'w, S>),
    Parts(Shared<'w, S::Wide>),
}

/// The slots that a block of a panel adds to.
#[derive(Clone, Copy)]
struct Target {
    /// The first slot, counted from the panel's first.
    slot: usize,
    /// Whether it is the only one.
    only: bool,
    /// Whether the next block adds to the same slot in the same way.
    goes_on: bool,
}

/// A range of states of a block of a panel.
pub struct Slice {
    pub block: usize,
    pub states: Range<usize>,
    /// The number of vectors of their sums at a step.
    pub stride: usize,
}

/// The workspace of a thread.
pub struct Local<V: Vector> {
    /// For each block of the panel.
    targets: Vec<Target>,
    /// The slots of the panel.
    slots: Range<usize>,
    /// Sums over blocks, for each step of a tile and for the states that go through it together, with channels still in
    /// lanes; for a constant coefficient sums over steps, for all states, block after block.
    lanes: Vec<V>,
    /// Whether the next block adds to the sums in `lanes`.
    open: bool,
    /// Sums over channels: for each step of a tile a row for each slot of the panel.
    rows: Vec<V::Element>,
}

impl<V: Vector> Local<V> {
    pub fn new() -> Self {
        Local { targets: Vec::new(), slots: 0..0, lanes: Vec::new(), open: false, rows: Vec::new() }
    }
}

#[inline(always)]
fn cleared<T: Copy>(values: &mut Vec<T>, len: usize, zero: T) {
    values.resize(len, zero);
    for value in values {
        *value = zero;
    }
}

impl<S: Storage> Writer<'_, S> {
    /// Starts a panel of channels. `shared` says for each of its blocks whether all lanes have the same B and C.
    #[inline(always)]
    pub fn begin<V: Vector<Element = S::Wide>>(&self, channels: &Range<usize>, shared: &[bool], local: &mut Local<V>) {
        local.open = false;
        if self.form == Form::Constant {
            return cleared(&mut local.lanes, shared.len() * self.state, V::zero());
        }
        local.slots = self.slots.over(channels);
        local.targets.clear();
        let slots = |i: usize| {
            let first = channels.start + i * V::LANES;
            self.slots.over(&(first..channels.end.min(first + V::LANES)))
        };
        for i in 0..shared.len() {
            let own = slots(i);
            let only = own.len() == 1;
            let goes_on = only && i + 1 < shared.len() && slots(i + 1) == own && shared[i + 1] == shared[i];
            local.targets.push(Target { slot: own.start - local.slots.start, only, goes_on });
        }
    }

    /// Starts a tile of a panel.
    #[inline(always)]
    pub fn begin_tile<V: Vector<Element = S::Wide>>(&self, tile: &Segment, local: &mut Local<V>) {
        if self.form != Form::Constant {
            let len = tile.time.len() * local.slots.len() * self.state;
            cleared(&mut local.rows, len, S::Wide::from_f64(0.0));
        }
    }

    /// The sums that some states of a block add to over a tile.
    #[inline(always)]
    pub fn place<'l, V: Vector<Element = S::Wide>>(
        &self,
        some: &Slice,
        block: &Segment,
        local: &'l mut Local<V>,
    ) -> Sums<'l, V> {
        let Slice { stride, .. } = *some;
        match self.form {
            Form::Constant => {
                Sums { values: &mut local.lanes[some.block * self.state + some.states.start..], stride: 0 }
            }
            Form::PerStep { .. } => {
                if !local.open {
                    cleared(&mut local.lanes, block.time.len() * stride, V::zero());
                }
                Sums { values: &mut local.lanes, stride }
            }
        }
    }

    /// Reduces the lanes of these states and adds them to their rows, unless the next block adds to the same lanes.
    #[inline(always)]
    pub fn leave<V: Vector<Element = S::Wide>>(&self, some: &Slice, block: &Segment, local: &mut Local<V>) {
        if self.form == Form::Constant {
            return;
        }
        let Slice { states, stride, .. } = some;
        let target = local.targets[some.block];
        local.open = target.goes_on;
        if local.open {
            return;
        }
        let (len, start) = (local.slots.len() * self.state, target.slot * self.state + states.start);
        // A loop with a counter: the compiler does not inline the equivalent iterators, which are too large.
        let mut t = 0;
        while t < block.time.len() {
            let (row, lanes) = (&mut local.rows[t * len + start..], &local.lanes[t * stride..][..*stride]);
            match target.only {
                true if *stride < states.len() => add_fours(lanes[0], row),
                true => add_sums(lanes, row),
                false => self.spread(block, lanes, row),
            }
            t += 1;
        }
    }

    /// Adds each lane to the row of its channel's slot.
    #[inline(always)]
    fn spread<V: Vector<Element = S::Wide>>(&self, block: &Segment, lanes: &[V], row: &mut [S::Wide]) {
        let first = self.slots.of(block.channels.start);
        for (n, lanes) in lanes.iter().enumerate() {
            for (channel, lane) in block.channels.clone().zip(lanes.lanes()) {
                let sum = &mut row[(self.slots.of(channel) - first) * self.state + n];
                *sum = sum.add(lane);
            }
        }
    }

    /// Writes the sums of a tile.
    #[inline(always)]
    pub fn end_tile<V: Vector<Element = S::Wide>>(&self, problem: &Problem, tile: &Segment, local: &Local<V>) {
        if self.form == Form::Constant {
            return;
        }
        let len = local.slots.len() * self.state;
        for (t, row) in tile.time.clone().zip(local.rows.chunks_exact(len.max(1))) {
            let step = tile.batch * problem.length + t;
            let start = (step * self.slots.count + local.slots.start) * self.state;
            match &self.to {
                // SAFETY: panels share no slot, and each is done by one thread.
                To::Parts(parts) => unsafe { parts.part(start, len) }.copy_from_slice(row),
                // SAFETY: as above.
                To::Final(out) => store_row::<V, S>(row, unsafe { out.part(start, len) }),
            }
        }
    }

    /// Writes the sums over all steps for a constant coefficient, of a panel and a part of the batches.
    #[inline(always)]
    pub fn end<V: Vector<Element = S::Wide>>(&self, part: usize, channels: &Range<usize>, local: &Local<V>) {
        if let (Form::Constant, To::Parts(parts)) = (self.form, &self.to) {
            let start = (part * self.slots.channels + channels.start) * self.state;
            // SAFETY: only one unit has this part of the batches and this panel.
            transpose_out(&local.lanes, self.state, unsafe { parts.part(start, channels.len() * self.state) });
        }
    }
}

/// Adds the sum of the lanes of each vector.
#[inline(always)]
fn add_sums<E: Real, V: Vector<Element = E>>(lanes: &[V], row: &mut [E]) {
    for n in 0..lanes.len() {
        row[n] = row[n].add(lanes[n].sum());
    }
}

/// Adds the sums of the lanes of four vectors that were folded into one.
#[inline(always)]
fn add_fours<E: Real, V: Vector<Element = E>>(folded: V, row: &mut [E]) {
    let sums = folded.fours();
    for n in 0..sums.len() {
        row[n] = row[n].add(sums[n]);
    }
}

#[inline(always)]
fn store_row<V: Vector<Element = S::Wide>, S: Storage>(row: &[S::Wide], to: &mut [S]) {
    for (row, to) in row.chunks(V::LANES).zip(to.chunks_mut(V::LANES)) {
        S::store(V::load_partial(row), to);
    }
}
