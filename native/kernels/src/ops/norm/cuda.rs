//! The norms on CUDA: launches, and the distribution of work.

use super::{EpsMode, Problem, scales};
use crate::cuda::{Buffer, Kernel, Lane, Source, function, grid_size, pack, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Element, Spec};

const FORWARD: Source<Params<()>> = Source::new(
    "norm_forward",
    concat!(
        include_str!("../../cuda/include/activation.cu"),
        include_str!("../../cuda/include/pack.cu"),
        include_str!("common.cu"),
        include_str!("row.cu"),
        include_str!("forward.cu")
    ),
);
const BACKWARD: Source<Params<()>> = Source::new(
    "norm_backward",
    concat!(
        include_str!("../../cuda/include/activation.cu"),
        include_str!("../../cuda/include/pack.cu"),
        include_str!("../../cuda/include/copies.cu"),
        include_str!("common.cu"),
        include_str!("backward.cu")
    ),
);

const ADD: Source<Add<()>> =
    Source::new("add_norm", concat!(include_str!("../../cuda/include/block_sum.cu"), include_str!("add.cu")));

const SUMS: Source<Sums> = Source::new("norm_sums", include_str!("sums.cu"));

/// The fewest threads per block, unless a single row has more.
const BLOCK: usize = 128;
/// The most bytes of a row that a thread holds. Holding fewer bytes takes more threads, which wait longer for each
/// other in reductions.
const HELD: usize = 64;
/// The most threads per row in the gradient that have registers for everything that can be held.
const HOLDING: usize = 256;
/// The most bytes of a row, in the type of the arithmetic, that a thread of the gradient holds.
const HELD_WIDE: usize = 128;
/// Columns and threads per block of the kernel that adds up sums.
const SUMS_COLUMNS: usize = 8;
const SUMS_THREADS: u32 = 128;
/// Threads per row of the residual step.
const ADD_THREADS: u32 = 256;
/// Bytes of the gradient's shared memory in addition to its rows.
const OTHER_SHARED: usize = 6 << 10;

params! {
    /// The kernels' parameters.
    struct Params<R> {
        x: u64 as "const STORAGE*",
        w: u64 as "const REAL*",
        b: u64 as "const REAL*",
        dy: u64 as "const STORAGE*",
        to: u64 as "STORAGE*", // y or dx
        mean: u64 as "REAL*",
        rstd: u64 as "REAL*",
        dw: u64 as "REAL*", // a row of sums per slot of threads
        db: u64 as "REAL*",
        rows: i64,
        columns: i64,
        eps: R,
        scale: R,
        inverse_scale: R,
        to_mean: R,
        count: R, // number of columns, or 1 if there are none
        inverse_count: R,
    }
}

params! {
    /// The parameters of the sums.
    struct Sums {
        from: [u64; 2] as "const REAL*",
        to: [u64; 2] as "REAL*",
        slots: i64,
        columns: i64,
    }
}

params! {
    /// The parameters of a norm that adds first.
    struct Add<R> {
        x: u64 as "const STORAGE*",
        w: u64 as "const REAL*",
        sum: u64 as "REAL*",
        y: u64 as "STORAGE*",
        columns: i64,
        eps: R,
        // Numbers are multiplied by this before they are squared, so that squares do not overflow.
        scale: R,
        to_mean: R,
    }
}

/// How rows are divided among threads.
pub(crate) struct Layout {
    /// Elements per memory access.
    vec: usize,
    /// Threads per row.
    threads: usize,
    /// Rows that a block processes at a time.
    pub rows: usize,
    /// Packs that a thread holds, or 0 if rows are too long to be held.
    packs: usize,
    /// Resident threads per multiprocessor, as registers allow.
    resident: usize,
    /// Whether a thread also holds the weights, and in the gradient the values that it computes with.
    hold: bool,
    /// Rows in flight in shared memory in the gradient, including the one being processed.
    stages: usize,
    /// Bytes of shared memory for them.
    shared: usize,
}

impl Layout {
    /// Chosen, like the gradient's layout, by timing rows of 1024 to 16384 elements on an H200: few threads, each with
    /// a large part of a row, are fastest, except for f32 rows of 4096.
    fn forward(problem: &Problem, vec: usize) -> Layout {
        let size = problem.x.dtype.size();
        let (all, held) = (packs(problem, vec), HELD / (vec * size));
        let threads = match threads(all, held) {
            256 if size == 4 => 512,
            threads => threads,
        };
        let one = all.div_ceil(threads);
        let resident = if one * 2 <= held { 1024 } else { 512 };
        let packs = if one > held { 0 } else { one };
        Layout::new(vec, threads, packs, resident, packs > 0 && threads < 1024)
    }

