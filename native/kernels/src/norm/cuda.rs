//! The norms on CUDA: what is launched, and how the work is laid out.

use super::{EpsMode, Problem};
use crate::cuda::{Buffer, Kernel, Lane, Source, columns, function, grid_size, pack, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Element, Spec};

const FORWARD: Source = Source {
    name: "norm_forward",
    text: concat!(
        include_str!("../cuda/activation.cu"),
        include_str!("../cuda/pack.cu"),
        include_str!("common.cu"),
        include_str!("forward.cu")
    ),
};
const BACKWARD: Source = Source {
    name: "norm_backward",
    text: concat!(
        include_str!("../cuda/activation.cu"),
        include_str!("../cuda/pack.cu"),
        include_str!("common.cu"),
        include_str!("backward.cu")
    ),
};

/// Threads that a block has at least, if it may have several rows.
const BLOCK: usize = 128;
/// Packs of a row that a thread holds in registers at most, forward and backward.
const MOST_PACKS: [usize; 2] = [8, 4];
/// The gradient's slots of rows for each multiprocessor: their sums are added up afterwards.
const SLOTS: usize = 8;

/// The kernels' parameters; the same struct is declared in `common.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params<R> {
    x: u64,
    w: u64,
    b: u64,
    dy: u64,
    to: u64,
    mean: u64,
    rstd: u64,
    dw: u64,
    db: u64,
    rows: i64,
    columns: i64,
    rows_each: i64,
    eps: R,
    scale: R,
    to_mean: R,
    by_columns: R,
}

/// How threads share rows.
struct Layout {
    /// Elements that are moved at once.
    vec: usize,
    /// Threads that have a row together.
    threads: usize,
    /// Rows that a block has at a time.
    rows: usize,
    /// Packs that a thread holds, or 0 for rows that are too long.
    packs: usize,
}

impl Layout {
    fn new(problem: &Problem, vec: usize, most_packs: usize) -> Layout {
        let all = problem.columns.div_ceil(vec).max(1);
        // Two packs a thread: enough bytes under way, and enough threads to share the arithmetic.
        let threads = all.div_ceil(2).next_power_of_two().clamp(32, 1024);
        let threads = if all.div_ceil(threads) > most_packs { 1024 } else { threads };
        let packs = all.div_ceil(threads);
        let rows = (BLOCK / threads).max(1);
        Layout { vec, threads, rows, packs: if packs > most_packs { 0 } else { packs } }
    }

    fn block(&self) -> u32 {
        (self.threads * self.rows) as u32
    }
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
        let layout = Layout::new(self.problem, self.vec(&params), MOST_PACKS[0]);
        let kernel = self.kernel(&FORWARD, &layout)?;
        let blocks = grid_size(self.problem.rows.div_ceil(layout.rows))?;
        // SAFETY: Params is the struct that the kernel declares; the op's checks prove that all sizes fit
        // the buffers, whose addresses are this lane's.
        unsafe { self.lane.launch(&kernel, [blocks, 1, 1], layout.block(), &params) }
    }

    fn backward<R: Element>(&self) -> Result<()> {
        let Problem { rows, columns: width, .. } = *self.problem;
        let mut params = self.params::<R>("dx")?;
        let layout = Layout::new(self.problem, self.vec(&params), MOST_PACKS[1]);
        let most = SLOTS * self.lane.device().facts().multiprocessors as usize;
        let rows_each = rows.div_ceil(most).max(1);
        let slots = rows.div_ceil(rows_each).next_multiple_of(layout.rows);
        let parts = || self.lane.temporary(Spec::new(self.problem.x.dtype.wide(), &[slots, width])?);
        let (dw, db) = (parts()?, if params.b == 0 { None } else { Some(parts()?) });
        params.dw = self.lane.address(&dw)?;
        params.db = db.as_ref().map_or(Ok(0), |db| self.lane.address(db))?;
        params.rows_each = rows_each as i64;
        if rows > 0 {
            let kernel = self.kernel(&BACKWARD, &layout)?;
            let blocks = grid_size(slots / layout.rows)?;
            // SAFETY: as above; the parts have room for all slots.
            unsafe { self.lane.launch(&kernel, [blocks, 1, 1], layout.block(), &params)? };
        }
        columns(&dw, slots, self.outputs.get("dw")?, self.lane)?;
        db.map_or(Ok(()), |db| columns(&db, slots, self.outputs.get("db")?, self.lane))
    }

    fn params<R: Element>(&self, to: &str) -> Result<Params<R>> {
        let address = |buffer: Option<&&Buffer>| buffer.map_or(Ok(0), |buffer| self.lane.address(buffer));
        let Problem { rows, columns, eps, .. } = *self.problem;
        let (scale, to_mean) = self.problem.scales();
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
            rows_each: 0,
            eps: R::from_f64(eps),
            scale: R::from_f64(scale),
            to_mean: R::from_f64(to_mean),
            by_columns: R::from_f64(1.0 / columns.max(1) as f64),
        })
    }

    /// Rows are moved 16 bytes at a time where each of them begins at such an address.
    fn vec<R>(&self, params: &Params<R>) -> usize {
        let size = self.problem.x.dtype.size();
        let row = (self.problem.columns * size) as u64;
        pack(size, &[params.x, params.w, params.b, params.dy, params.to, row])
    }

    fn kernel(&self, source: &Source, layout: &Layout) -> Result<Kernel> {
        let problem = self.problem;
        let options = format!(
            "{} -DVEC={} -DTHREADS={} -DROWS={} -DPACKS={} -DCENTERED={} -DOUTSIDE={} -DHAS_B={} -DFN={}",
            types(problem.x.dtype),
            layout.vec,
            layout.threads,
            layout.rows,
            layout.packs,
            u32::from(problem.centered),
            u32::from(problem.eps_mode == EpsMode::Outside),
            u32::from(self.inputs.find("b").is_some()),
            function(problem.activation),
        );
        self.lane.device().kernel(source, &options)
    }
}
