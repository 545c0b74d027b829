//! The gradient of the scan on the CPU: how the work is divided.
//!
//! Channels are divided into strips, the batches into parts. Both depend on the problem alone and not on the number of
//! threads, so that the order of all sums is always the same. A panel is a group of neighbouring strips, as wide as
//! still leaves work for each thread, since memory is read faster in long rows. A unit is a panel over the batches of a
//! part, one after the other.
//!
//! For each batch of a unit a forward pass keeps the states between tiles of time, and a backward pass recomputes each
//! tile's states from these. In a tile the work goes block by block, with a channel in each lane, as in
//! [`super::by_channel`], while the next tile is prefetched.
//!
//! The limit, for AVX-512 and 16 state steps (one state of 16 channels): the forward pass takes the 12 vector
//! operations of the scan, 9 of them with a multiplier; the backward pass 11 to recompute decays and states, 8 with a
//! multiplier, then 8 multiplications and 5 to sum over channels. On Zen 4, which does one multiplication a cycle, that
//! is 25 cycles or 6.9 ns: 10.9 ms on two cores for 1 x 2048 x 1536 x 16. A sequence of one tile needs no forward pass
//! unless it has a gate: 16 cycles, 2.2 ms for 32 x 60 x 512 x 16. Cascade Lake has two ports for all of them and
//! rounds in two steps: 13 cycles or 4.8 ns for the backward pass, so 2.4 ms for the latter size on two of its cores
//! (2.7 GHz with AVX-512).
//!
//! History, milliseconds on two such cores for 32 x 60 x 512 x 16 and 1 x 2048 x 1536 x 16:
//!
//! ```text
//! version 1  panels of 128 channels, all of a block's tile at once       22    85
//! version 2  256 channels, read step by step, next tile prefetched    11.5  48
//! version 3  sums folded to one vector for four states, fewer pieces      8.6  40
//! ```
//!
//! Of the time of version 3, half is in the innermost loops, whose decays, states and sums fill the first-level cache
//! (with 16 steps instead of 60 they run a third faster, but then need a forward pass), and a fifth in reading and
//! writing sequences at 9 GB/s a core. Tried without gain: tiles of 16 and 24 steps, two blocks at once, the gradient
//! of C in the loop forwards.

mod panel;
mod reverse;
mod sums;

use super::call::{Inputs, Segment};
use super::{Lanes, WORTH_SHARING};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::selective_scan::Problem;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use panel::Scratch;
use std::ops::Range;
use sums::{Coefficient, Parts, Writer};

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => run::<S>(problem, inputs, outputs, exec))
}

fn run<'a, S: Storage>(
    problem: &'a Problem,
    inputs: &Named<View<'a>>,
    mut outputs: Named<ViewMut<'a>>,
    exec: &Exec,
) -> Result<()> {
    let Problem { batch, length, channels, state, .. } = *problem;
    let small = batch.saturating_mul(length).saturating_mul(channels * state.max(1)) < WORTH_SHARING;
    let exec = Exec { threads: if small { 1 } else { pool::checked(exec.threads)? }, ..*exec };
    let division = Division::new(problem, S::Wide::dispatch(exec.level, Lanes), exec.threads);
    let mut gradient = |name, form| {
        let out = outputs.expect(name)?;
        Coefficient::<S>::new(problem, form, division.strip, division.parts, out)
    };
    let (mut b, mut c) = (gradient("dB", problem.b)?, gradient("dC", problem.c)?);
    let parts = |len| Parts::<S::Wide>::new(division.parts, len);
    let (mut a, mut d, mut dt_bias) = (parts(channels * state), parts(channels), parts(channels));
    Plan {
        inputs: Inputs::new(problem, inputs)?,
        sequences: Sequences::new(inputs, &mut outputs)?,
        b: b.shared(),
        c: c.shared(),
        a: a.shared(),
        d: d.shared(),
        dt_bias: dt_bias.shared(),
        division,
    }
    .run(&exec)?;
    b.finish(&exec)?;
    c.finish(&exec)?;
    for (name, parts) in [("dA", a), ("dD", d), ("ddt_bias", dt_bias)] {
        if let Some(out) = outputs.take(name) {
            parts.total(out.slice::<S::Wide>()?);
        }
    }
    Ok(())
}

/// How the work is divided.
#[derive(Clone, Copy)]
struct Division {
    /// Channels of a strip, a multiple of a block's.
    strip: usize,
    /// Channels of a panel, a multiple of a strip's.
    width: usize,
    panels: usize,
    /// Parts of the batches.
    parts: usize,
    batch: usize,
    channels: usize,
}

/// Channels of a strip. Each strip has its own partial sums for B and C, so wider strips have fewer; but a panel's tile
/// should stay in the second-level cache.
const WIDE: usize = 256;

/// Channels of a strip where strips of [`WIDE`] channels would make too few units.
const NARROW: usize = 128;

/// Units that keep the threads of most machines busy.
const UNITS: usize = 32;

/// Pieces of work per thread: few, since each needs its own workspace.
const PIECES_PER_THREAD: usize = 4;

/// The fewest steps of a part of the batches, since each part has its own partial sums for the weights.
const STEPS_OF_PART: usize = 128;

impl Division {
    fn new(problem: &Problem, lanes: usize, threads: usize) -> Division {
        let Problem { batch, length, channels, .. } = *problem;
        let most = batch.min(batch.saturating_mul(length) / STEPS_OF_PART).max(1);
        let strip = if channels.div_ceil(WIDE) * most < UNITS / 2 { NARROW } else { WIDE }.next_multiple_of(lanes);
        let strips = channels.div_ceil(strip);
        let parts = UNITS.div_ceil(strips.max(1)).min(most);
        let together = strips * parts / (threads * 2);
        let width = strip * together.clamp(1, WIDE / strip);
        Division { strip, width, panels: channels.div_ceil(width), parts, batch, channels }
    }

