//! A panel of channels of one batch, forwards and backwards through time.

use super::super::by_channel::{Advance, decays_are_near, transpose_in, transpose_out};
use super::super::call::{BackStep, Block, Segment, Soon, Step, StepEnd};
use super::super::coefficients::{self, Both, Rows};
use super::Plan;
use super::reverse::{self, Cotangents, Given, Kept, States, reverse};
use super::sums::{Local, Slice};
use crate::cpu::pool::Shared;
use crate::cpu::vector::{Loops, MAX_LANES};
use crate::cpu::{Storage, Vector};
use crate::ops::scan::selective_scan::Problem;
use crate::tensor::Element;
use std::ops::Range;

/// Steps in a tile of a long sequence. Only the states between tiles are kept.
const TILE: usize = 32;

/// The longest sequence that is a single tile: it needs no kept states, which saves more than a smaller tile would.
const ONE_TILE: usize = 64;

/// The workspace of a thread. States are vectors of channels, block after block.
pub struct Scratch<V: Vector> {
    /// Steps in a tile.
    tile: usize,
    /// States in a block.
    state: usize,
    /// States in all blocks.
    states: usize,
    a: Vec<V>,
    /// The channels that `a` belongs to.
    a_of: Range<usize>,
    /// The states before each tile, and after the last.
    noted: Vec<V>,
    carry: Vec<V>,
    da: Vec<V>,
    /// One vector for each block.
    dd: Vec<V>,
    ddt_bias: Vec<V>,
    b: coefficients::Tile<V>,
    c: coefficients::Tile<V>,
    db: Local<V>,
    dc: Local<V>,
    /// The steps of a tile, block after block.
    steps: Vec<Step<V>>,
    back_steps: Vec<BackStep<V>>,
    ends: Vec<StepEnd<V>>,
    /// Whether all channels of a block have the same B and C.
    shared: Vec<bool>,
    /// Whether a block's decays are near 1 over the tile.
    near: Vec<bool>,
    kept: Vec<Kept<V>>,
    cotangents: Vec<V>,
}

impl<V: Vector> Scratch<V> {
    /// Allocates the workspace for any panel of the plan.
    pub fn new<S: Storage<Wide = V::Element>>(plan: &Plan<S>) -> Self {
        let Problem { length, state, channels, .. } = *plan.inputs.problem;
        let tile = if length <= ONE_TILE { length } else { TILE };
        let blocks = channels.min(plan.division.width).div_ceil(V::LANES);
        let forwards = length > tile || plan.sequences.dz.is_some();
        let zeros = |len| vec![V::zero(); len];
        Scratch {
            tile,
            state,
            states: 0,
            a_of: 0..0,
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
            steps: vec![Step::zero(); if forwards { blocks * tile } else { 0 }],
            back_steps: vec![BackStep::zero(); blocks * tile],
            ends: vec![StepEnd::zero(); blocks * tile],
            shared: Vec::with_capacity(blocks),
            near: vec![false; blocks],
            kept: vec![Kept::zero(); tile * reverse::MOST],
            cotangents: zeros(tile * reverse::MOST),
        }
    }

    /// Starts a panel of these channels: transposes `A` and clears the sums.
    #[inline(always)]
    pub fn begin<S: Storage<Wide = V::Element>>(&mut self, plan: &Plan<S>, channels: &Range<usize>) {
        let blocks = channels.len().div_ceil(V::LANES);
        self.states = blocks * self.state;
        if self.a_of != *channels {
            transpose_in(plan.inputs.a_rows(channels), self.state, &mut self.a);
            self.a_of = channels.clone();
        }
        for sums in [&mut self.da, &mut self.dd, &mut self.ddt_bias] {
            sums.fill(V::zero());
        }
        self.shared.clear();
        for block in (Segment { batch: 0, channels: channels.clone(), time: 0..0 }).blocks(V::LANES) {
            self.shared.push(coefficients::are_shared(&plan.inputs, &block));
        }
        plan.b.begin(channels, &self.shared, &mut self.db);
        plan.c.begin(channels, &self.shared, &mut self.dc);
    }

