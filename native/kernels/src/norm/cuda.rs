//! The norms on CUDA: what is launched, and how the work is laid out.

use super::{EpsMode, Problem};
use crate::cuda::{Buffer, Kernel, Lane, Source, function, grid_size, pack, types};
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

const SUMS: Source = Source { name: "norm_sums", text: include_str!("sums.cu") };

/// Threads that a block has at least, if it may have several rows.
const BLOCK: usize = 128;
/// How many elements of a row a thread holds in registers, forward and backward: more make for fewer threads,
/// whose sums are shorter. Twice as many where a row is long.
const HELD: [usize; 2] = [16, 8];

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
    eps: R,
    scale: R,
    to_mean: R,
    count: R,
}

/// The parameters of the sums; the same struct is declared in `sums.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sums {
    from: [u64; 2],
    to: [u64; 2],
    slots: i64,
    columns: i64,
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
    /// Threads that a multiprocessor has registers for.
    resident: usize,
    /// Whether a thread holds the weights too.
    hold_weights: bool,
}

impl Layout {
    fn new(problem: &Problem, vec: usize, backward: bool) -> Layout {
        let (all, held) = (problem.columns.div_ceil(vec).max(1), (HELD[usize::from(backward)] / vec).max(1));
        let threads = all.div_ceil(held).next_power_of_two().clamp(32, 1024);
        let packs = all.div_ceil(threads);
        let rows = (BLOCK / threads).max(1);
        // Rows of 16-bit numbers are half as long: more must be under way, in less registers.
        let resident = match (problem.x.dtype.size() == 2, backward) {
            (false, _) => 512,
            (true, false) => 768,
            (true, true) => 1024,
        };
        let packs = if packs > 2 * held { 0 } else { packs };
        Layout { vec, threads, rows, packs, resident, hold_weights: packs > 0 && threads < 1024 && resident < 1024 }
    }

    fn block(&self) -> u32 {
        (self.threads * self.rows) as u32
    }

    /// How many blocks a multiprocessor has at once.
    fn resident(&self) -> usize {
        (self.resident / (self.threads * self.rows)).max(1)
    }

    /// As many blocks as there can be at once, if there are as many rows.
    fn blocks(&self, rows: usize, multiprocessors: u32) -> usize {
        rows.div_ceil(self.rows).min(self.resident() * multiprocessors as usize)
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
        let layout = Layout::new(self.problem, self.vec(&params), false);
        let kernel = self.kernel(&FORWARD, &layout)?;
        let grid = [grid_size(self.blocks(&layout))?, 1, 1];
        // SAFETY: Params is the struct that the kernel declares; the op's checks prove that all sizes fit
        // the buffers, whose addresses are this lane's.
        unsafe { self.lane.launch(&kernel, grid, layout.block(), &params) }
    }

    fn blocks(&self, layout: &Layout) -> usize {
        layout.blocks(self.problem.rows, self.lane.device().facts().multiprocessors)
    }

    fn backward<R: Element>(&self) -> Result<()> {
        let mut params = self.params::<R>("dx")?;
        let layout = Layout::new(self.problem, self.vec(&params), true);
        let blocks = self.blocks(&layout);
        let slots = blocks * layout.rows;
        let wide = self.problem.x.dtype.wide();
        let sums = || self.lane.temporary(Spec::new(wide, &[slots, self.problem.columns])?);
        let (dw, db) = (sums()?, if params.b == 0 { None } else { Some(sums()?) });
        params.dw = self.lane.address(&dw)?;
        params.db = db.as_ref().map_or(Ok(0), |db| self.lane.address(db))?;
        if blocks > 0 {
            let kernel = self.kernel(&BACKWARD, &layout)?;
            // SAFETY: as above; there is a row of sums for each slot.
            unsafe { self.lane.launch(&kernel, [grid_size(blocks)?, 1, 1], layout.block(), &params)? };
        }
        self.sums([params.dw, params.db], slots)
    }

    /// Queues the sums over all slots: those of `dw`, and of `db` if there is one.
    fn sums(&self, from: [u64; 2], slots: usize) -> Result<()> {
        let columns = self.problem.columns;
        if columns == 0 {
            return Ok(());
        }
        let address = |name| self.outputs.find(name).map_or(Ok(0), |buffer| self.lane.address(buffer));
        let to = [address("dw")?, address("db")?];
        let params = Sums { from, to, slots: slots as i64, columns: columns as i64 };
        let kernel = self.lane.device().kernel(&SUMS, &types(self.problem.x.dtype))?;
        let kinds = if to[1] == 0 { 1 } else { 2 };
        // SAFETY: Sums is the struct that the kernel declares; the buffers have these sizes.
        unsafe { self.lane.launch(&kernel, [grid_size(columns.div_ceil(32))?, kinds, 1], 256, &params) }
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
            eps: R::from_f64(eps),
            scale: R::from_f64(scale),
            to_mean: R::from_f64(to_mean),
            count: R::from_f64(columns.max(1) as f64),
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
            "{} -DVEC={} -DTHREADS={} -DROWS={} -DPACKS={} -DHOLD_WEIGHTS={} -DRESIDENT={} -DCENTERED={} -DOUTSIDE={} \
             -DHAS_B={} -DFN={}",
            types(problem.x.dtype),
            layout.vec,
            layout.threads,
            layout.rows,
            layout.packs,
            u32::from(layout.hold_weights),
            layout.resident(),
            u32::from(problem.centered),
            u32::from(problem.eps_mode == EpsMode::Outside),
            u32::from(self.inputs.find("b").is_some()),
            function(problem.activation),
        );
        self.lane.device().kernel(source, &options)
    }
}
