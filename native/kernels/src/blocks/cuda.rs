//! Blocks on CUDA. Quantizers are a warp a block. Products walk along rows of weights for a few rows of x, or multiply tiles
//! on tensor cores for more. Weights are fetched in aligned pieces of 16 bytes, whatever their address, and that begins while
//! rows of x are still made ready: by the kernel that walks, where they fit into its shared memory, else by one before.

use super::format::{BLOCK, Format};
use super::{matmul, quantize};
use crate::cuda::{Buffer, Facts, Kernel, Lane, Source, Together, function, grid_size, launch_each, types};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Spec};

const QUANTIZE: Source = Source { name: "blocks_quantize", text: include_str!("convert.cu") };
const DEQUANTIZE: Source = Source { name: "blocks_dequantize", text: include_str!("convert.cu") };
const F16: Source = Source { name: "f16_convert", text: include_str!("f16.cu") };
const ROWS: Source = Source {
    name: "blocks_rows",
    text: concat!(include_str!("../cuda/early.cu"), include_str!("ready.cu"), include_str!("rows.cu")),
};
const WALK: Source = Source {
    name: "blocks_walk",
    text: concat!(
        include_str!("../cuda/activation.cu"),
        include_str!("../cuda/early.cu"),
        include_str!("../cuda/copies.cu"),
        include_str!("ready.cu"),
        include_str!("stage.cu"),
        include_str!("walk.cu")
    ),
};
const TILE: Source = Source {
    name: "blocks_tile",
    text: concat!(
        include_str!("../cuda/activation.cu"),
        include_str!("../cuda/early.cu"),
        include_str!("../cuda/copies.cu"),
        include_str!("../cuda/cluster.cu"),
        include_str!("stage.cu"),
        include_str!("tile.cu")
    ),
};

/// The most rows of x of a walk.
const FEW: usize = 4;

/// Outputs of a warp of a walk, as `walk.cu` has them.
const OUTPUTS: usize = 4;

/// Warps of a tile that share the outputs, and outputs of a warp, as `tile.cu` has them.
const DEEP: usize = 4;
const SIDE: usize = 64;

/// Blocks of threads that share a tile at most.
const SPLIT: usize = 8;

/// What a piece may lie off an aligned address, and what is read beyond it.
const AROUND: usize = 14 + 2;

/// The parameters of `convert.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Convert {
    x: u64,
    q: u64,
    back: u64,
    first: u64,
    blocks: i64,
}

/// The parameters of `f16.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Halves {
    x: u64,
    bits: u64,
    back: u64,
    count: i64,
}

/// The parameters of `rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    x: u64,
    ready: u64,
    rows: i64,
    padded: i64,
    blocks: i64,
    offset: i32,
}

/// The parameters of `walk.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Walked {
    w: u64,
    x: u64,
    ready: u64,
    b: u64,
    y: u64,
    rows: i64,
    outputs: i64,
    blocks: i64,
    columns: i64,
}

/// The parameters of `tile.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tiled {
    w: u64,
    x: u64,
    b: u64,
    y: u64,
    rows: i64,
    outputs: i64,
    blocks: i64,
}

fn number(format: Format) -> u32 {
    match format {
        Format::Q8 => 8,
        Format::Q4 => 4,
    }
}

fn convert(lane: &Lane, source: &Source, dtype: DType, format: Format, params: &Convert) -> Result<()> {
    let quantize = u32::from(source.name == QUANTIZE.name);
    let options = format!("{} -DFORMAT={} -DQUANTIZE={quantize}", types(dtype), number(format));
    let kernel = lane.device().kernel(source, &options)?;
    // SAFETY: Convert is the struct that the kernels declare; the op's checks prove that there are so many blocks.
    unsafe { launch_each(lane, &kernel, params.blocks as usize * BLOCK, params) }
}