    /// The gradient also holds sums, and for long rows nothing else. Three stages are slower than two: with more reads
    /// and writes in flight the memory itself gets slower.
    fn backward(problem: &Problem, vec: usize, shared: usize) -> Layout {
        let (all, size) = (packs(problem, vec), problem.x.dtype.size());
        let most = (HELD_WIDE / (vec * problem.x.dtype.wide().size())).max(1);
        let holding = threads(all, HELD / (vec * size)).min(HOLDING);
        let hold = all <= most * holding;
        let threads = if hold { holding } else { 2 * HOLDING };
        let layout = Layout::new(vec, threads, all.div_ceil(threads), threads.max(HOLDING), hold);
        let stage = 2 * layout.packs * layout.block() as usize * vec * size;
        let stages = (shared / stage).min(2);
        if stages == 0 || layout.packs > most {
            return Layout::new(vec, 1024, 0, 1024, false);
        }
        Layout { stages, shared: stages * stage, ..layout }
    }

    /// A layout without rows in shared memory.
    pub fn new(vec: usize, threads: usize, packs: usize, resident: usize, hold: bool) -> Layout {
        Layout { vec, threads, rows: (BLOCK / threads).max(1), packs, resident, hold, stages: 1, shared: 0 }
    }

    /// Threads per block.
    pub fn block(&self) -> u32 {
        (self.threads * self.rows) as u32
    }

    /// Resident blocks per multiprocessor.
    fn resident(&self) -> usize {
        (self.resident / (self.threads * self.rows)).max(1)
    }

    /// Blocks of the grid: at most those that are resident at once, and so few that the rows divide evenly. If only
    /// some blocks had a last row, the others would be idle meanwhile.
    pub fn blocks(&self, rows: usize, multiprocessors: u32) -> usize {
        let (shares, most) = (rows.div_ceil(self.rows), self.resident() * multiprocessors as usize);
        shares.div_ceil(shares.div_ceil(most).max(1))
    }

    /// The layout as compiler options.
    pub fn options(&self) -> String {
        let Layout { vec, threads, rows, packs, hold, stages, .. } = *self;
        let (hold, resident) = (u32::from(hold), self.resident());
        format!(
            "-DVEC={vec} -DTHREADS={threads} -DROWS={rows} -DPACKS={packs} -DHOLD={hold} -DSTAGES={stages} \
             -DRESIDENT={resident}"
        )
    }
}

/// Packs per row.
fn packs(problem: &Problem, vec: usize) -> usize {
    problem.columns.div_ceil(vec).max(1)
}

/// Threads for a row of `packs` packs, `held` of them per thread.
pub(crate) fn threads(packs: usize, held: usize) -> usize {
    packs.div_ceil(held).next_power_of_two().clamp(32, 1024)
}

/// Queues a norm.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    match problem.x.dtype {
        DType::F64 => call.forward::<f64>(),
        _ => call.forward::<f32>(),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    match problem.x.dtype {
        DType::F64 => call.backward::<f64>(),
        _ => call.backward::<f32>(),
    }
}

/// Queues the residual step.
pub fn add(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    match problem.x.dtype {
        DType::F64 => call.add::<f64>(),
        _ => call.add::<f32>(),
    }
}

/// Queues the sums over `slots` rows of `columns` elements, of one array or two, in the type of the arithmetic of
/// `dtype`. An array whose addresses are 0 is skipped.
///
/// # Safety
/// The addresses are 0 or of this lane's buffers: `from` has `slots * columns` elements, `to` has `columns`.
pub(crate) unsafe fn sums(
    lane: &Lane,
    dtype: DType,
    [from, to]: [[u64; 2]; 2],
    [slots, columns]: [usize; 2],
) -> Result<()> {
    if columns == 0 {
        return Ok(());
    }
    let params = Sums { from, to, slots: slots as i64, columns: columns as i64 };
    let options = format!("{} -DCOLUMNS={SUMS_COLUMNS} -DTHREADS={SUMS_THREADS}", types(dtype));
    let kernel = lane.device().kernel(&SUMS, &options)?;
    let kinds = if to[1] == 0 { 1 } else { 2 };
    // SAFETY: the caller's promise.
    unsafe { lane.launch(&kernel, [grid_size(columns.div_ceil(SUMS_COLUMNS))?, kinds, 1], SUMS_THREADS, &params) }
}

struct Call<'a> {
    problem: &'a Problem,
    inputs: &'a Named<&'a Buffer>,
    outputs: &'a Named<&'a Buffer>,
    lane: &'a Lane,
}

