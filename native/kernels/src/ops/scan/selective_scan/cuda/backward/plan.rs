//! How the gradient is laid out on the device: chosen by predicted time among a few layouts, within
//! a limit of memory.

use super::super::super::{Form, Problem};
use super::super::plan::{Pass, gcd};
use super::super::{Scan, groups};
use crate::cuda::{Facts, scratch_size};
use crate::ops::scan::sequences::Sequences;
use crate::tensor::DType;

/// Steps of a tile, between states that are kept: 32, since each lane of a warp prefetches one of them.
pub(super) const TILE: usize = 32;

/// Steps of the second pass whose states are in registers at once, and steps that are prepared at once.
pub(super) const SUB: usize = 4;
pub(super) const STAGE: usize = 8;

/// The free parameters of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlan {
    /// Channels per thread: 1, 2 or 4.
    pub channels: usize,
    /// Warps per block.
    pub warps: usize,
    /// The number of chunks of time.
    pub chunks: usize,
}

/// A plan, and the sizes that follow from it for one slab of states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub plan: BackwardPlan,
    pub states: usize,
    pub first_state: usize,
    pub slabs: bool,
    /// Threads that share a channel, and states that each of them has.
    pub lanes: usize,
    pub per_lane: usize,
    /// Channels of a section: no block has channels of two sections.
    pub section: usize,
    /// Steps per chunk.
    pub chunk: usize,
    pub chunks: usize,
    /// The most chunks of one launch of the backward pass.
    pub some_chunks: usize,
    /// Batches that a block processes one by one.
    pub batches: usize,
}

/// Elements of workspace of each of the kernel's arrays.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rooms {
    pub slabs: usize,
    pub bounds: usize,
    pub passed: usize,
    pub run_states: usize,
    pub run_channels: usize,
    pub const_b: usize,
    pub const_c: usize,
    pub part_b: usize,
    pub part_c: usize,
}

impl Rooms {
    pub fn elements(&self) -> usize {
        let Rooms { slabs, bounds, passed, run_states, run_channels, const_b, const_c, part_b, part_c } = *self;
        slabs + bounds + passed + run_states + 2 * run_channels + const_b + const_c + part_b + part_c
    }
}

fn of_batch(problem: &Problem) -> Sequences<'static> {
    Sequences::Batch { count: problem.batch, length: problem.length }
}

/// The most states of one launch.
fn most_states(dtype: DType) -> usize {
    if dtype == DType::F64 { 32 } else { 64 }
}

impl Way {
    /// The layouts of all slabs of states.
    pub fn slabs(scan: &Scan, facts: &Facts, plan: Option<BackwardPlan>) -> Vec<Way> {
        let (problem, most) = (&scan.like, most_states(scan.like.dtype));
        let slabs = problem.state.div_ceil(most).max(1);
        let one = |slab: usize| {
            let first = slab * most;
            let way = Way::choose(scan, facts, first, most.min(problem.state - first), slabs > 1, plan);
            // Packed sequences are all done at once, each by its own blocks.
            if scan.is_packed() { Way { some_chunks: way.chunks, batches: 1, ..way } } else { way }
        };
        (0..slabs).map(one).collect()
    }

    fn choose(
        scan: &Scan,
        facts: &Facts,
        first_state: usize,
        states: usize,
        slabs: bool,
        plan: Option<BackwardPlan>,
    ) -> Way {
        let problem = &scan.like;
        let new = |plan| Way::new(problem, first_state, states, slabs, plan);
        if let Some(plan) = plan {
            return new(plan).frugal(problem);
        }
        let mut best: Option<(bool, f64, Way)> = None;
        for plan in plans(problem, facts, MOST_CHUNKS.min(scan.most_chunks()), &new) {
            let way = new(plan).frugal(problem);
            let key = (way.takes_too_much(problem), way.clocks(problem, facts), way);
            if way.shared(problem, Pass::Results) <= facts.shared as usize
                && best.as_ref().is_none_or(|best| (key.0, key.1) < (best.0, best.1))
            {
                best = Some(key);
            }
        }
        match best {
            Some((_, _, way)) => way,
            None => unreachable!("one warp with one channel a thread fits every device"),
        }
    }

