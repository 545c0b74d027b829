//! The gradients that are sums over more than a block of channels: those of B and C over the
//! channels of a group, those of weights over batch and time.
//!
//! All sums go in an order that follows from the problem alone. Channels fall into panels, each done
//! by one thread; where a group reaches over several panels, each leaves a sum of its own, and
//! these are added up at the end. A slot is what a panel and a group have in common.

use super::super::by_channel::transpose_out;
use super::super::call::Segment;
use super::reverse::Sums;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector};
use crate::error::Result;
use crate::selective_scan::{Form, Problem};
use crate::tensor::{Element, ViewMut};
use std::ops::Range;

/// How the channels are divided for one coefficient.
#[derive(Clone, Copy)]
pub struct Slots {
    /// Channels of a panel.
    width: usize,
    /// Channels of a group.
    share: usize,
    /// Channels from one place where both begin to the next.
    both: usize,
    channels: usize,
}

impl Slots {
    fn new(problem: &Problem, groups: usize, width: usize) -> Slots {
        let share = (problem.channels / groups).max(1);
        Slots { width, share, both: width / gcd(width, share) * share, channels: problem.channels }
    }

    /// The slot of a channel: how many began up to there, without the first.
    #[inline(always)]
    fn of(&self, channel: usize) -> usize {
        channel / self.width + channel / self.share - channel / self.both
    }

    /// The slots of some channels.
    #[inline(always)]
    fn over(&self, channels: &Range<usize>) -> Range<usize> {
        self.of(channels.start)..self.of(channels.end - 1) + 1
    }

    fn count(&self) -> usize {
        if self.channels == 0 { 0 } else { self.of(self.channels - 1) + 1 }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Sums that come in parts, one for each group of batches.
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

    /// Adds the parts up, in their order.
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
    /// Sums over the channels of a slot, (B, L, slots, N), where slots are not groups; for a constant
    /// coefficient those of a part of the batches.
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
            _ if slots.count() == groups => Parts::new(0, 0),
            _ => Parts::new(1, batch * length * slots.count() * state),
        };
        Ok(Coefficient { form, slots, state, out: out.slice()?, parts })
    }

    /// To be written by the panels.
    pub fn shared(&mut self) -> Writer<'_, S> {
        let Coefficient { form, slots, state, .. } = *self;
        let to = match self.parts.values.is_empty() {
            true => To::Final(Shared::new(self.out)),
            false => To::Parts(self.parts.shared()),
        };
        Writer { form, slots, state, to }
    }

    /// Adds up what the panels left.
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
        let rows = slots.count() * state;
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

/// A thread's room for it.
pub struct Local<V: Vector> {
    /// Sums of blocks over a tile, of the states that go together, the channels still in their lanes;
    /// for a constant coefficient those of all steps and states, block after block.
    lanes: Vec<V>,
    /// Whether the blocks before left something in `lanes` that the next goes on with.
    open: bool,
    /// Sums over channels: for each step of a tile a row for each slot of the panel.
    rows: Vec<V::Element>,
}

impl<V: Vector> Local<V> {
    pub fn new() -> Self {
        Local { lanes: Vec::new(), open: false, rows: Vec::new() }
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
    /// Begins with a panel of so many blocks.
    #[inline(always)]
    pub fn begin<V: Vector<Element = S::Wide>>(&self, blocks: usize, local: &mut Local<V>) {
        local.open = false;
        if self.form == Form::Constant {
            cleared(&mut local.lanes, blocks * self.state, V::zero());
        }
    }

    /// Begins with a tile of a panel.
    #[inline(always)]
    pub fn begin_tile<V: Vector<Element = S::Wide>>(&self, tile: &Segment, local: &mut Local<V>) {
        if self.form != Form::Constant {
            let len = tile.time.len() * self.slots.over(&tile.channels).len() * self.state;
            cleared(&mut local.rows, len, S::Wide::from_f64(0.0));
        }
    }

    /// Where block `i` of a tile adds its part for some states.
    #[inline(always)]
    pub fn place<'l, V: Vector<Element = S::Wide>>(
        &self,
        i: usize,
        block: &Segment,
        states: &Range<usize>,
        local: &'l mut Local<V>,
    ) -> Sums<'l, V> {
        match self.form {
            Form::Constant => Sums { values: &mut local.lanes[i * self.state + states.start..], stride: 0 },
            Form::PerStep { .. } => {
                if !local.open {
                    cleared(&mut local.lanes, block.time.len() * states.len(), V::zero());
                }
                Sums { values: &mut local.lanes, stride: states.len() }
            }
        }
    }

    /// Takes what a block added, unless the next one goes on with it.
    #[inline(always)]
    pub fn leave<V: Vector<Element = S::Wide>>(
        &self,
        block: &Segment,
        tile: &Segment,
        states: &Range<usize>,
        local: &mut Local<V>,
    ) {
        if self.form == Form::Constant {
            return;
        }
        let (panel, slots) = (self.slots.over(&tile.channels), self.slots.over(&block.channels));
        let next = block.channels.end..tile.channels.end.min(block.channels.end + block.channels.len());
        local.open = slots.len() == 1 && !next.is_empty() && self.slots.over(&next) == slots;
        if local.open {
            return;
        }
        let rows = local.rows.chunks_exact_mut((panel.len() * self.state).max(1));
        for (row, lanes) in rows.zip(local.lanes.chunks_exact(states.len())) {
            let row = &mut row[(slots.start - panel.start) * self.state + states.start..];
            if slots.len() == 1 {
                for (sum, lanes) in row.iter_mut().zip(lanes) {
                    *sum = sum.add(lanes.sum());
                }
            } else {
                self.spread(block, lanes, row);
            }
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
        let panel = self.slots.over(&tile.channels);
        let len = panel.len() * self.state;
        for (t, row) in tile.time.clone().zip(local.rows.chunks_exact(len.max(1))) {
            let step = tile.batch * problem.length + t;
            let start = (step * self.slots.count() + panel.start) * self.state;
            match &self.to {
                // SAFETY: panels share no slot, and each is done by one thread.
                To::Parts(parts) => unsafe { parts.part(start, len) }.copy_from_slice(row),
                // SAFETY: as above.
                To::Final(out) => store_row::<V, S>(row, unsafe { out.part(start, len) }),
            }
        }
    }

    /// Writes the sums over all steps of a constant coefficient, of a panel and a part of the batches.
    #[inline(always)]
    pub fn end<V: Vector<Element = S::Wide>>(&self, part: usize, channels: &Range<usize>, local: &Local<V>) {
        if let (Form::Constant, To::Parts(parts)) = (self.form, &self.to) {
            let start = (part * self.slots.channels + channels.start) * self.state;
            // SAFETY: of each part of the batches and each panel there is one.
            transpose_out(&local.lanes, self.state, unsafe { parts.part(start, channels.len() * self.state) });
        }
    }
}

#[inline(always)]
fn store_row<V: Vector<Element = S::Wide>, S: Storage>(row: &[S::Wide], to: &mut [S]) {
    for (row, to) in row.chunks(V::LANES).zip(to.chunks_mut(V::LANES)) {
        S::store(V::load_partial(row), to);
    }
}
