//! How a scan is laid out on the device: chosen by predicted clocks among a few dozen layouts.

use super::super::{Form, Problem};
use super::{Scan, groups};
use crate::tensor::DType;

/// The free parameters of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Threads that share a channel, a power of two up to 32.
    pub lanes: usize,
    /// Steps that each of them owns per tile.
    pub owned: usize,
    /// Warps per block.
    pub warps: usize,
    /// The number of chunks of time.
    pub chunks: usize,
}

/// The passes over chunks of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// The states at the ends of chunks; in the gradient those between tiles, and the outgoing adjoints of chunks.
    Ends,
    /// The results. It is the scan's only pass where there is one chunk.
    Results,
}

/// How B or C reaches the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Through a tile in shared memory, the same for all channels of a block.
    Tile,
    /// Read by each thread, where neighbouring channels differ.
    Direct,
    /// In registers.
    Constant,
}

impl Reach {
    /// Its name in `forward.cu`.
    pub fn name(self) -> &'static str {
        match self {
            Reach::Tile => "TILE",
            Reach::Direct => "DIRECT",
            Reach::Constant => "CONSTANT",
        }
    }
}

/// A plan, and the sizes that follow from it for one slab of states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub plan: Plan,
    pub states: usize,
    pub slabs: bool,
    /// Steps that the lanes of a channel share among them.
    pub together: usize,
    pub form_b: Reach,
    pub form_c: Reach,
    /// Channels of a section: no block has channels of two sections.
    pub section: usize,
    pub chunk: usize,
    pub chunks: usize,
    /// Blocks to be resident on a multiprocessor, which limits their registers.
    pub resident: usize,
}

/// The most states of one launch.
pub(super) fn most_states(dtype: DType) -> usize {
    if dtype == DType::F64 { 128 } else { 256 }
}

/// Bytes of states that a thread can hold in registers, in addition to its other values.
const MOST_IN_REGISTERS: usize = 128;

/// Shared memory that every device grants without opting in.
const SHARED: usize = 48 << 10;

impl Way {
    pub fn choose(scan: &Scan, states: usize, slabs: bool, processors: usize, plan: Option<Plan>) -> Way {
        let problem = &scan.like;
        if let Some(plan) = plan {
            return Way::new(problem, states, slabs, plan).resident(problem, processors);
        }
        let mut best: Option<(f64, Way)> = None;
        for plan in plans(problem, states).filter(|plan| plan.chunks <= scan.most_chunks()) {
            let way = Way::new(problem, states, slabs, plan);
            if way.fits(problem) {
                let clocks = way.clocks(problem, processors);
                if best.is_none_or(|(least, _)| clocks < least) {
                    best = Some((clocks, way));
                }
            }
        }
        match best {
            Some((_, way)) => way.resident(problem, processors),
            None => unreachable!("16 lanes with one step each hold {states} states"),
        }
    }

    fn new(problem: &Problem, states: usize, slabs: bool, plan: Plan) -> Way {
        let (b, c) = (groups(problem.b), groups(problem.c));
        let shared = gcd(problem.channels / b, problem.channels / c);
        // Groups too narrow to fill a warp are read directly.
        let by_group = shared < problem.channels && shared * plan.lanes >= 32;
        let reach = |form| match form {
            Form::Constant => Reach::Constant,
            Form::PerStep { groups } if groups > 1 && !by_group => Reach::Direct,
            Form::PerStep { .. } => Reach::Tile,
        };
        let together = if problem.length <= 1 { 1 } else { plan.lanes };
        let tile = together * plan.owned;
        let chunk = problem.length.div_ceil(plan.chunks).next_multiple_of(tile).max(tile);
        Way {
            plan,
            states,
            slabs,
            together,
            form_b: reach(problem.b),
            form_c: reach(problem.c),
            section: if by_group { shared } else { problem.channels },
            chunk,
            chunks: problem.length.div_ceil(chunk).max(1),
            resident: 1,
        }
    }

    /// Sets the number of resident blocks. With few warps each may have many registers, to overlap its steps; with more
    /// warps, more of them should be resident.
    fn resident(self, problem: &Problem, processors: usize) -> Way {
        let blocks = (self.blocks(problem) * self.chunks).div_ceil(processors);
        let warps = match self.per_lane() * problem.dtype.wide().size() {
            0..=32 if blocks * self.plan.warps > 12 => 16,
            0..=32 => 12,
            _ => 8,
        };
        Way { resident: (warps / self.plan.warps).max(1), ..self }
    }

