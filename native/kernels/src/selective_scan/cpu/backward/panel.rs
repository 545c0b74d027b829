//! A panel of channels of one batch, forwards and backwards through time.

use super::super::by_channel::{advance_all, decays_are_near, transpose_in, transpose_out};
use super::super::call::{BackStep, Block, Segment, Step, StepEnd};
use super::super::coefficients::{self, Both, Rows};
use super::Plan;
use super::reverse::{self, Cotangents, Given, Kept, States, reverse};
use super::sums::Local;
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::tensor::Element;
use std::ops::Range;

/// Steps in a tile, and so how many times less the noted states are than all there are.
const TILE: usize = 64;

/// What a thread needs beside its tensors. States are vectors of channels, block after block.
pub struct Scratch<V: Vector> {
    /// States in a block.
    state: usize,
    /// States in all blocks.
    states: usize,
    a: Vec<V>,
    /// Before each tile, and after the last.
    noted: Vec<V>,
    carry: Vec<V>,
    da: Vec<V>,
    /// A vector a block.
    dd: Vec<V>,
    ddt_bias: Vec<V>,
    b: coefficients::Tile<V>,
    c: coefficients::Tile<V>,
    db: Local<V>,
    dc: Local<V>,
    steps: Vec<Step<V>>,
    /// A tile of them for each block.
    back_steps: Vec<BackStep<V>>,
    ends: Vec<StepEnd<V>>,
    /// Whether a block's decays are near 1 over the tile.
    near: Vec<bool>,
    kept: Vec<Kept<V>>,
    cotangents: Vec<V>,
}

impl<V: Vector> Scratch<V> {
    /// For a panel of these channels.
    #[inline(always)]
    pub fn new<S: Storage<Wide = V::Element>>(plan: &Plan<S>, channels: &Range<usize>) -> Self {
        let (blocks, state) = (channels.len().div_ceil(V::LANES), plan.inputs.problem.state);
        let zeros = |len| vec![V::zero(); len];
        let mut scratch = Scratch {
            state,
            states: blocks * state,
            a: zeros(blocks * state),
            noted: Vec::new(),
            carry: zeros(blocks * state),
            da: zeros(blocks * state),
            dd: zeros(blocks),
            ddt_bias: zeros(blocks),
            b: coefficients::Tile::new(),
            c: coefficients::Tile::new(),
            db: Local::new(),
            dc: Local::new(),
            steps: vec![Step::zero(); TILE],
            back_steps: vec![BackStep::zero(); blocks * TILE],
            ends: vec![StepEnd::zero(); blocks * TILE],
            near: vec![false; blocks],
            kept: vec![Kept::zero(); TILE * reverse::MOST],
            cotangents: zeros(TILE * reverse::MOST),
        };
        transpose_in(plan.inputs.a_rows(channels), state, &mut scratch.a);
        plan.b.begin(blocks, &mut scratch.db);
        plan.c.begin(blocks, &mut scratch.dc);
        scratch
    }

    /// Writes what was summed over batch and time.
    #[inline(always)]
    pub fn write_weights<S: Storage<Wide = V::Element>>(&self, plan: &Plan<S>, part: usize, channels: &Range<usize>) {
        let (first, len) = (part * plan.division.channels + channels.start, channels.len());
        // SAFETY: of each part of the batches and each panel there is one.
        let (a, d, dt_bias) = unsafe {
            (plan.a.part(first * self.state, len * self.state), plan.d.part(first, len), plan.dt_bias.part(first, len))
        };
        transpose_out(&self.da, self.state, a);
        for a in a {
            *a = V::Element::from_f64(a.to_f64() * std::f64::consts::LN_2);
        }
        transpose_out(&self.dd, 1, d);
        transpose_out(&self.ddt_bias, 1, dt_bias);
        plan.b.end(part, channels, &self.db);
        plan.c.end(part, channels, &self.dc);
    }
}

fn tiles(panel: &Segment) -> impl DoubleEndedIterator<Item = (usize, Segment)> + '_ {
    let count = panel.time.len().div_ceil(TILE);
    (0..count).map(|i| (i, Segment { time: i * TILE..panel.time.end.min((i + 1) * TILE), ..panel.clone() }))
}

/// Takes a panel of one batch forwards and backwards.
#[inline(always)]
pub fn backward<V: Vector<Element = S::Wide>, S: Storage>(plan: &Plan<S>, panel: &Segment, scratch: &mut Scratch<V>) {
    start(plan, panel, scratch);
    let last = panel.time.len().div_ceil(TILE) - usize::from(!panel.time.is_empty());
    // Nobody asks for the states after the last tile, but the gate asks for its outputs.
    for (i, tile) in tiles(panel).filter(|(i, _)| *i < last || plan.sequences.dz.is_some()) {
        forward_tile(plan, &tile, i, scratch);
    }
    for (i, tile) in tiles(panel).rev() {
        backward_tile(plan, &tile, i, scratch);
    }
    if let Some(dh0) = &plan.sequences.dh0 {
        // SAFETY: panels share no channels within a batch.
        let dh0 = unsafe { dh0.part(plan.inputs.state_offset(panel), panel.channels.len() * scratch.state) };
        transpose_out(&scratch.carry, scratch.state, dh0);
    }
}

