//! The scans on CUDA: one kernel for all of them, which reads and writes memory once.

use super::{Problem, Scan};
use crate::cuda::{Buffer, Lane, Source, grid_size, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};

const SCAN: Source =
    Source { name: "cumulative", text: concat!(include_str!("scans.cu"), "\n", include_str!("tiles.cu")) };

/// Threads of a block.
const THREADS: usize = 256;

/// Those of a product, whose tiles are the cheaper the larger they are: threads, steps of each, blocks of a
/// multiprocessor and threads side by side are the best of 36 choices on an H200.
const OF_PRODUCT: (usize, usize, usize, usize) = (128, 16, 4, 16);

/// So many threads at most lie side by side.
const SIDE_BY_SIDE: usize = 32;

/// Tiles of a group: each tile composes those before it in its group, and the groups before.
const GROUP: usize = 32;

/// The kernel's parameters; the same struct is declared in `scans.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    x: u64,
    y: u64,
    wide_y: u64,
    dy: u64,
    dlog_y: u64,
    first: u64,
    start: u64,
    to: u64,
    log_to: u64,
    last: u64,
    next: u64,
    published: u64,
    totals: u64,
    rows: i64,
    length: i64,
    width: i64,
    columns: i64,
    tiles: i64,
    groups: i64,
    eps: f64,
    log_min: f64,
    floor: f64,
    back: i64,
}

/// Queues a scan.
pub fn forward(
    problem: &Problem,
    [x, start, ..]: [&str; 4],
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let params = Params {
        x: lane.address(inputs.get(x)?)?,
        start: address(lane, inputs, start)?,
        to: lane.address(outputs.get("y")?)?,
        log_to: address(lane, outputs, "log_y")?,
        last: address(lane, outputs, "last_state")?,
        back: problem.settings.reverse.into(),
        ..Params::default()
    };
    Plan::new(problem, Pass::Scan).launch(problem, params, lane)
}

/// Queues a gradient.
pub fn backward(
    problem: &Problem,
    [x, start, dx, dstart]: [&str; 4],
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let params = Params {
        x: address(lane, inputs, x)?,
        y: address(lane, inputs, "y")?,
        dy: lane.address(inputs.get("dy")?)?,
        dlog_y: address(lane, inputs, "dlog_y")?,
        first: address(lane, inputs, start)?,
        start: address(lane, inputs, "dlast_state")?,
        to: lane.address(outputs.get(dx)?)?,
        last: address(lane, outputs, dstart)?,
        back: (!problem.settings.reverse).into(),
        ..Params::default()
    };
    let plan = Plan::new(problem, Pass::Gradient);
    if problem.settings.scan != Scan::LogSumExp {
        return plan.launch(problem, params, lane);
    }
    let y = lane.temporary(Spec { dtype: problem.state.dtype, ..problem.sequence })?;
    let again = Params {
        x: params.x,
        start: params.first,
        to: lane.address(&y)?,
        back: problem.settings.reverse.into(),
        ..Params::default()
    };
    Plan::new(problem, Pass::WideScan).launch(problem, again, lane)?;
    plan.launch(problem, Params { wide_y: lane.address(&y)?, ..params }, lane)
}

fn address(lane: &Lane, tensors: &Named<&Buffer>, name: &str) -> Result<u64> {
    tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer))
}

/// What the kernel does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pass {
    Scan,
    /// Writes results in the type of the arithmetic.
    WideScan,
    Gradient,
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
struct Plan {
    pass: Pass,
    /// What the source calls the scan.
    scan: usize,
    /// Channels of a thread, and steps of it.
    channels: usize,
    steps: usize,
    /// Threads side by side.
    side_by_side: usize,
    /// Threads of a block.
    threads: usize,
    /// Blocks that a multiprocessor shall hold, which bounds the registers.
    blocks: usize,
    /// Bytes that say what a stretch of time is as a whole.
    total: usize,
}