    /// States per thread.
    pub fn per_lane(&self) -> usize {
        self.states.div_ceil(self.plan.lanes).max(1)
    }

    /// Blocks that cover one section of one batch.
    pub fn section_blocks(&self) -> usize {
        self.section.div_ceil(self.plan.warps * 32 / self.plan.lanes)
    }

    /// Blocks that cover all channels of all batches.
    pub fn blocks(&self, problem: &Problem) -> usize {
        problem.batch * (problem.channels / self.section) * self.section_blocks()
    }

    /// The sequences whose blocks fill the device once, if the blocks of all of them run at once: see
    /// [`Sequences::table`](crate::ops::scan::sequences::Sequences::table).
    pub fn round(&self, problem: &Problem, processors: usize) -> usize {
        let all = self.blocks(problem) * self.chunks;
        if all > self.resident * processors { usize::MAX } else { (processors * problem.batch / all.max(1)).max(1) }
    }

    /// Elements of workspace for a chunk's end states and its sums of delta.
    pub fn end_elements(&self, problem: &Problem) -> usize {
        problem.batch * problem.channels * (self.states + 1)
    }

    fn fits(&self, problem: &Problem) -> bool {
        let size = problem.dtype.wide().size();
        let Plan { lanes, owned, warps, .. } = self.plan;
        let units = (2 * self.per_lane() * size).div_ceil(16) | usize::from(lanes > 1);
        let tiles = 2 * self.together * owned * lanes * units * 16;
        let steps = if lanes > 1 { warps * self.together * owned * 32 / lanes * 2 * size } else { 0 };
        self.per_lane() * size <= MOST_IN_REGISTERS && tiles + steps <= SHARED
    }

    /// Whether offsets within a tile fit 32 bits.
    pub fn is_near(&self, problem: &Problem) -> bool {
        let steps = self.together * self.plan.owned + 1;
        problem.channels.saturating_mul(steps * 8) < 1 << 32
    }

    /// Predicted clocks. A warp's step has a cost per state, to issue and to exponentiate, and a fixed cost. The warps
    /// of a scheduler add up, and a single warp cannot hide its own latency. Fitted to measurements on an H200.
    fn clocks(&self, problem: &Problem, processors: usize) -> f64 {
        let Plan { lanes, owned, warps, .. } = self.plan;
        let k = self.per_lane() as f64;
        // Per tile: loads, and a barrier that takes longer for more warps; B and C are shared by warps.
        let tile = (60.0 + 4.0 * warps as f64) / (lanes * owned) as f64 + 0.4 * self.states as f64 / warps as f64;
        let pass = |per_state: f64, chunks: usize| {
            let blocks = (self.blocks(problem) * chunks).div_ceil(processors);
            let warps = (blocks * warps).div_ceil(4) as f64;
            let step = per_state * k + 18.0 + tile;
            1500.0 + 250.0 * owned as f64 + 12.0 * k + self.chunk as f64 * step * warps.max(1.3)
        };
        let last = pass(9.3, self.chunks);
        if self.chunks == 1 {
            return last;
        }
        last + pass(7.5, self.chunks - 1) + 2000.0 + 60.0 * self.chunks as f64
    }
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The layouts to compare.
fn plans(problem: &Problem, states: usize) -> impl Iterator<Item = Plan> {
    let length = problem.length.max(1);
    let chunks = (0..8).map(|i| 1 << i).filter(move |&chunks| chunks == 1 || length >= 128 * chunks);
    // The code is unrolled over all states and steps of a tile, and should fit the instruction cache.
    let most_code = if problem.dtype == DType::F64 { 64 } else { 128 };
    let longest = (most_code / states.next_power_of_two()).clamp(1, 8);
    let lanes = [1, 2, 4, 8, 16, 32].into_iter().filter(move |&lanes| length > 1 || lanes == single_step_lanes(states));
    lanes.flat_map(move |lanes| {
        let owned = longest.min(length.div_ceil(lanes).next_power_of_two());
        let chunks = chunks.clone();
        halves(owned).flat_map(move |owned| {
            let chunks = chunks.clone();
            let warps = [4, 2, 1].into_iter();
            warps.flat_map(move |warps| chunks.clone().map(move |chunks| Plan { lanes, owned, warps, chunks }))
        })
    })
}

fn halves(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(most), |&one| (one > 1).then_some(one / 2))
}

/// A single step only loads and stores states: 16 bytes per thread, contiguous between neighbours.
fn single_step_lanes(states: usize) -> usize {
    states.div_ceil(4).next_power_of_two().min(32)
}