    fn units(&self) -> usize {
        self.panels * self.parts
    }

    /// Panels are outermost, so that units of one panel follow each other.
    fn unit(&self, i: usize) -> Unit {
        let (panel, part) = (i / self.parts, i % self.parts);
        let first = panel * self.width;
        let start = |part: usize| part * self.batch / self.parts;
        Unit { part, batches: start(part)..start(part + 1), channels: first..self.channels.min(first + self.width) }
    }
}

/// A panel over the batches of a part.
struct Unit {
    part: usize,
    batches: Range<usize>,
    channels: Range<usize>,
}

impl Unit {
    fn segment(&self, batch: usize, length: usize) -> Segment {
        Segment { batch, channels: self.channels.clone(), time: 0..length }
    }
}

/// Cotangents, and gradients that are not summed over batch, time or channels.
struct Sequences<'a, S: Storage> {
    dy: &'a [S],
    dlast_state: Option<&'a [S::Wide]>,
    dstates: Option<&'a [S::Wide]>,
    dx: Shared<'a, S>,
    ddt: Shared<'a, S>,
    dz: Option<Shared<'a, S>>,
    dinitial_state: Option<Shared<'a, S::Wide>>,
}

impl<'a, S: Storage> Sequences<'a, S> {
    fn new(inputs: &Named<View<'a>>, outputs: &mut Named<ViewMut<'a>>) -> Result<Self> {
        let wide = |name: &str| inputs.find(name).map(View::slice::<S::Wide>).transpose();
        Ok(Sequences {
            dy: inputs.get("dy")?.slice()?,
            dlast_state: wide("dlast_state")?,
            dstates: wide("dstates")?,
            dx: Shared::new(outputs.expect("dx")?.slice()?),
            ddt: Shared::new(outputs.expect("ddt")?.slice()?),
            dz: outputs.take("dz").map(ViewMut::slice).transpose()?.map(Shared::new),
            dinitial_state: outputs.take("dinitial_state").map(ViewMut::slice).transpose()?.map(Shared::new),
        })
    }
}

/// A call and the division of its work.
struct Plan<'a, 'p, S: Storage> {
    inputs: Inputs<'a, S>,
    sequences: Sequences<'a, S>,
    b: Writer<'p, S>,
    c: Writer<'p, S>,
    a: Shared<'p, S::Wide>,
    d: Shared<'p, S::Wide>,
    dt_bias: Shared<'p, S::Wide>,
    division: Division,
}

impl<S: Storage> Plan<'_, '_, S> {
    fn run(&self, exec: &Exec) -> Result<()> {
        let units = self.division.units();
        let pieces = units.min(exec.threads * PIECES_PER_THREAD);
        pool::for_each(exec.threads, pieces, |piece| {
            let units = piece * units / pieces..(piece + 1) * units / pieces;
            S::Wide::dispatch(exec.level, Piece { plan: self, units });
        })
    }

    /// The addresses of the sequences that the forward pass reads and writes, for prefetches.
    fn forwards(&self) -> Vec<*const u8> {
        let Sequences { dy, dz, .. } = &self.sequences;
        let mut arrays = vec![self.inputs.x.as_ptr(), self.inputs.dt.as_ptr()];
        if let (Some(z), Some(dz)) = (self.inputs.z, dz) {
            arrays.extend([z.as_ptr(), dy.as_ptr(), dz.as_ptr()]);
        }
        bytes(&arrays)
    }

    /// The addresses of the sequences that the backward pass reads and writes, for prefetches.
    fn backwards(&self) -> Vec<*const u8> {
        let (inputs, Sequences { dy, dx, ddt, .. }) = (&self.inputs, &self.sequences);
        let mut arrays = vec![inputs.x.as_ptr(), inputs.dt.as_ptr(), dy.as_ptr(), dx.as_ptr(), ddt.as_ptr()];
        arrays.extend(inputs.z.map(<[S]>::as_ptr));
        bytes(&arrays)
    }

    /// The next segment of this thread after a batch of unit `i`, if there is one.
    fn after(&self, i: usize, batch: usize, units: &Range<usize>) -> Option<Segment> {
        let length = self.inputs.problem.length;
        let unit = self.division.unit(i);
        if batch + 1 < unit.batches.end {
            return Some(unit.segment(batch + 1, length));
        }
        let next = (i + 1 < units.end).then(|| self.division.unit(i + 1))?;
        Some(next.segment(next.batches.start, length))
    }
}

fn bytes<S>(arrays: &[*const S]) -> Vec<*const u8> {
    arrays.iter().map(|array| array.cast()).collect()
}

/// A range of units, done by one thread.
struct Piece<'u, 'a, 'p, S: Storage> {
    plan: &'u Plan<'a, 'p, S>,
    units: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for Piece<'_, '_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Piece { plan, units } = self;
        let mut scratch = Scratch::<V>::new(plan);
        for i in units.clone() {
            let unit = plan.division.unit(i);
            scratch.begin(plan, &unit.channels);
            for batch in unit.batches.clone() {
                let panel = unit.segment(batch, plan.inputs.problem.length);
                panel::backward(plan, &panel, plan.after(i, batch, &units).as_ref(), &mut scratch);
            }
            scratch.write_weights(plan, unit.part, &unit.channels);
        }
    }
}