impl Call<'_> {
    fn forward<R: Element>(&self) -> Result<()> {
        if self.problem.rows == 0 {
            return Ok(());
        }
        let params = self.params::<R>("y")?;
        let layout = Layout::forward(self.problem, self.vec(&params));
        let kernel = self.kernel(&FORWARD, &layout)?;
        let grid = [grid_size(self.blocks(&layout))?, 1, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's; R is the
        // arithmetic of the type that the kernel is compiled for.
        unsafe { self.lane.launch(&kernel, grid, layout.block(), &params) }
    }

    fn blocks(&self, layout: &Layout) -> usize {
        layout.blocks(self.problem.rows, self.lane.device().facts().multiprocessors)
    }

    fn backward<R: Element>(&self) -> Result<()> {
        let mut params = self.params::<R>("dx")?;
        let shared = self.lane.device().facts().shared as usize - OTHER_SHARED;
        let layout = Layout::backward(self.problem, self.vec(&params), shared);
        let blocks = self.blocks(&layout);
        let slots = blocks * layout.rows;
        let wide = self.problem.x.dtype.wide();
        let partial = || self.lane.temporary(Spec::new(wide, &[slots, self.problem.columns])?);
        let (dw, db) = (partial()?, if params.b == 0 { None } else { Some(partial()?) });
        params.dw = self.lane.address(&dw)?;
        params.db = db.as_ref().map_or(Ok(0), |db| self.lane.address(db))?;
        if blocks > 0 {
            let kernel = self.kernel(&BACKWARD, &layout)?;
            let (grid, shared) = ([grid_size(blocks)?, 1, 1], layout.shared as u32);
            // SAFETY: as above; each slot has a row of sums, and the shared memory holds all stages.
            unsafe { self.lane.launch_with(&kernel, grid, layout.block(), shared, &params)? };
        }
        let address = |name| self.outputs.find(name).map_or(Ok(0), |buffer| self.lane.address(buffer));
        let to = [address("dw")?, address("db")?];
        // SAFETY: each slot has a row of sums, and dw and db have the size of the weights.
        unsafe { sums(self.lane, self.problem.x.dtype, [[params.dw, params.db], to], [slots, self.problem.columns]) }
    }

    fn add<R: Element>(&self) -> Result<()> {
        let Problem { rows, columns, eps, eps_mode, .. } = *self.problem;
        if rows == 0 {
            return Ok(());
        }
        let (scale, to_mean) = scales(self.problem.columns);
        let params = Add {
            x: self.lane.address(self.inputs.get("x")?)?,
            w: self.lane.address(self.inputs.get("w")?)?,
            sum: self.lane.address(self.outputs.get("sum")?)?,
            y: self.lane.address(self.outputs.get("y")?)?,
            columns: columns as i64,
            eps: R::from_f64(eps),
            scale: R::from_f64(scale),
            to_mean: R::from_f64(to_mean),
        };
        let outside = u32::from(eps_mode == EpsMode::Outside);
        let options = format!("{} -DTHREADS={ADD_THREADS} -DOUTSIDE={outside}", types(self.problem.x.dtype));
        let kernel = self.lane.device().kernel(&ADD, &options)?;
        // SAFETY: the op's checks prove the sizes.
        unsafe { self.lane.launch(&kernel, [grid_size(rows)?, 1, 1], ADD_THREADS, &params) }
    }

    fn params<R: Element>(&self, to: &str) -> Result<Params<R>> {
        let address = |buffer: Option<&&Buffer>| buffer.map_or(Ok(0), |buffer| self.lane.address(buffer));
        let Problem { rows, columns, eps, .. } = *self.problem;
        let (scale, to_mean) = scales(self.problem.columns);
        Ok(Params {
            x: self.lane.address(self.inputs.get("x")?)?,
            w: self.lane.address(self.inputs.get("w")?)?,
            b: address(self.inputs.find("b"))?,
            dy: address(self.inputs.find("dy"))?,
            to: self.lane.address(self.outputs.get(to)?)?,
            mean: address(self.outputs.find("mean"))?,
            rstd: address(self.outputs.find("rstd"))?,
            dw: 0,
            db: 0,
            rows: rows as i64,
            columns: columns as i64,
            eps: R::from_f64(eps),
            scale: R::from_f64(scale),
            inverse_scale: R::from_f64(scale.recip()),
            to_mean: R::from_f64(to_mean),
            count: R::from_f64(columns.max(1) as f64),
            inverse_count: R::from_f64((columns.max(1) as f64).recip()),
        })
    }

    /// Elements per memory access: 16 bytes if each row begins at an address aligned to that, otherwise one.
    fn vec<R>(&self, params: &Params<R>) -> usize {
        let size = self.problem.x.dtype.size();
        let row = (self.problem.columns * size) as u64;
        pack(size, &[params.x, params.w, params.b, params.dy, params.to, row])
    }

    fn kernel(&self, source: &Source<Params<()>>, layout: &Layout) -> Result<Kernel<Params<()>>> {
        let problem = self.problem;
        let options = format!(
            "{} {} -DCENTERED={} -DOUTSIDE={} -DHAS_B={} -DFN={}",
            types(problem.x.dtype),
            layout.options(),
            u32::from(problem.centered),
            u32::from(problem.eps_mode == EpsMode::Outside),
            u32::from(self.inputs.find("b").is_some()),
            function(problem.activation),
        );
        self.lane.device().kernel(source, &options)
    }
}
