//! The gated norm on CUDA: launches, and the distribution of work.

use super::Problem;
use crate::base::activation::Activation;
use crate::cuda::{Buffer, Lane, Source, function, grid_size, pack, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::norm::cuda::{Layout, sums, threads};
use crate::ops::norm::scales;
use crate::tensor::{DType, Element, Spec};

/// The kernel's text, after the sources that norms share.
macro_rules! text {
    ($part:literal) => {
        concat!(
            include_str!("../../../cuda/include/activation.cu"),
            include_str!("../../../cuda/include/pack.cu"),
            include_str!("../common.cu"),
            include_str!("../row.cu"),
            include_str!("gate.cu"),
            include_str!($part)
        )
    };
}

const FORWARD: Source<Params<()>> = Source::new("gated_rms_norm", text!("forward.cu"));
const BACKWARD: Source<Params<()>> = Source::new("gated_rms_norm_backward", text!("backward.cu"));

/// The most bytes of a row, in the type of the arithmetic, that a thread holds together with the weights, and without
/// them. The gradient also holds the sums for `dw`, and three tensors in storage precision: with twice the bytes,
/// kernels for 16-bit types spill registers.
const HELD: usize = 32;
const MOST_HELD: usize = 64;
/// The most threads per row that have registers for that.
const HOLDING: usize = 512;
/// Threads per row if it is too long to be held.
const LONG: usize = 1024;

params! {
    /// The kernels' parameters.
    struct Params<R> {
        x: u64 as "const STORAGE*",
        z: u64 as "const STORAGE*",
        w: u64 as "const REAL*",
        dy: u64 as "const STORAGE*",
        to: u64 as "STORAGE*", // y or dx
        dz: u64 as "STORAGE*",
        dw: u64 as "REAL*", // a row of sums per slot of threads
        rows: i64,
        columns: i64,
        groups: i64,
        eps: R,
        scale: R,
        inverse_scale: R,
        to_mean: R,
        inverse_count: R,
    }
}

/// Few threads, each holding as much of a row as fits next to its weights.
fn layout(problem: &Problem, vec: usize) -> Layout {
    let all = problem.columns.div_ceil(vec).max(1);
    let [held, most] = [HELD, MOST_HELD].map(|bytes| (bytes / (vec * problem.dtype.wide().size())).max(1));
    let threads = threads(all, held).min(HOLDING);
    match all.div_ceil(threads) {
        packs if packs > most => Layout::new(vec, LONG, 0, LONG, false),
        packs => Layout::new(vec, threads, packs, HOLDING, packs <= held),
    }
}

/// Blocks of the grid: the total number of slots is a multiple of the groups.
fn blocks(problem: &Problem, layout: &Layout, lane: &Lane) -> usize {
    let blocks = layout.blocks(problem.parts, lane.device().facts().multiprocessors);
    let mut step = problem.groups;
    let mut rows = layout.rows;
    // The rows per block are a power of two.
    while rows > 1 && step.is_multiple_of(2) {
        (rows, step) = (rows / 2, step / 2);
    }
    blocks.next_multiple_of(step)
}

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    match problem.dtype {
        DType::F64 => call.forward::<f64>(),
        _ => call.forward::<f32>(),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    match problem.dtype {
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
        let params = self.params::<R>("y")?;
        let layout = layout(self.problem, self.vec(&params));
        self.launch(&FORWARD, &layout, blocks(self.problem, &layout, self.lane), &params)
    }

    fn backward<R: Element>(&self) -> Result<()> {
        let mut params = self.params::<R>("dx")?;
        let Problem { dtype, groups, columns, .. } = *self.problem;
        let layout = layout(self.problem, self.vec(&params));
        let blocks = blocks(self.problem, &layout, self.lane);
        let slots = blocks * layout.rows;
        let dw = self.lane.temporary(Spec::new(dtype.wide(), &[slots, columns])?)?;
        params.dw = self.lane.address(&dw)?;
        self.launch(&BACKWARD, &layout, blocks, &params)?;
        // Consecutive slots have consecutive groups, so the sums of every `groups` slots are a row of dw.
        let to = self.lane.address(self.outputs.get("dw")?)?;
        // SAFETY: the addresses are those of these sums and of dw, which has the size of a row.
        unsafe { sums(self.lane, dtype, [[params.dw, 0], [to, 0]], [slots / groups, groups * columns]) }
    }

    fn launch<R: Element>(
        &self,
        source: &Source<Params<()>>,
        layout: &Layout,
        blocks: usize,
        params: &Params<R>,
    ) -> Result<()> {
        if self.problem.parts == 0 {
            return Ok(());
        }
        let norm_first = u32::from(self.problem.norm_before_gate);
        let options = format!(
            "{} {} -DNORM_FIRST={norm_first} -DCENTERED=0 -DOUTSIDE=0 -DHAS_B=0 -DSILU={}",
            types(self.problem.dtype),
            layout.options(),
            function(Some(Activation::Silu))
        );
        let kernel = self.lane.device().kernel(source, &options)?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, and each slot
        // has a row of sums. R is the arithmetic of the type that the kernel is compiled for.
        unsafe { self.lane.launch(&kernel, [grid_size(blocks)?, 1, 1], layout.block(), params) }
    }

    fn params<R: Element>(&self, to: &str) -> Result<Params<R>> {
        let address = |buffer: Option<&&Buffer>| buffer.map_or(Ok(0), |buffer| self.lane.address(buffer));
        let Problem { parts, columns, groups, eps, .. } = *self.problem;
        let (scale, to_mean) = scales(columns);
        Ok(Params {
            x: address(self.inputs.find("x"))?,
            z: address(self.inputs.find("z"))?,
            w: address(self.inputs.find("w"))?,
            dy: address(self.inputs.find("dy"))?,
            to: address(self.outputs.find(to))?,
            dz: address(self.outputs.find("dz"))?,
            dw: 0,
            rows: parts as i64,
            columns: columns as i64,
            groups: groups as i64,
            eps: R::from_f64(eps),
            scale: R::from_f64(scale),
            inverse_scale: R::from_f64(scale.recip()),
            to_mean: R::from_f64(to_mean),
            inverse_count: R::from_f64((columns.max(1) as f64).recip()),
        })
    }

    /// Elements per memory access: 16 bytes if each part begins at an address aligned to that, otherwise one.
    fn vec<R>(&self, params: &Params<R>) -> usize {
        let size = self.problem.dtype.size();
        let part = (self.problem.columns * size) as u64;
        pack(size, &[params.x, params.z, params.w, params.dy, params.to, params.dz, part])
    }
}
