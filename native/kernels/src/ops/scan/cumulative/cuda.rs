//! The scans on CUDA: one kernel for all of them. Blocks walk through time, and read and write global memory once.

use super::{Problem, Scan};
use crate::cuda::{Buffer, Facts, Kernel, Lane, Source, Together, grid_size, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};

const SCAN: Source<Params> = Source::new(
    "cumulative",
    concat!(
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("scans.cu"),
        include_str!("copies.cu"),
        include_str!("exchange.cu"),
        include_str!("tiles.cu"),
    ),
);

/// Threads of a block.
const THREADS: usize = 256;

/// The most channels of a tile.
const SIDE_BY_SIDE: usize = 32;

/// Limits of a thread in a tile: bytes that it reads, elements of a tensor, and steps.
const READ: usize = 256;
const NUMBERS: usize = 32;
const STEPS: usize = 16;

/// The most tiles in shared memory: the stages of the pipeline.
const STAGES: usize = 4;

/// The most blocks of a cluster.
const MOST_BLOCKS: usize = 8;

/// Bytes of shared memory above which three blocks fit, if they read a single tensor.
const MUCH: usize = 200 << 10;

/// Bytes of shared memory that the system reserves in each block.
const RESERVED: usize = 1 << 10;

/// Bytes of a memory sector: a tile that reads fewer bytes of a row wastes the rest.
const SECTOR: usize = 32;

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params {
        x: u64 as "const STORAGE*",
        y: u64 as "const STORAGE*",
        wide_y: u64 as "const REAL*",
        dy: u64 as "const STORAGE*",
        dlog_y: u64 as "const REAL*",
        // `first` is the scan's initial state, for its gradient; `start` that of the walk: `initial_state` or
        // `dlast_state`.
        first: u64 as "const REAL*",
        start: u64 as "const REAL*",
        to: u64 as "Y*",
        log_to: u64 as "REAL*",
        last: u64 as "REAL*",
        // `columns` are tiles across the channels of a row, `cluster` blocks that share a row, `rounds` tiles of a
        // block.
        length: i64,
        width: i64,
        columns: i64,
        cluster: i64,
        rounds: i64,
        eps: f64,
        log_min: f64,
        floor: f64,
        back: i64,
    }
}

/// Queues a scan.
pub fn forward(
    problem: &Problem,
    [x, _]: [&str; 2],
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let params = Params {
        x: lane.address(inputs.get(x)?)?,
        start: address(lane, inputs, "initial_state")?,
        to: lane.address(outputs.get("y")?)?,
        log_to: address(lane, outputs, "log_y")?,
        last: address(lane, outputs, "last_state")?,
        back: problem.settings.reverse.into(),
        ..Params::default()
    };
    launch(problem, Pass::Scan, params, lane)
}

/// Queues a gradient.
pub fn backward(
    problem: &Problem,
    [x, dx]: [&str; 2],
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let params = Params {
        x: address(lane, inputs, x)?,
        y: address(lane, inputs, "y")?,
        dy: lane.address(inputs.get("dy")?)?,
        dlog_y: address(lane, inputs, "dlog_y")?,
        first: address(lane, inputs, "initial_state")?,
        start: address(lane, inputs, "dlast_state")?,
        to: lane.address(outputs.get(dx)?)?,
        last: address(lane, outputs, "dinitial_state")?,
        back: (!problem.settings.reverse).into(),
        ..Params::default()
    };
    if problem.settings.scan != Scan::LogSumExp {
        return launch(problem, Pass::Gradient, params, lane);
    }
    let y = lane.temporary(Spec { dtype: problem.state.dtype, ..problem.sequence })?;
    let again = Params {
        x: params.x,
        start: params.first,
        to: lane.address(&y)?,
        back: problem.settings.reverse.into(),
        ..Params::default()
    };
    launch(problem, Pass::WideScan, again, lane)?;
    launch(problem, Pass::Gradient, Params { wide_y: lane.address(&y)?, ..params }, lane)
}

fn address(lane: &Lane, tensors: &Named<&Buffer>, name: &str) -> Result<u64> {
    tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer))
}

/// What the kernel computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pass {
    Scan,
    /// Writes results in the type of the arithmetic.
    WideScan,
    Gradient,
}

