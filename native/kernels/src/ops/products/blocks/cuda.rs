//! Blocks on CUDA. Quantizers use one warp per block. Products of quantized rows run on tensor cores: a single row,
//! which each block of threads prepares by itself, or tiles of rows, in teams of warps or warp by warp. Other products
//! walk along rows of weights: those of floats, and those of few rows where the device cannot copy rows of weights in
//! whole units. Fetching weights begins while rows of x are still being prepared, by the same kernel if they are few
//! and fit in its shared memory, otherwise by a kernel before it.

mod boxes;
mod convert;
mod matvec;
mod ready;
mod tile;
mod walk;

pub use convert::{dequantize, quantize};
pub use walk::{WALK, WalkLayout};

use super::format::{BLOCK, Format};
use super::problem::Problem;
use crate::cuda::{Buffer, Declared, Kernel, Lane, Source, TensorMap, Together, function, params, types};
use crate::error::{Error, Kind, Result};
use crate::ops::products::cuda::{Planner, launch_first, route};
use crate::tensor::DType;
use boxes::Boxes;
use matvec::Matvec;
use tile::{Tile, piece};
use walk::Walk;

/// The most rows of x in a walk.
const FEW: usize = 4;

/// Blocks of a row that a tile takes at a time.
const COLUMNS: usize = 8;

/// The most blocks of threads that share a tile.
const SPLIT: usize = 8;

/// The address of blocks, which must be even because scales have two bytes.
fn even(name: &str, blocks: &Buffer, lane: &Lane) -> Result<u64> {
    let at = lane.address(blocks)?;
    if at % 2 == 0 {
        return Ok(at);
    }
    let error = Error::new(Kind::Argument, name).expected("blocks at an even address").got(format_args!("{at:#x}"));
    Err(error.hint("Copy the part of the tensor to one of its own"))
}

/// The addresses of a product's tensors.
struct Tensors {
    x: u64,
    w: u64,
    b: u64,
    y: u64,
}

params! {
    /// The parameters of `box.cu` and `tile.cu`.
    struct Tiled with TensorMap {
        matrix: TensorMap, // that of the weights where the device copies them by itself
        w: u64 as "const unsigned char*",
        ready: u64 as "const unsigned char*",
        b: u64 as "const float*",
        y: u64 as "STORAGE*",
        rows: i64,
        outputs: i64,
        blocks: i64,
        // Columns of tiles, and tiles of all groups of rows.
        columns: i32,
        tiles: i32,
    }
}

impl Tiled {
    /// The parameters, with the tensor map of the weights if the device copies them, and the address of the prepared x.
    fn new(
        problem: &Problem,
        tensors: &Tensors,
        (matrix, ready): (TensorMap, u64),
        [columns, tiles]: [i32; 2],
    ) -> Tiled {
        let Tensors { w, b, y, .. } = *tensors;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, problem.inputs / BLOCK].map(|size| size as i64);
        Tiled { matrix, w, ready, b, y, rows, outputs, blocks, columns, tiles }
    }
}

/// The routes; the first that has a plan is taken.
const ROUTES: &[Planner<Problem, Tensors>] = &[
    |problem, tensors, lane| route(Boxes::planned(problem, tensors, lane)?),
    |problem, tensors, lane| route(Matvec::planned(problem, tensors, lane)),
    |problem, tensors, lane| route(Tile::planned(problem, tensors.w, &lane.device().facts())),
    |problem, _, lane| route(Some(Walk::planned(problem, &lane.device().facts()))),
];

/// Queues the product.
pub fn multiply(problem: &Problem, [x, w]: [&Buffer; 2], b: Option<&Buffer>, y: &Buffer, lane: &Lane) -> Result<()> {
    if problem.rows * problem.outputs == 0 {
        return Ok(());
    }
    let tensors = Tensors {
        x: lane.address(x)?,
        w: even("w", w, lane)?,
        b: b.map_or(Ok(0), |b| lane.address(b))?,
        y: lane.address(y)?,
    };
    launch_first(ROUTES, problem, &tensors, lane)
}

/// Whether rows of weights are bulk copies of the device.
fn by_device(problem: &Problem, tensors: &Tensors, lane: &Lane) -> bool {
    piece(problem, tensors.w, &lane.device().facts()) == 0
}

/// The tensor map of the weights: a piece of `outputs` rows per copy.
fn matrix(problem: &Problem, outputs: usize, w: u64, lane: &Lane) -> Result<TensorMap> {
    let bytes = problem.factors.weights.bytes();
    let all = [problem.outputs, problem.inputs / BLOCK * bytes / 2];
    lane.device().tensor_map(w, all, [outputs, COLUMNS * bytes / 2], false)
}

/// Number of pieces of weights that a tile goes through.
fn pieces(problem: &Problem) -> usize {
    problem.inputs.div_ceil(BLOCK * COLUMNS)
}

/// Number of blocks of threads that share each of `tiles` tiles of `pieces` pieces: at most `most`, and no more blocks
/// in all than the `busy` that run at once.
fn shares(tiles: usize, pieces: usize, most: usize, busy: usize) -> usize {
    let fits = |&split: &usize| split <= most.min(pieces) && tiles * split <= busy;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// Bytes of all weights.
fn weights(problem: &Problem) -> usize {
    problem.outputs.saturating_mul(problem.inputs / BLOCK).saturating_mul(problem.factors.weights.bytes())
}

/// The compiler options for a format.
fn format_options(format: Format) -> String {
    let bits = match format {
        Format::Q8 => 8,
        Format::Q4 => 4,
    };
    format!("-DFORMAT={bits} -DBYTES={}", format.bytes())
}

/// The compiler options for an element type and a format.
fn types_and_format(dtype: DType, format: Format) -> String {
    format!("{} {}", types(dtype), format_options(format))
}

/// The compiler options of all product kernels.
fn common(problem: &Problem) -> String {
    let types = types_and_format(problem.x.dtype, problem.factors.weights);
    format!("{types} -DCOLUMNS={COLUMNS} -DFN={}", function(problem.activation))
}

/// A kernel that fetches weights while x is being prepared, by the kernel before it or by itself.
fn early<P>(source: &Source<P>, options: &str, lane: &Lane) -> Result<Kernel<P>> {
    // SAFETY: these kernels wait before they access anything but weights, which they only read.
    Ok(unsafe { lane.device().kernel(source, options)?.early() })
}

/// Queues a kernel for `tiles` tiles. Each tile is shared by a cluster of `split` blocks; without clusters, blocks
/// continue with further tiles. `size` has the threads of a block and its bytes of shared memory.
///
/// # Safety
/// As for [`Lane::launch_with`].
unsafe fn launch_tiles<P: Declared>(
    kernel: &Kernel<P::Any>,
    tiles: u32,
    split: usize,
    size: [u32; 2],
    params: &P,
    lane: &Lane,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        match split as u32 {
            1 => {
                let grid = [tiles.min(lane.device().facts().multiprocessors), 1, 1];
                lane.launch_with(kernel, grid, size[0], size[1], params)
            }
            split => lane.launch_together(kernel, Together::Cluster(split), tiles * split, size, params),
        }
    }
}