/// The states at both ends of time.
#[inline(always)]
fn start<V: Vector<Element = S::Wide>, S: Storage>(plan: &Plan<S>, panel: &Segment, scratch: &mut Scratch<V>) {
    let Scratch { state, states, .. } = *scratch;
    scratch.noted.resize((panel.time.len().div_ceil(TILE) + 1) * states, V::zero());
    match plan.inputs.initial_state(panel) {
        Some(h0) => transpose_in(h0, state, &mut scratch.noted[..states]),
        None => scratch.noted[..states].fill(V::zero()),
    }
    match plan.sequences.dlast_state {
        Some(dlast_state) => {
            let rows = &dlast_state[plan.inputs.state_offset(panel)..][..panel.channels.len() * state];
            transpose_in(rows, state, &mut scratch.carry);
        }
        None => scratch.carry.fill(V::zero()),
    }
}

/// Advances the noted states over tile `i`; writes the gradient of the gate, which needs `y`.
#[inline(always)]
fn forward_tile<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    tile: &Segment,
    i: usize,
    scratch: &mut Scratch<V>,
) {
    let Scratch { state, states, .. } = *scratch;
    scratch.noted.copy_within(i * states..(i + 1) * states, (i + 1) * states);
    for (j, segment) in tile.blocks(V::LANES).enumerate() {
        let block = Block::<V, S>::new(&plan.inputs, segment);
        let time = tile.time.clone();
        let steps = &mut scratch.steps[..time.len()];
        for (step, t) in steps.iter_mut().zip(time.clone()) {
            *step = block.step(t);
        }
        let a = &scratch.a[j * state..(j + 1) * state];
        let h = &mut scratch.noted[(i + 1) * states + j * state..][..state];
        let both = coefficients::fill(&plan.inputs, &block.segment, 0..state, [&mut scratch.b, &mut scratch.c]);
        advance_all(steps, a, h, both, |_| ());
        if let Some(dz) = &plan.sequences.dz {
            for (t, step) in time.zip(&scratch.steps) {
                if let Some(gradient) = block.gate_gradient(t, plan.sequences.dy, step.y) {
                    // SAFETY: panels share no element of (batch, time, channel).
                    S::store(gradient, unsafe {
                        dz.part(plan.inputs.offset(&block.segment, t), block.segment.channels.len())
                    });
                }
            }
        }
    }
}

/// Takes all blocks of tile `i` backwards: some states of all blocks, then the next states, so that what
/// adds up over the blocks stays in the first-level cache.
#[inline(always)]
fn backward_tile<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    tile: &Segment,
    i: usize,
    scratch: &mut Scratch<V>,
) {
    plan.b.begin_tile(tile, &mut scratch.db);
    plan.c.begin_tile(tile, &mut scratch.dc);
    for (j, segment) in tile.blocks(V::LANES).enumerate() {
        begin_block(plan, &Block::new(&plan.inputs, segment), j, scratch);
    }
    let mut first = 0;
    while first < scratch.state {
        let states = first..first + reverse::together(scratch.state - first);
        for (j, block) in tile.blocks(V::LANES).enumerate() {
            reverse_block(plan, &block, i, j, &states, scratch);
            plan.b.leave(&block, tile, &states, &mut scratch.db);
            plan.c.leave(&block, tile, &states, &mut scratch.dc);
        }
        first = states.end;
    }
    for (j, segment) in tile.blocks(V::LANES).enumerate() {
        write_block(plan, &Block::new(&plan.inputs, segment), j, scratch);
    }
    plan.b.end_tile(plan.inputs.problem, tile, &scratch.db);
    plan.c.end_tile(plan.inputs.problem, tile, &scratch.dc);
}

/// Prepares the steps of block `j`.
#[inline(always)]
fn begin_block<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    block: &Block<V, S>,
    j: usize,
    scratch: &mut Scratch<V>,
) {
    let time = block.segment.time.clone();
    let steps = &mut scratch.back_steps[j * TILE..][..time.len()];
    for ((step, end), t) in steps.iter_mut().zip(&mut scratch.ends[j * TILE..]).zip(time) {
        (*step, *end) = block.back_step(t, plan.sequences.dy);
    }
    let a = &scratch.a[j * scratch.state..][..scratch.state];
    scratch.near[j] = decays_are_near(steps.iter().map(|step| &step.rate), a);
}