fn launch(problem: &Problem, pass: Pass, params: Params, lane: &Lane) -> Result<()> {
    if problem.rows * problem.width == 0 {
        return Ok(());
    }
    let Params { x, y, wide_y, dy, dlog_y, to, log_to, .. } = params;
    let aligned = [x, y, wide_y, dy, dlog_y, to, log_to].iter().all(|address| address.is_multiple_of(16));
    let plan = Plan::new(problem, pass, aligned, &lane.device().facts());
    let (eps, log_min, floor) = match problem.settings.scan {
        Scan::ExpProduct { eps, log_min, floor } => (eps, log_min, floor),
        _ => (0.0, 0.0, 0.0),
    };
    let kernel = lane.device().kernel(&SCAN, &plan.options(problem.dtype()))?;
    let plan = plan.at_once(problem, &kernel, lane)?;
    let [length, width, columns, cluster, rounds] =
        [problem.length, problem.width, plan.columns, plan.cluster, plan.rounds(problem)].map(|size| size as i64);
    let params = Params { length, width, columns, cluster, rounds, eps, log_min, floor, ..params };
    let blocks = grid_size(problem.rows * plan.columns * plan.cluster)?;
    let size = [THREADS as u32, plan.shared() as u32];
    // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's; and the kernel has
    // the shared memory that its stages take.
    unsafe {
        match plan.cluster {
            1 => lane.launch_with(&kernel, [blocks, 1, 1], size[0], size[1], &params),
            cluster => lane.launch_together(&kernel, Together::Cluster(cluster as u32), blocks, size, &params),
        }
    }
}

/// The most blocks of a cluster on this device.
fn most_blocks(facts: &Facts) -> usize {
    if facts.capability.0 < 9 { 1 } else { MOST_BLOCKS }
}

/// How the work is divided.
#[derive(Clone, Copy, Debug)]
struct Plan {
    pass: Pass,
    /// The scan's name in the source.
    scan: &'static str,
    /// Bytes of a channel's total.
    total: usize,
    /// Tensors in shared memory, and bytes of an element there.
    tensors: usize,
    element: usize,
    /// Channels and steps of a thread in a tile.
    channels: usize,
    steps: usize,
    /// Tiles in shared memory.
    stages: usize,
    /// Threads across the channels of a tile, and tiles across the channels of a row.
    side_by_side: usize,
    columns: usize,
    /// Whether a tile's channels fill a sector, so that each thread may copy just the data that it uses.
    own: bool,
    /// Blocks that share a row.
    cluster: usize,
    /// Resident blocks of a multiprocessor, so that some compute while others wait for memory.
    blocks: usize,
}

impl Plan {
    fn new(problem: &Problem, pass: Pass, aligned: bool, facts: &Facts) -> Plan {
        let (stored, real) = (problem.dtype().size(), problem.state.dtype.size());
        let together = if stored == size_of::<f64>() { 2 } else { 4 };
        let channels = if aligned && problem.width.is_multiple_of(together) { together } else { 1 };
        let side_by_side = problem.width.div_ceil(channels).next_power_of_two().min(SIDE_BY_SIDE / channels);
        let own = side_by_side * channels * stored >= SECTOR;
        let (scan, tensors, wide, total): (_, usize, _, _) = match (problem.settings.scan, pass) {
            (Scan::Product, Pass::Gradient) => ("PRODUCT", 3, false, size_of::<f64>() + real),
            (Scan::Product, _) => ("PRODUCT", 1, false, size_of::<f64>()),
            (Scan::ExpProduct { .. }, Pass::Gradient) => ("EXP_PRODUCT", 4, true, 3 * real),
            // Its two results are staged over its inputs, unless threads store them directly.
            (Scan::ExpProduct { .. }, _) => ("EXP_PRODUCT", if own { 1 } else { 2 }, true, real),
            (Scan::Sum, _) => ("SUM", 1, false, real),
            (Scan::LogSumExp, Pass::Gradient) => ("LOG_SUM_EXP", 4, true, 2 * real),
            (Scan::LogSumExp, _) => ("LOG_SUM_EXP", 1, pass == Pass::WideScan, 2 * real),
        };
        let element = if wide { real } else { stored };
        let steps = READ / (tensors.next_power_of_two() * channels * element);
        let light = tensors == 1 && real < size_of::<f64>() && facts.shared as usize > MUCH;
        let plan = Plan {
            pass,
            scan,
            total,
            tensors,
            element,
            channels,
            steps: steps.min(NUMBERS / channels).clamp(1, STEPS),
            stages: 2,
            side_by_side,
            columns: 0,
            own,
            cluster: 1,
            blocks: if light { 3 } else { 2 },
        };
        plan.in_shared(facts).spread(problem, facts)
    }