    /// Writes the sums over batch and time.
    #[inline(always)]
    pub fn write_weights<S: Storage<Wide = V::Element>>(&self, plan: &Plan<S>, part: usize, channels: &Range<usize>) {
        let (first, len) = (part * plan.division.channels + channels.start, channels.len());
        // SAFETY: only one unit has this part of the batches and this panel.
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

/// Takes a panel of one batch forwards and backwards. Prefetches the start of the `next` panel of this
/// thread.
#[inline(always)]
pub fn backward<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    panel: &Segment,
    next: Option<&Segment>,
    scratch: &mut Scratch<V>,
) {
    start(plan, panel, scratch);
    let mut blocks = Vec::new();
    for segment in panel.blocks(V::LANES) {
        blocks.push(Block::<V, S>::new(&plan.inputs, segment));
    }
    let length = scratch.tile;
    let tiles = panel.time.len().div_ceil(length.max(1));
    let tile = |i: usize| tile(panel, i, length);
    // The states after the last tile are not used, but the gate needs the outputs of that tile.
    let forwards = if plan.sequences.dz.is_some() { tiles } else { tiles.saturating_sub(1) };
    let arrays = plan.forwards();
    for i in 0..forwards {
        let next = if i + 1 < forwards { Some(tile(i + 1)) } else { None };
        let soon = Soon::of(&arrays, &plan.inputs, next.as_ref());
        forward_tile(plan, &blocks, &tile(i), soon, i, scratch);
    }
    let arrays = plan.backwards();
    for i in (0..tiles).rev() {
        let next = match next {
            _ if i > 0 => Some(tile(i - 1)),
            Some(next) if tiles > 1 => Some(self::tile(next, 0, length)),
            _ => None,
        };
        let soon = Soon::of(&arrays, &plan.inputs, next.as_ref());
        backward_tile(plan, &blocks, &tile(i), soon, i, scratch);
    }
    if let Some(dinitial_state) = &plan.sequences.dinitial_state {
        // SAFETY: panels share no channels within a batch.
        let dinitial_state =
            unsafe { dinitial_state.part(plan.inputs.state_offset(panel), panel.channels.len() * scratch.state) };
        transpose_out(&scratch.carry, scratch.state, dinitial_state);
    }
}

/// Tile `i` of a panel.
fn tile(panel: &Segment, i: usize, length: usize) -> Segment {
    Segment { time: i * length..panel.time.end.min((i + 1) * length), ..panel.clone() }
}

/// Loads the states before the first step, and the cotangents of those after the last.
#[inline(always)]
fn start<V: Vector<Element = S::Wide>, S: Storage>(plan: &Plan<S>, panel: &Segment, scratch: &mut Scratch<V>) {
    let Scratch { state, states, .. } = *scratch;
    scratch.noted.resize((panel.time.len().div_ceil(scratch.tile.max(1)) + 1) * states, V::zero());
    match plan.inputs.initial_state(panel) {
        Some(initial_state) => transpose_in(initial_state, state, &mut scratch.noted[..states]),
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

/// Advances the states over tile `i` and keeps them; writes the gradient of the gate, which needs `y`.
#[inline(always)]
fn forward_tile<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    blocks: &[Block<V, S>],
    tile: &Segment,
    soon: Soon,
    i: usize,
    scratch: &mut Scratch<V>,
) {
    let Scratch { state, states, .. } = *scratch;
    scratch.noted.copy_within(i * states..(i + 1) * states, (i + 1) * states);
    for t in tile.time.clone() {
        let i = t - tile.time.start;
        for (j, block) in blocks.iter().enumerate() {
            scratch.steps[j * scratch.tile + i] = block.step(t);
        }
    }
    for (j, segment) in tile.blocks(V::LANES).enumerate() {
        let steps = &mut scratch.steps[j * scratch.tile..][..tile.time.len()];
        let a = &scratch.a[j * state..(j + 1) * state];
        let h = &mut scratch.noted[(i + 1) * states + j * state..][..state];
        let both =
            coefficients::fill(&plan.inputs, &segment, scratch.shared[j], 0..state, [&mut scratch.b, &mut scratch.c]);
        let soon = soon.block(j * V::LANES);
        V::apart(Advance { steps, a, h, both, soon });
    }
    if let Some(dz) = &plan.sequences.dz {
        write_gates(plan, blocks, tile, dz, scratch);
    }
}

/// Writes the gradient of the gate.
#[inline(always)]
fn write_gates<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    blocks: &[Block<V, S>],
    tile: &Segment,
    dz: &Shared<S>,
    scratch: &Scratch<V>,
) {
    for t in tile.time.clone() {
        let i = t - tile.time.start;
        for (j, block) in blocks.iter().enumerate() {
            if let Some(gradient) = block.gate_gradient(t, plan.sequences.dy, scratch.steps[j * scratch.tile + i].y) {
                let (at, len) = (plan.inputs.offset(&block.segment, t), block.segment.channels.len());
                // SAFETY: panels share no element of (batch, time, channel).
                S::store(gradient, unsafe { dz.part(at, len) });
            }
        }
    }
}

/// Takes all blocks of tile `i` backwards: a few states of all blocks, then the next states, so that the sums over
/// blocks stay in the first-level cache.
#[inline(always)]
fn backward_tile<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    blocks: &[Block<V, S>],
    tile: &Segment,
    soon: Soon,
    i: usize,
    scratch: &mut Scratch<V>,
) {
    plan.b.begin_tile(tile, &mut scratch.db);
    plan.c.begin_tile(tile, &mut scratch.dc);
    begin_steps(plan, blocks, tile, scratch);
    let mut first = 0;
    while first < scratch.state {
        let states = first..first + reverse::together(scratch.state - first);
        for (j, block) in tile.blocks(V::LANES).enumerate() {
            let soon = soon.block(j * V::LANES).share(&states, scratch.state);
            let stride = reverse::stride::<V>(scratch.shared[j], states.len());
            let some = Slice { block: j, states: states.clone(), stride };
            reverse_block(plan, &block, soon, i, &some, scratch);
            plan.b.leave(&some, &block, &mut scratch.db);
            plan.c.leave(&some, &block, &mut scratch.dc);
        }
        first = states.end;
    }
    write_steps(plan, blocks, tile, scratch);
    plan.b.end_tile(plan.inputs.problem, tile, &scratch.db);
    plan.c.end_tile(plan.inputs.problem, tile, &scratch.dc);
}