/// Takes some states of block `j` backwards over tile `i`.
#[inline(always)]
fn reverse_block<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    block: &Segment,
    i: usize,
    j: usize,
    some: &Range<usize>,
    scratch: &mut Scratch<V>,
) {
    let Scratch { state, states, .. } = *scratch;
    gather_cotangents(plan, block, some, &mut scratch.cotangents);
    let own = j * state..(j + 1) * state;
    let mut tile = Reversal {
        steps: &mut scratch.back_steps[j * TILE..][..block.time.len()],
        near: scratch.near[j],
        states: States {
            first: some.start,
            a: &scratch.a[own.clone()],
            start: &scratch.noted[i * states + j * state..][..state],
            carry: &mut scratch.carry[own.clone()],
            da: &mut scratch.da[own],
        },
        together: some.len(),
        db: plan.b.place(j, block, some, &mut scratch.db),
        dc: plan.c.place(j, block, some, &mut scratch.dc),
        kept: &mut scratch.kept,
    };
    let both = coefficients::fill(&plan.inputs, block, some.clone(), [&mut scratch.b, &mut scratch.c]);
    tile.with(both, plan.sequences.dstates.is_some(), Given { values: &scratch.cotangents });
}

/// Brings the cotangents of some states of a block into vectors of channels, zero where there are none.
#[inline(always)]
fn gather_cotangents<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    block: &Segment,
    some: &Range<usize>,
    to: &mut [V],
) {
    let Some(dstates) = plan.sequences.dstates else { return };
    let state = plan.inputs.problem.state;
    for (t, to) in block.time.clone().zip(to.chunks_exact_mut(reverse::MOST)) {
        let rows = &dstates[plan.inputs.offset(block, t) * state..][..block.channels.len() * state];
        for (n, to) in some.clone().zip(to) {
            let mut lanes = [V::Element::from_f64(0.0); MAX_LANES];
            for (lane, row) in lanes.iter_mut().zip(rows.chunks_exact(state)) {
                *lane = row[n];
            }
            *to = V::load(&lanes);
        }
    }
}

/// Some states of a block on their way back over a tile, but for the coefficients, of which there are
/// several forms.
struct Reversal<'s, V> {
    steps: &'s mut [BackStep<V>],
    near: bool,
    states: States<'s, V>,
    /// How many states go through the tile.
    together: usize,
    db: reverse::Sums<'s, V>,
    dc: reverse::Sums<'s, V>,
    kept: &'s mut [Kept<V>],
}

impl<V: Vector> Reversal<'_, V> {
    /// The common case has code of its own; the rest share one.
    #[inline(always)]
    fn with(&mut self, both: Both<V>, given: bool, cotangents: Given<V>) {
        match both {
            Both::Same(b, c) if !given && self.near => self.of::<_, _, _, true>(b, c, ()),
            Both::Same(b, c) => self.of::<_, _, _, false>(b, c, cotangents),
            Both::Own(b, c) => self.of::<_, _, _, false>(b, c, cotangents),
        }
    }

    #[inline(always)]
    fn of<B: Rows<V>, C: Rows<V>, G: Cotangents<V>, const NEARBY: bool>(&mut self, b: B, c: C, cotangents: G) {
        let sums = [&mut self.db, &mut self.dc];
        let Reversal { steps, states, kept, .. } = self;
        match self.together {
            reverse::MOST => {
                reverse::<V, B, C, G, NEARBY, { reverse::MOST }>(steps, states, b, c, sums, cotangents, kept)
            }
            _ => reverse::<V, B, C, G, NEARBY, 1>(steps, states, b, c, sums, cotangents, kept),
        }
    }
}

/// Writes the gradients of `x` and `dt` of block `j`, and adds up those of its weights.
#[inline(always)]
fn write_block<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    block: &Block<V, S>,
    j: usize,
    scratch: &mut Scratch<V>,
) {
    let steps = scratch.back_steps[j * TILE..].iter().zip(&scratch.ends[j * TILE..]);
    for (t, (step, end)) in block.segment.time.clone().zip(steps) {
        let [dx, ddt] = block.gradients(step, end);
        scratch.dd[j] = step.dy.mul_add(end.x, scratch.dd[j]);
        scratch.ddt_bias[j] = scratch.ddt_bias[j].add(ddt);
        let (at, len) = (plan.inputs.offset(&block.segment, t), block.segment.channels.len());
        // SAFETY: panels share no element of (batch, time, channel).
        let (to_dx, to_ddt) = unsafe { (plan.sequences.dx.part(at, len), plan.sequences.ddt.part(at, len)) };
        S::store(dx, to_dx);
        S::store(ddt, to_ddt);
    }
}
