//! The gradient of the scan on the CPU: who computes what.
//!
//! Channels fall into panels, the batches into parts, and a unit is a panel over the batches of a part,
//! one after the other. Both depend on the problem alone and not on the threads that share the units, so
//! that all sums go in the same order each time.
//!
//! Over a unit's batch time goes forwards once, from tile to tile, to note the states between them, and
//! backwards once, where each tile's states are computed again from there. In a tile the work goes block
//! by block, each channel in a lane, as in [`super::by_channel`].
//!
//! The limit, for AVX-512 and 16 state steps (one state of 16 channels): the first way takes the 12
//! vector operations of the scan, 9 of which need a multiplier; the second 11 to have decays and states
//! again, 8 with a multiplier, and then 8 multiplications. On Zen 4, which does one of them a cycle, that
//! is 25 cycles or 6.9 ns: 10.9 ms on two cores for 1 x 2048 x 1536 x 16. A sequence of one tile needs no
//! first way unless it has a gate: 16 cycles, 2.2 ms for 32 x 60 x 512 x 16.

mod panel;
mod reverse;
mod sums;

use super::call::{Inputs, Segment};
use super::{Lanes, WORTH_SHARING};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::selective_scan::Problem;
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
    let division = Division::new(problem, S::Wide::dispatch(exec.level, Lanes));
    let Problem { batch, length, channels, state, .. } = *problem;
    let mut gradient = |name, form| {
        let out = outputs.expect(name)?;
        Coefficient::<S>::new(problem, form, division.width, division.parts, out)
    };
    let (mut b, mut c) = (gradient("dB", problem.b)?, gradient("dC", problem.c)?);
    let parts = |len| Parts::<S::Wide>::new(division.parts, len);
    let (mut a, mut d, mut dt_bias) = (parts(channels * state), parts(channels), parts(channels));
    let small = batch.saturating_mul(length).saturating_mul(channels * state.max(1)) < WORTH_SHARING;
    let exec = Exec { threads: if small { 1 } else { pool::checked(exec.threads)? }, ..*exec };
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
    /// Channels of a panel, a multiple of a block's.
    width: usize,
    panels: usize,
    /// Parts of the batches.
    parts: usize,
    batch: usize,
    channels: usize,
}

/// Channels of a panel where there is enough to do: each leaves sums of its own for B and C.
const WIDTH: usize = 128;

/// As many units as keep the threads of most machines busy.
const UNITS: usize = 64;

/// Steps that a part of the batches has at least, for each leaves sums of its own for the weights.
const STEPS_OF_PART: usize = 128;

impl Division {
    fn new(problem: &Problem, lanes: usize) -> Division {
        let Problem { batch, length, channels, .. } = *problem;
        let width = WIDTH.next_multiple_of(lanes);
        let panels = channels.div_ceil(width);
        let most = batch.min(batch.saturating_mul(length) / STEPS_OF_PART);
        let parts = UNITS.div_ceil(panels.max(1)).min(most).max(1);
        Division { width, panels, parts, batch, channels }
    }

    fn units(&self) -> usize {
        self.panels * self.parts
    }

    /// Panels outermost: units of the same channels follow each other.
    fn unit(&self, i: usize) -> Unit {
        let (panel, part) = (i / self.parts, i % self.parts);
        let first = panel * self.width;
        let start = |part: usize| part * self.batch / self.parts;
        Unit { part, batches: start(part)..start(part + 1), channels: first..self.channels.min(first + self.width) }
    }
}

/// What one thread does at a time.
struct Unit {
    part: usize,
    batches: Range<usize>,
    channels: Range<usize>,
}

/// Cotangents, and gradients that are not summed over anything.
struct Sequences<'a, S: Storage> {
    dy: &'a [S],
    dlast_state: Option<&'a [S::Wide]>,
    dstates: Option<&'a [S::Wide]>,
    dx: Shared<'a, S>,
    ddt: Shared<'a, S>,
    dz: Option<Shared<'a, S>>,
    dh0: Option<Shared<'a, S::Wide>>,
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
            dh0: outputs.take("dh0").map(ViewMut::slice).transpose()?.map(Shared::new),
        })
    }
}

/// A call, divided.
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
        pool::for_each(exec.threads, self.division.units(), |i| {
            S::Wide::dispatch(exec.level, OneUnit { plan: self, unit: self.division.unit(i) });
        })
    }
}

struct OneUnit<'u, 'a, 'p, S: Storage> {
    plan: &'u Plan<'a, 'p, S>,
    unit: Unit,
}

impl<S: Storage> Work<S::Wide> for OneUnit<'_, '_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let OneUnit { plan, unit: Unit { part, batches, channels } } = self;
        let mut scratch = Scratch::<V>::new(plan, &channels);
        for batch in batches {
            let time = 0..plan.inputs.problem.length;
            panel::backward(plan, &Segment { batch, channels: channels.clone(), time }, &mut scratch);
        }
        scratch.write_weights(plan, part, &channels);
    }
}