    /// Fits the stages to the block's share of shared memory. Where two do not fit, tiles get fewer steps.
    fn in_shared(mut self, facts: &Facts) -> Plan {
        let declared = self.declared(most_blocks(facts));
        let part = ((facts.shared as usize + RESERVED) / self.blocks).saturating_sub(RESERVED + declared);
        while self.shared() > part && self.steps > 1 {
            self.steps /= 2;
        }
        let tile = self.shared() / self.stages;
        Plan { stages: (part / tile).clamp(2, STAGES), ..self }
    }

    /// Spreads the work over nearly two blocks per multiprocessor, or more if there is room. The blocks of a cluster
    /// share a row. Where the largest clusters are not enough, tiles take fewer of its channels.
    fn spread(mut self, problem: &Problem, facts: &Facts) -> Plan {
        let multiprocessors = facts.multiprocessors as usize;
        let least = SECTOR.div_ceil(self.channels * problem.dtype().size());
        loop {
            self.columns = problem.width.div_ceil(self.side_by_side * self.channels);
            let (chains, most) = (problem.rows * self.columns, most_blocks(facts).min(self.tiles(problem)));
            self.cluster = (multiprocessors * self.blocks / chains).clamp(1, most);
            if self.side_by_side <= least || chains * most >= multiprocessors * 9 / 5 {
                return self;
            }
            self.side_by_side /= 2;
        }
    }

    /// Shrinks the clusters until all of them are resident at once.
    fn at_once(mut self, problem: &Problem, kernel: &Kernel<Params>, lane: &Lane) -> Result<Plan> {
        let size = [THREADS as u32, self.shared() as u32];
        while self.cluster > 2
            && lane.device().clusters(kernel, self.cluster as u32, size)? < problem.rows * self.columns
        {
            self.cluster -= 1;
        }
        Ok(self)
    }

    /// Tiles along the length of a row.
    fn tiles(&self, problem: &Problem) -> usize {
        problem.length.div_ceil(THREADS / self.side_by_side * self.steps).max(1)
    }

    /// Tiles that each block processes.
    fn rounds(&self, problem: &Problem) -> usize {
        self.tiles(problem).div_ceil(self.cluster)
    }

    /// The most bytes of static shared memory: two exchanges, each with the totals of all warps, of `blocks` blocks and
    /// of the tile.
    fn declared(&self, blocks: usize) -> usize {
        2 * (self.total * (THREADS / 32 + blocks + 1) * self.side_by_side * self.channels + 64)
    }

    /// Bytes of dynamic shared memory: all stages.
    fn shared(&self) -> usize {
        self.stages * self.tensors * THREADS * self.steps * self.channels * self.element
    }

    fn options(&self, dtype: DType) -> String {
        let Plan { scan, channels, side_by_side, steps, stages, blocks, .. } = self;
        let gradient = u8::from(self.pass == Pass::Gradient);
        let y = if self.pass == Pass::WideScan { "REAL" } else { "STORAGE" };
        let (own, clustered) = (u8::from(self.own), u8::from(self.cluster > 1));
        let most_blocks = if self.cluster > 1 { MOST_BLOCKS } else { 1 };
        format!(
            "{} -DY={y} -DSCAN={scan} -DGRADIENT={gradient} -DVEC={channels} -DCOLS={side_by_side} -DROWS={steps} \
             -DTHREADS={THREADS} -DBLOCKS={blocks} -DSTAGES={stages} -DOWN={own} -DCLUSTERED={clustered} \
             -DMOST_BLOCKS={most_blocks}",
            types(dtype)
        )
    }
}