    fn new(problem: &Problem, first_state: usize, states: usize, slabs: bool, plan: BackwardPlan) -> Way {
        let per_lane = states.next_power_of_two().min(4);
        let shared = gcd(problem.channels / groups(problem.b), problem.channels / groups(problem.c));
        let chunk = problem.length.div_ceil(plan.chunks).next_multiple_of(TILE).max(TILE);
        let chunks = problem.length.div_ceil(chunk).max(1);
        Way {
            plan,
            states,
            first_state,
            slabs,
            lanes: states.div_ceil(per_lane).max(1).next_power_of_two(),
            per_lane,
            section: shared,
            chunk,
            chunks,
            some_chunks: chunks,
            batches: 1,
        }
    }

    /// Processes fewer chunks at once, or more batches per block, until the workspace is within its limit.
    fn frugal(mut self, problem: &Problem) -> Way {
        while self.takes_too_much(problem) && self.some_chunks > 1 {
            self.some_chunks = self.some_chunks.div_ceil(2);
        }
        while self.takes_too_much(problem) && self.chunks == 1 && self.batches < problem.batch {
            self.batches *= 2;
        }
        self
    }

    /// Whether the workspace has over 4 MiB, and a sixteenth of all states or more.
    fn takes_too_much(&self, problem: &Problem) -> bool {
        const SMALL: usize = 4 << 20;
        let Problem { batch, length, channels, state, dtype, .. } = *problem;
        let size = dtype.wide().size();
        let taken = scratch_size(self.rooms(problem, &of_batch(problem)).elements() * size);
        taken > SMALL && taken * 16 >= batch * length * channels * state * size
    }

    /// Channels of a warp.
    fn width(&self) -> usize {
        self.plan.channels * 32 / self.lanes
    }

    /// Blocks that cover one section.
    pub fn section_blocks(&self) -> usize {
        self.section.div_ceil(self.plan.warps * self.width())
    }

    /// Blocks that cover all channels.
    pub fn blocks(&self, problem: &Problem) -> usize {
        problem.channels.checked_div(self.section).unwrap_or(0) * self.section_blocks()
    }

    /// Whether some threads have padding channels, past the end of a section.
    pub fn is_ragged(&self) -> bool {
        !self.section.is_multiple_of(self.plan.warps * self.width())
    }

    /// The number of partial sums over batch and time.
    pub fn runs(&self, problem: &Problem) -> usize {
        problem.batch.div_ceil(self.batches) * self.chunks
    }

    /// The sizes of the workspace's arrays.
    pub fn rooms(&self, problem: &Problem, sequences: &Sequences) -> Rooms {
        let Problem { batch, length, channels, .. } = *problem;
        let tiles = length.div_ceil(TILE);
        let (runs, steps) = (self.runs(problem) * channels, sequences.steps());
        // Rows of `bounds` and of `passed`, and steps of the partial sums over channels.
        let [bounds, passed, of_round] = match sequences {
            Sequences::Batch { .. } => {
                [tiles.saturating_sub(1) * batch, tiles * batch, batch * (self.some_chunks * self.chunk).min(length)]
            }
            Sequences::Packed(_) => [steps / TILE + batch, steps / TILE + batch, steps],
        };
        let constant = |form| if form == Form::Constant { runs * self.states } else { 0 };
        let part = |form| match form {
            Form::PerStep { groups } if self.blocks(problem) > groups => self.blocks(problem) * of_round * self.states,
            _ => 0,
        };
        Rooms {
            slabs: if self.slabs { 3 * steps * channels } else { 0 },
            bounds: bounds * channels * self.states,
            passed: if self.chunks > 1 { passed * channels } else { 0 },
            run_states: runs * self.states,
            run_channels: runs,
            const_b: constant(problem.b),
            const_c: constant(problem.c),
            part_b: part(problem.b),
            part_c: part(problem.c),
        }
        .aligned()
    }

    /// Bytes of shared memory: the kernel's `Shared`, with a gate.
    pub fn shared(&self, problem: &Problem, pass: Pass) -> usize {
        let (width, padded) = (self.width(), self.lanes * self.per_lane);
        let (rows, warp) = match pass {
            Pass::Ends => (2 * STAGE, 2 * TILE * width + STAGE * width + SUB * width + 4),
            Pass::Results => {
                let sums = (3 + 1) * SUB * width;
                (TILE, 2 * TILE * width + sums + TILE / SUB * (padded * width.max(2 * SUB)))
            }
        };
        (2 * rows * padded + self.plan.warps * warp) * problem.dtype.wide().size()
    }