/// Queues the quantizer; where it checks what it reads, waits for what that says.
pub fn quantize(problem: &quantize::Problem, x: &Buffer, q: &Buffer, lane: &Lane) -> Result<()> {
    let count = problem.x.shape.elements();
    let first = lane.temporary(Spec::new(DType::I64, &[1])?)?;
    let mut params =
        Convert { x: lane.address(x)?, q: even("q", q, lane)?, blocks: (count / BLOCK) as i64, ..Convert::default() };
    if problem.unchecked {
        return convert(lane, &QUANTIZE, problem.x.dtype, problem.format, &params);
    }
    lane.fill(&first, 0xff)?;
    params.first = lane.address(&first)?;
    convert(lane, &QUANTIZE, problem.x.dtype, problem.format, &params)?;
    let at = lane.downloaded(&first)?.view().slice::<i64>()?[0];
    if at < 0 {
        return Ok(());
    }
    let value = x.reshape(&[count])?.rows(at as usize..at as usize + 1)?;
    let value = lane.downloaded(&value)?.view().to_f64().iter().fold(0.0, |_, &v| v as f32);
    Err(problem.format.refused(at as usize, value))
}

/// The address of blocks, whose scales have two bytes.
fn even(name: &str, blocks: &Buffer, lane: &Lane) -> Result<u64> {
    let at = lane.address(blocks)?;
    if at % 2 == 0 {
        return Ok(at);
    }
    let error = Error::new(Kind::Argument, name).expected("blocks at an even address").got(format_args!("{at:#x}"));
    Err(error.hint("Copy the part of the tensor to one of its own"))
}

/// Queues the way back.
pub fn dequantize(format: Format, q: &Buffer, x: &Buffer, lane: &Lane) -> Result<()> {
    let blocks = (x.spec().shape.elements() / BLOCK) as i64;
    let params = Convert { q: even("q", q, lane)?, back: lane.address(x)?, blocks, ..Convert::default() };
    convert(lane, &DEQUANTIZE, DType::F32, format, &params)
}

/// Queues the bits of half-precision numbers, and what they are read back as.
pub fn to_f16(x: &Buffer, [bits, back]: [&Buffer; 2], lane: &Lane) -> Result<()> {
    let count = x.spec().shape.elements();
    let kernel = lane.device().kernel(&F16, &types(DType::F32))?;
    let params =
        Halves { x: lane.address(x)?, bits: lane.address(bits)?, back: lane.address(back)?, count: count as i64 };
    // SAFETY: Halves is the struct that the kernel declares; the op's checks prove that the buffers have these sizes.
    unsafe { launch_each(lane, &kernel, count, &params) }
}

/// Where the tensors of a product lie.
struct Tensors {
    x: u64,
    w: u64,
    b: u64,
    y: u64,
}

/// Queues the product.
pub fn multiply(
    problem: &matmul::Problem,
    [x, w]: [&Buffer; 2],
    b: Option<&Buffer>,
    y: &Buffer,
    lane: &Lane,
) -> Result<()> {
    if problem.rows * problem.outputs == 0 {
        return Ok(());
    }
    let tensors = Tensors {
        x: lane.address(x)?,
        w: even("w", w, lane)?,
        b: b.map_or(Ok(0), |b| lane.address(b))?,
        y: lane.address(y)?,
    };
    let facts = lane.device().facts();
    if !problem.factors.quantized || problem.rows <= FEW || facts.capability.0 < 8 {
        Walk::of(problem, &facts).launch(problem, &tensors, lane)
    } else {
        Tile::of(problem, &facts).launch(problem, &tensors, lane)
    }
}

/// What both kernels are compiled with.
fn common(problem: &matmul::Problem) -> String {
    let format = number(problem.factors.weights);
    format!("{} -DFORMAT={format} -DFN={}", types(problem.x.dtype), function(problem.activation))
}

/// Queues what makes rows of x ready in scratch memory, where a block of a row takes so many bytes, and tells where that is.
fn make_ready(
    problem: &matmul::Problem,
    [padded, blocks, bytes]: [usize; 3],
    x: u64,
    options: &str,
    lane: &Lane,
) -> Result<u64> {
    let ready = lane.scratch((padded * blocks * bytes).max(16))?;
    let offset = if problem.factors.weights == Format::Q4 { 8 } else { 0 };
    let (rows, own) = (problem.rows as i64, problem.inputs / BLOCK);
    let params = Rows { x, ready, rows, padded: padded as i64, blocks: own as i64, offset };
    let kernel = lane.device().kernel(&ROWS, &format!("{} {options}", types(problem.x.dtype)))?;
    // SAFETY: Rows is the struct that the kernel declares; scratch has room for so many rows, and four threads have a block.
    unsafe { launch_each(lane, &kernel, padded * own * 4, &params)? };
    Ok(ready)
}