/// Prepares the steps of all blocks: step by step, since the rows of a step are contiguous.
#[inline(always)]
fn begin_steps<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    blocks: &[Block<V, S>],
    tile: &Segment,
    scratch: &mut Scratch<V>,
) {
    for t in tile.time.clone() {
        let i = t - tile.time.start;
        for (j, block) in blocks.iter().enumerate() {
            let at = j * scratch.tile + i;
            (scratch.back_steps[at], scratch.ends[at]) = block.back_step(t, plan.sequences.dy);
        }
    }
    for j in 0..blocks.len() {
        let steps = &scratch.back_steps[j * scratch.tile..][..tile.time.len()];
        let a = &scratch.a[j * scratch.state..][..scratch.state];
        scratch.near[j] = decays_are_near(steps.iter().map(|step| &step.rate), a);
    }
}

/// Takes some states of a block backwards over tile `i`.
#[inline(always)]
fn reverse_block<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    block: &Segment,
    soon: Soon,
    i: usize,
    some: &Slice,
    scratch: &mut Scratch<V>,
) {
    let Scratch { state, states, .. } = *scratch;
    gather_cotangents(plan, block, &some.states, &mut scratch.cotangents);
    let j = some.block;
    let own = j * state..(j + 1) * state;
    let both = coefficients::fill(
        &plan.inputs,
        block,
        scratch.shared[j],
        some.states.clone(),
        [&mut scratch.b, &mut scratch.c],
    );
    V::apart(Reversal {
        steps: &mut scratch.back_steps[j * scratch.tile..][..block.time.len()],
        near: scratch.near[j],
        states: States {
            first: some.states.start,
            a: &scratch.a[own.clone()],
            start: &scratch.noted[i * states + j * state..][..state],
            carry: &mut scratch.carry[own.clone()],
            da: &mut scratch.da[own],
        },
        together: some.states.len(),
        db: plan.b.place(some, block, &mut scratch.db),
        dc: plan.c.place(some, block, &mut scratch.dc),
        both,
        given: plan.sequences.dstates.is_some(),
        cotangents: Given { values: &scratch.cotangents },
        kept: &mut scratch.kept,
        soon,
    });
}

/// Gathers the cotangents of some states of a block as vectors of channels; lanes past the last channel are zero.
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

/// The backward pass of some states of a block over a tile.
struct Reversal<'s, V: Vector> {
    steps: &'s mut [BackStep<V>],
    near: bool,
    states: States<'s, V>,
    /// The number of states that go through the tile together.
    together: usize,
    db: reverse::Sums<'s, V>,
    dc: reverse::Sums<'s, V>,
    both: Both<'s, V>,
    /// Whether `cotangents` are given, or else zero.
    given: bool,
    cotangents: Given<'s, V>,
    kept: &'s mut [Kept<V>],
    soon: Soon<'s>,
}

impl<V: Vector> Loops for Reversal<'_, V> {
    /// The common case is compiled separately; the others share one loop.
    #[inline(always)]
    fn run(mut self) {
        let cotangents = self.cotangents;
        match self.both {
            Both::Same(b, c) if !self.given && self.near => self.of::<_, _, _, true>(b.together(), c.together(), ()),
            Both::Same(b, c) => self.of::<_, _, _, false>(b.together(), c.together(), cotangents),
            Both::Own(b, c) => self.of::<_, _, _, false>(b, c, cotangents),
        }
    }
}

impl<V: Vector> Reversal<'_, V> {
    #[inline(always)]
    fn of<B: Rows<V>, C: Rows<V>, G: Cotangents<V>, const NEARBY: bool>(&mut self, b: B, c: C, cotangents: G) {
        let sums = [&mut self.db, &mut self.dc];
        let Reversal { steps, states, kept, soon, .. } = self;
        match self.together {
            reverse::MOST => {
                reverse::<V, B, C, G, NEARBY, { reverse::MOST }>(steps, states, (b, c), sums, cotangents, kept, *soon)
            }
            _ => reverse::<V, B, C, G, NEARBY, 1>(steps, states, (b, c), sums, cotangents, kept, *soon),
        }
    }
}

/// Writes the gradients of `x` and `dt`, and adds to those of `D` and `dt_bias`.
#[inline(always)]
fn write_steps<V: Vector<Element = S::Wide>, S: Storage>(
    plan: &Plan<S>,
    blocks: &[Block<V, S>],
    tile: &Segment,
    scratch: &mut Scratch<V>,
) {
    for t in tile.time.clone() {
        let i = t - tile.time.start;
        for (j, block) in blocks.iter().enumerate() {
            let (step, end) = (&scratch.back_steps[j * scratch.tile + i], &scratch.ends[j * scratch.tile + i]);
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
}