    /// Blocks to be resident on a multiprocessor, which limits their registers.
    pub fn resident(&self, problem: &Problem, pass: Pass) -> usize {
        let states = self.plan.channels * self.per_lane * problem.dtype.wide().size() / 4;
        let warps = match (states, pass) {
            (0..=4, _) => 16,
            (5..=8, Pass::Ends) => 16,
            (5..=8, _) => 12,
            (_, Pass::Ends) => 12,
            _ => 8,
        };
        (warps / self.plan.warps).max(1)
    }

    /// Predicted clocks: the instructions that the busiest multiprocessor issues, and how well its warps hide latency.
    fn clocks(&self, problem: &Problem, facts: &Facts) -> f64 {
        let (width, shared) = (self.plan.channels * self.per_lane * self.plan.warps, facts.shared as usize);
        let filled = |blocks: usize| {
            let warps = (blocks * self.plan.warps) as f64 / 4.0;
            if blocks == 0 { 0.0 } else { blocks as f64 * (1.0 + 1.3 / warps.max(0.5)) }
        };
        let pass = |pass: Pass, per_state: f64, some: usize| {
            let blocks = self.blocks(problem) * problem.batch.div_ceil(self.batches) * some;
            let blocks = blocks.div_ceil(facts.multiprocessors as usize);
            let resident = self.resident(problem, pass).min((shared / self.shared(problem, pass)).max(1));
            let turns = (blocks / resident) as f64 * filled(resident) + filled(blocks % resident);
            turns * (self.chunk * self.batches * width) as f64 / 4.0 * per_state + 3000.0
        };
        let rounds = self.chunks.div_ceil(self.some_chunks) as f64;
        let reduction = [0.0, 18.0, 6.0, 0.0, 0.0][self.plan.channels];
        let back = rounds * (pass(Pass::Results, 24.0 + reduction, self.some_chunks) + 8000.0);
        match self.chunks {
            1 if problem.length <= TILE => back,
            1 => back + pass(Pass::Ends, 7.0, 1),
            chunks => back + pass(Pass::Ends, 11.0, chunks) + 5000.0 + 600.0 * chunks as f64,
        }
    }
}

impl Rooms {
    /// Rounds sizes up, so that every array starts at a multiple of 16 bytes.
    fn aligned(self) -> Rooms {
        let up = |elements: usize| elements.next_multiple_of(4);
        Rooms {
            slabs: up(self.slabs),
            bounds: up(self.bounds),
            passed: up(self.passed),
            run_states: up(self.run_states),
            run_channels: up(self.run_channels),
            const_b: up(self.const_b),
            const_c: up(self.const_c),
            part_b: up(self.part_b),
            part_c: up(self.part_c),
        }
    }
}

/// The layouts to compare.
fn plans(
    problem: &Problem,
    facts: &Facts,
    most_chunks: usize,
    new: &impl Fn(BackwardPlan) -> Way,
) -> Vec<BackwardPlan> {
    let constant = problem.b == Form::Constant || problem.c == Form::Constant;
    let most = match problem.dtype {
        DType::F64 => 2,
        _ if constant => 2,
        _ => 4,
    };
    let mut plans = Vec::new();
    for channels in [4, 2, 1].into_iter().filter(|&channels| channels <= most) {
        for warps in [8, 4, 2, 1] {
            let whole = BackwardPlan { channels, warps, chunks: 1 };
            let way = new(whole);
            // Eight warps only where each has few channels.
            if warps == 8 && way.width() > 8 {
                continue;
            }
            plans.push(whole);
            let (blocks, room) = (way.blocks(problem) * problem.batch, way.resident(problem, Pass::Results));
            let tiles = problem.length.div_ceil(TILE);
            for full in 1..=5 {
                let chunks = (full * room * facts.multiprocessors as usize).checked_div(blocks).unwrap_or(1);
                let chunks = chunks.min(tiles).min(most_chunks);
                if chunks > 1 {
                    plans.push(BackwardPlan { chunks, ..whole });
                }
            }
        }
    }
    plans
}

/// The most chunks: composing them is sequential.
const MOST_CHUNKS: usize = 256;