impl Plan {
    fn new(problem: &Problem, pass: Pass) -> Plan {
        let together = if problem.dtype() == DType::F64 { 2 } else { 4 };
        let channels = if problem.width.is_multiple_of(together) { together } else { 1 };
        let gradient = pass == Pass::Gradient;
        // What a thread reads stays in registers: about 32 numbers, as many blocks as then fit.
        let real = problem.state.dtype.size();
        let product = (problem.settings.scan, gradient, real) == (Scan::Product, false, size_of::<f32>());
        let (scan, total, (steps, blocks)) = match (problem.settings.scan, gradient) {
            (Scan::Product, false) => (0, size_of::<f64>(), (8, 3)),
            (Scan::Product, true) => (0, size_of::<f64>() + real, (4, 2)),
            (Scan::ExpProduct { .. }, false) => (1, real, (8, 3)),
            (Scan::ExpProduct { .. }, true) => (1, 3 * real, (2, 2)),
            (Scan::Sum, _) => (2, real, (8, 3)),
            (Scan::LogSumExp, false) => (3, 2 * real, (8, 2)),
            (Scan::LogSumExp, true) => (3, 2 * real, (2, 2)),
        };
        let (threads, steps, blocks, most) = if product { OF_PRODUCT } else { (THREADS, steps, blocks, SIDE_BY_SIDE) };
        let side_by_side = problem.width.div_ceil(channels).next_power_of_two().min(most);
        Plan { pass, scan, channels, steps, side_by_side, threads, blocks, total }
    }

    /// The same for addresses at which neighbouring channels do not come at once.
    fn of_single_channels(self, problem: &Problem) -> Plan {
        let side_by_side = problem.width.next_power_of_two().min(SIDE_BY_SIDE);
        Plan { channels: 1, side_by_side, ..self }
    }

    fn options(&self, dtype: DType) -> String {
        let Plan { scan, channels, side_by_side, steps, threads, blocks, .. } = self;
        let gradient = u8::from(self.pass == Pass::Gradient);
        let y = if self.pass == Pass::WideScan { "REAL" } else { "STORAGE" };
        format!(
            "{} -DY={y} -DSCAN={scan} -DGRADIENT={gradient} -DVEC={channels} -DCOLS={side_by_side} -DROWS={steps} \
             -DGROUP={GROUP} -DTHREADS={threads} -DBLOCKS={blocks}",
            types(dtype)
        )
    }

    fn launch(self, problem: &Problem, params: Params, lane: &Lane) -> Result<()> {
        if problem.rows * problem.width == 0 {
            return Ok(());
        }
        let Params { x, y, wide_y, dy, dlog_y, to, log_to, .. } = params;
        if ![x, y, wide_y, dy, dlog_y, to, log_to].iter().all(|address| address.is_multiple_of(16)) && self.channels > 1
        {
            return self.of_single_channels(problem).launch(problem, params, lane);
        }
        let &Problem { rows, length, width, .. } = problem;
        let tile = self.threads / self.side_by_side * self.steps;
        let (columns, tiles) = (width.div_ceil(self.side_by_side * self.channels), length.div_ceil(tile).max(1));
        let groups = tiles / GROUP;
        let (next, published, totals) = match tiles {
            1 => (0, 0, 0),
            _ => self.scratch(rows * columns * (tiles + groups), lane)?,
        };
        let (eps, log_min, floor) = match problem.settings.scan {
            Scan::ExpProduct { eps, log_min, floor } => (eps, log_min, floor),
            _ => (0.0, 0.0, 0.0),
        };
        let [rows, length, width, columns, tiles, groups] =
            [rows, length, width, columns, tiles, groups].map(|size| size as i64);
        let params = Params {
            next,
            published,
            totals,
            rows,
            length,
            width,
            columns,
            tiles,
            groups,
            eps,
            log_min,
            floor,
            ..params
        };
        let kernel = lane.device().kernel(&SCAN, &self.options(problem.dtype()))?;
        let blocks = grid_size((rows * columns * tiles) as usize)?;
        // SAFETY: Params is the struct that the kernel declares; the op's checks prove that all sizes fit the
        // buffers, whose addresses are this lane's, as is the scratch memory, which has room for all totals.
        unsafe { lane.launch(&kernel, [blocks, 1, 1], self.threads as u32, &params) }
    }

    /// Where the number of the next tile, the marks of published ones and their totals lie.
    fn scratch(&self, slots: usize, lane: &Lane) -> Result<(u64, u64, u64)> {
        let next = 16;
        let marks = next + (slots * size_of::<u32>()).next_multiple_of(16);
        let totals = slots * self.total * self.side_by_side * self.channels;
        let address = lane.zeroed_scratch(marks + totals, marks)?;
        Ok((address, address + next as u64, address + marks as u64))
    }
}