/// A kernel that fetches weights while x is made ready.
fn early(source: &Source, options: &str, lane: &Lane) -> Result<Kernel> {
    // SAFETY: these kernels wait before they read what x was made to, and nobody writes weights meanwhile: what was queued
    // before x was made ready is done.
    Ok(unsafe { lane.device().kernel(source, options)?.early() })
}

/// How a product of few rows is done: what `walk.cu` is compiled for, and blocks of threads that share the outputs.
#[derive(Debug)]
struct Walk {
    floats: bool,
    fused: bool,
    rows: usize,
    warps: usize,
    stages: usize,
    columns: usize,
    shared: usize,
}

impl Walk {
    fn of(problem: &matmul::Problem, facts: &Facts) -> Walk {
        let (rows, floats) = (problem.rows.next_power_of_two().min(FEW), !problem.factors.quantized);
        let groups = problem.rows.div_ceil(rows);
        let busy = facts.multiprocessors as usize;
        let plan = |fused, warps: usize, stages: usize| {
            let shared = warps * stages * Walk::stage(problem) + usize::from(fused) * rows * Walk::ready(problem);
            // Blocks go on with other outputs until all is done.
            let at_once = (facts.shared as usize / shared).clamp(1, 32 / warps);
            let most = (busy * at_once).div_ceil(groups);
            let columns = problem.outputs.div_ceil(OUTPUTS * warps).min(most);
            Walk { floats, fused, rows, warps, stages, columns, shared }
        };
        let plans = [true, false].into_iter().flat_map(|fused| {
            [16, 8, 4].into_iter().flat_map(move |warps| [4, 3, 2].map(|stages| (fused, warps, stages)))
        });
        let mut plans = plans.map(|(fused, warps, stages)| plan(fused, warps, stages));
        // Large blocks make x ready less often, and small ones leave nobody idle; many floats a thread do not fit into
        // registers.
        let good = |plan: &Walk| {
            let fits = plan.shared <= facts.shared as usize && (!floats || plan.warps * rows <= 32);
            fits && (plan.warps == 4 || plan.columns * groups * 10 >= busy * 9)
        };
        plans.find(good).expect("a small one")
    }

    /// Bytes of a stage of a warp.
    fn stage(problem: &matmul::Problem) -> usize {
        OUTPUTS * (32 * problem.factors.weights.bytes() + AROUND).next_multiple_of(16)
    }

    /// Bytes of a row of x that is ready, as `ready.cu` has them for 32 blocks.
    fn ready(problem: &matmul::Problem) -> usize {
        let of_32 = if problem.factors.quantized { 32 * (BLOCK + 8) } else { 32 * BLOCK * 4 };
        problem.inputs.div_ceil(32 * BLOCK) * of_32
    }

    fn launch(&self, problem: &matmul::Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Walk { floats, fused, rows, warps, stages, columns, shared } = *self;
        let groups = problem.rows.div_ceil(rows);
        let given = format!("-DFLOATS={}", u32::from(floats));
        let options = format!(
            "{} {given} -DROWS={rows} -DFUSED={} -DWARPS={warps} -DSTAGES={stages}",
            common(problem),
            u32::from(fused)
        );
        let (ready, kernel) = if fused {
            (0, lane.device().kernel(&WALK, &options)?)
        } else {
            let sizes = [groups * rows, 1, Walk::ready(problem)];
            let ready = make_ready(problem, sizes, tensors.x, &format!("{given} -DTILE=0 -DNT=1"), lane)?;
            (ready, early(&WALK, &options, lane)?)
        };
        let Tensors { x, w, b, y } = *tensors;
        let [rows, outputs, blocks, columns] =
            [problem.rows, problem.outputs, problem.inputs / BLOCK, columns].map(|size| size as i64);
        let params = Walked { w, x, ready, b, y, rows, outputs, blocks, columns };
        let grid = [grid_size(self.columns.saturating_mul(groups))?, 1, 1];
        // SAFETY: Walked is the struct that the kernel declares; the op's checks prove that the buffers have these sizes.
        unsafe { lane.launch_with(&kernel, grid, 32 * warps as u32, shared as u32, &params) }
    }
}

