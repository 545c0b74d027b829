//! Plans of how a walk through time is divided among blocks. A group is the blocks that share the matrices: a cluster,
//! or the whole grid.

use super::super::Problem;
use crate::cuda::{Facts, type_names};
use crate::error::{Error, Kind, Result};

/// Rows per warp; must equal `ROWS` in `walk.cu`.
const ROWS: usize = 8;

/// Columns per chunk.
const CHUNK: usize = 128;

/// Columns of the state per block, for clusters.
const OWN_IN_CLUSTER: [usize; 2] = [32, 64];

/// The largest possible cluster.
const LARGEST_CLUSTER: usize = 16;

/// The most sequences that a group walks at once.
const MOST_SEQUENCES: usize = 8;

/// Warps per block: with more of them, threads have too few registers to hold many weights.
const WARPS: [usize; 3] = [8, 16, 32];

/// The constants that the kernel is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether groups are clusters; otherwise the whole grid is one group.
    pub cluster: bool,
    /// Blocks per group.
    pub blocks: usize,
    /// Columns of the state that a block owns.
    pub own: usize,
    /// Sequences that a group walks at once.
    pub sequences: usize,
    /// Warps with different rows, [`ROWS`] each.
    pub row_warps: usize,
    /// Warps that share rows, and divide their columns.
    pub column_warps: usize,
    /// Chunks of columns per thread, and how many of them are in registers and in shared memory.
    pub chunks: usize,
    pub in_registers: usize,
    pub in_shared: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// The properties of a walk that determine its plan.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    pub width: usize,
    pub gates: usize,
    pub backward: bool,
    pub norm: bool,
    /// Bytes of an element in storage, and of one in the arithmetic.
    pub stored: usize,
    pub wide: usize,
}

impl Walk {
    pub fn new(problem: &Problem, backward: bool) -> Walk {
        let (stored, wide) = (problem.dtype.size(), problem.dtype.wide().size());
        let gates = 1 + usize::from(problem.mixed);
        Walk { width: problem.width, gates, backward, norm: problem.norm, stored, wide }
    }

    /// Columns of the matrix.
    fn inner(&self) -> usize {
        if self.backward { self.gates * self.width } else { self.width }
    }

    /// Rows of the matrix per column of the state.
    fn rows(&self) -> usize {
        if self.backward { 1 } else { self.gates }
    }

    /// A plan with clusters of `sequences` sequences each; `None` if a cluster's registers and shared memory do not
    /// hold all weights.
    pub fn in_clusters(&self, sequences: usize, facts: &Facts) -> Option<Plan> {
        let own = OWN_IN_CLUSTER.into_iter().find(|own| self.width <= own * LARGEST_CLUSTER)?;
        let blocks = self.width.div_ceil(own).next_power_of_two();
        let plans = [8, 16].into_iter().filter_map(|warps| self.plan(true, [blocks, own, sequences], warps, facts));
        plans.filter(|plan| plan.far() == 0).max_by_key(|plan| plan.row_warps * plan.column_warps)
    }

    /// A plan with the whole grid as one group of `sequences` sequences; their number is halved until their states fit.
    pub fn on_grid(&self, sequences: usize, facts: &Facts) -> Result<Plan> {
        let unit = ROWS / self.rows();
        let own = self.width.div_ceil(facts.multiprocessors as usize).next_multiple_of(unit);
        let blocks = self.width.div_ceil(own);
        let fewer = (0..=MOST_SEQUENCES.ilog2()).map(|halved| sequences >> halved).take_while(|&n| n > 0);
        let mut plans = fewer.flat_map(|n| WARPS.map(|warps| self.plan(false, [blocks, own, n], warps, facts)));
        plans.find_map(|plan| plan).ok_or_else(|| {
            Error::new(Kind::Size, "z")
                .expected("a width whose states have room in the shared memory of this device")
                .got(self.width)
                .hint("Run it on the CPU, with `backend: :cpu`")
        })
    }

    fn plan(&self, cluster: bool, [blocks, own, sequences]: [usize; 3], warps: usize, facts: &Facts) -> Option<Plan> {
        let row_warps = (own * self.rows()).div_ceil(ROWS);
        let column_warps = (warps / row_warps).min(self.inner().div_ceil(CHUNK));
        if column_warps == 0 {
            return None;
        }
        let chunks = self.inner().div_ceil(CHUNK * column_warps);
        let in_registers = self.registers(row_warps * column_warps, sequences).min(chunks);
        let mut plan = Plan {
            cluster,
            blocks,
            own,
            sequences,
            row_warps,
            column_warps,
            chunks,
            in_registers,
            in_shared: 0,
            shared: 0,
        };
        let (state, chunk) = (self.state(&plan), ROWS * plan.threads() * 4 * self.stored);
        let room = (facts.shared as usize).checked_sub(state)?;
        plan.in_shared = (room / chunk).min(chunks - in_registers);
        plan.shared = state + plan.in_shared * chunk;
        Some(plan)
    }

    /// Chunks of weights that fit in the registers of a thread, next to its sums and other values.
    fn registers(&self, warps: usize, sequences: usize) -> usize {
        let words = self.wide / 4;
        let (there, chunk, sums) = (65536 / (32 * warps), ROWS * 4 * words, ROWS * sequences * words);
        there.min(255).saturating_sub(sums + 50 * words) / chunk
    }

    /// Bytes of the struct `State` in `walk.cu`.
    fn state(&self, plan: &Plan) -> usize {
        let (copies, items) = (1 + usize::from(plan.cluster), plan.own * plan.sequences);
        let vectors = copies * plan.sequences * plan.padded();
        let sums = plan.column_warps * plan.row_warps * ROWS * plan.sequences;
        let fresh = if self.backward { self.gates } else { 1 } * items;
        let norm = if self.norm { (copies * plan.blocks + 1) * plan.sequences } else { 0 };
        ((vectors + sums + fresh + items + norm) * self.wide).next_multiple_of(16)
    }

    /// The compiler options.
    pub fn options(&self, plan: &Plan, dtype: crate::tensor::DType) -> String {
        let (storage, real) = type_names(dtype);
        format!(
            "-DSTORAGE={storage} -DREAL={real} -DBACKWARD={} -DGATES={} -DNORM={} -DCLUSTER={} -DBLOCKS={} -DOWN={} \
             -DBATCH={} -DWR={} -DWK={} -DCHUNKS={} -DREGS={} -DSHARED={}",
            u32::from(self.backward),
            self.gates,
            u32::from(self.norm),
            u32::from(plan.cluster),
            plan.blocks,
            plan.own,
            plan.sequences,
            plan.row_warps,
            plan.column_warps,
            plan.chunks,
            plan.in_registers,
            plan.in_shared
        )
    }
}

impl Plan {
    /// Threads per block.
    pub fn threads(&self) -> usize {
        32 * self.row_warps * self.column_warps
    }

    /// Columns of the matrix, padded to whole chunks.
    pub fn padded(&self) -> usize {
        self.chunks * self.column_warps * CHUNK
    }

    /// Chunks per thread that do not fit on the multiprocessor and stay in global memory.
    pub fn far(&self) -> usize {
        self.chunks - self.in_registers - self.in_shared
    }

    /// Elements of the weights that stay in global memory.
    pub fn far_elements(&self) -> usize {
        self.blocks * self.far() * ROWS * self.threads() * 4
    }
}

/// Sequences per group where `groups` groups run at once: enough for the whole batch, up to [`MOST_SEQUENCES`].
pub fn together(batch: usize, groups: usize) -> usize {
    batch.div_ceil(groups.max(1)).next_power_of_two().min(MOST_SEQUENCES)
}