/// How a product of many rows is done: what `tile.cu` is compiled for.
#[derive(Debug)]
struct Tile {
    rows: usize,
    sides: usize,
    split: usize,
    stages: usize,
    shared: usize,
}

impl Tile {
    fn of(problem: &matmul::Problem, facts: &Facts) -> Tile {
        let rows = problem.rows.div_ceil(8).next_power_of_two().min(4);
        let most = if facts.capability.0 < 9 { 1 } else { SPLIT };
        let (busy, chunks) = (facts.multiprocessors as usize, problem.inputs.div_ceil(BLOCK * Tile::columns(problem)));
        let fits = |sides| {
            let shared = |stages| stages * Tile::stage(problem, rows, sides);
            [4, 3, 2].into_iter().map(|stages| (stages, shared(stages))).find(|&(_, all)| all <= facts.shared as usize)
        };
        let tiles = |sides| problem.outputs.div_ceil(SIDE * sides) * problem.rows.div_ceil(8 * rows);
        // Large tiles read x less often, and small ones, or shared ones, leave nobody idle.
        let good = |&sides: &usize| fits(sides).is_some() && (sides == 1 || tiles(sides) * most >= busy);
        let sides = [2, 1].into_iter().find(good).unwrap_or(1);
        let (stages, shared) = fits(sides).expect("a tile that fits");
        let split = [8, 4, 2].into_iter().find(|&split| split <= most.min(chunks) && tiles(sides) * split <= busy);
        Tile { rows, sides, split: split.unwrap_or(1), stages, shared }
    }

    /// Blocks of a row at a time, as `tile.cu` has them.
    fn columns(problem: &matmul::Problem) -> usize {
        if problem.factors.weights == Format::Q8 { 8 } else { 16 }
    }

    /// Bytes of a stage.
    fn stage(problem: &matmul::Problem, rows: usize, sides: usize) -> usize {
        let columns = Tile::columns(problem);
        let row = ((columns * problem.factors.weights.bytes() + AROUND).div_ceil(16) | 1) * 16;
        SIDE * sides * row + columns * rows * 8 * (BLOCK + 8)
    }

    fn launch(&self, problem: &matmul::Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Tile { rows, sides, split, stages, shared } = *self;
        let blocks = problem.inputs / BLOCK;
        let groups = problem.rows.div_ceil(8 * rows);
        let sizes = [groups * 8 * rows, blocks, BLOCK + 8];
        let ready = make_ready(problem, sizes, tensors.x, &format!("-DFLOATS=0 -DTILE=1 -DNT={rows}"), lane)?;
        let options = format!("{} -DNT={rows} -DSIDES={sides} -DSPLIT={split} -DSTAGES={stages}", common(problem));
        let kernel = early(&TILE, &options, lane)?;
        let Tensors { w, b, y, .. } = *tensors;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, blocks].map(|size| size as i64);
        let params = Tiled { w, x: ready, b, y, rows, outputs, blocks };
        let tiles = problem.outputs.div_ceil(SIDE * sides).saturating_mul(groups);
        let grid = grid_size(tiles.saturating_mul(split))?;
        let size = [(32 * sides * DEEP) as u32, shared as u32];
        // SAFETY: Tiled is the struct that the kernel declares; the op's checks prove that the buffers have these sizes.
        unsafe {
            match split {
                1 => lane.launch_with(&kernel, [grid, 1, 1], size[0], size[1], &params),
                split => lane.launch_together(&kernel, Together::Cluster(split as u32), grid, size, &params),
            }
        }
    }
}
