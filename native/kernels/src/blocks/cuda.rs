//! Blocks on CUDA. Quantizers are a warp a block; products make the rows of x ready first, and then walk along rows of
//! weights for a few of them, or multiply tiles on tensor cores for more. Weights are fetched in aligned pieces of 16
//! bytes, whatever their address, and that begins while x is still made ready.

use super::format::{BLOCK, Format};
use super::{matmul, quantize};
use crate::cuda::{Buffer, Kernel, Lane, Source, function, grid_size, launch_each, types};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Spec};

const QUANTIZE: Source = Source { name: "blocks_quantize", text: include_str!("convert.cu") };
const DEQUANTIZE: Source = Source { name: "blocks_dequantize", text: include_str!("convert.cu") };
const F16: Source = Source { name: "f16_convert", text: include_str!("f16.cu") };
const ROWS: Source = Source { name: "blocks_rows", text: include_str!("rows.cu") };
const WALK: Source = Source {
    name: "blocks_walk",
    text: concat!(include_str!("../cuda/activation.cu"), include_str!("stage.cu"), include_str!("walk.cu")),
};
const TILE: Source = Source {
    name: "blocks_tile",
    text: concat!(include_str!("../cuda/activation.cu"), include_str!("stage.cu"), include_str!("tile.cu")),
};

/// The most rows of x of a walk.
const FEW: usize = 4;

/// Warps of a block of threads, pieces under way, and outputs of a warp, as `walk.cu` and `tile.cu` have them.
const WARPS: usize = 4;
const STAGES: usize = 3;
const OUTPUTS: usize = 4;

/// A tile has so many times 16 outputs.
const TILES: usize = 2;

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
    values: u64,
    scales: u64,
    rows: i64,
    padded: i64,
    blocks: i64,
    offset: i32,
}

/// The parameters of `walk.cu` and `tile.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Product {
    w: u64,
    x: u64,
    scales: u64,
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

/// How a product is done.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Walks with x in Q8_0, or with floats.
    Walk { floats: bool },
    /// Tiles of so many times 8 rows.
    Tile { rows: usize },
}

impl Way {
    fn of(problem: &matmul::Problem, lane: &Lane) -> Way {
        let facts = lane.device().facts();
        if !problem.factors.quantized || problem.rows <= FEW || facts.capability.0 < 8 {
            return Way::Walk { floats: !problem.factors.quantized };
        }
        Way::Tile { rows: problem.rows.div_ceil(8).next_power_of_two().min(4) }
    }

    /// The number that `rows.cu` knows it by, and bytes of all values and scales of rows of so many blocks.
    fn prepared(self, rows: usize, blocks: usize) -> (u32, usize, usize) {
        let padded = blocks.next_multiple_of(32);
        match self {
            Way::Walk { floats: false } => (0, rows * padded * BLOCK, rows * padded * 8),
            Way::Tile { rows: tile } => {
                let rows = rows.next_multiple_of(8 * tile);
                (1, rows * blocks * BLOCK, rows * blocks * 8)
            }
            Way::Walk { floats: true } => (2, rows * padded * BLOCK * 4, 0),
        }
    }
}

/// Queues the product.
pub fn multiply(
    problem: &matmul::Problem,
    [x, w]: [&Buffer; 2],
    b: Option<&Buffer>,
    y: &Buffer,
    lane: &Lane,
) -> Result<()> {
    let matmul::Problem { rows, inputs, outputs, .. } = *problem;
    if rows * outputs == 0 {
        return Ok(());
    }
    let (blocks, way) = (inputs / BLOCK, Way::of(problem, lane));
    let (_, values, scales) = way.prepared(rows, blocks);
    let scratch = lane.scratch((values + scales).max(16))?;
    let params = Product {
        w: even("w", w, lane)?,
        x: scratch,
        scales: scratch + values as u64,
        b: b.map_or(Ok(0), |b| lane.address(b))?,
        y: lane.address(y)?,
        rows: rows as i64,
        outputs: outputs as i64,
        blocks: blocks as i64,
    };
    make_ready(problem, way, lane.address(x)?, &params, lane)?;
    launch(problem, way, &params, lane)
}

/// Queues what makes the rows of x ready.
fn make_ready(problem: &matmul::Problem, way: Way, x: u64, product: &Product, lane: &Lane) -> Result<()> {
    let padded = match way {
        Way::Walk { .. } => problem.rows,
        Way::Tile { rows } => problem.rows.next_multiple_of(8 * rows),
    };
    let offset = if problem.factors.weights == Format::Q4 { 8 } else { 0 };
    let Product { x: values, scales, rows, blocks, .. } = *product;
    let params = Rows { x, values, scales, rows, padded: padded as i64, blocks, offset };
    let number = way.prepared(0, 0).0;
    let together = if let Way::Tile { rows } = way { rows } else { 1 };
    let options = format!("{} -DWAY={number} -DNT={together}", types(problem.x.dtype));
    let kernel = lane.device().kernel(&ROWS, &options)?;
    // SAFETY: Rows is the struct that the kernel declares; scratch has room for so many rows.
    unsafe { launch_each(lane, &kernel, padded * problem.inputs, &params) }
}

fn launch(problem: &matmul::Problem, way: Way, params: &Product, lane: &Lane) -> Result<()> {
    let format = problem.factors.weights;
    let common =
        format!("{} -DFORMAT={} -DFN={}", types(problem.x.dtype), number(format), function(problem.activation));
    let (source, options, grid, shared) = match way {
        Way::Walk { floats } => {
            let rows = problem.rows.next_power_of_two().min(FEW);
            let options = format!("{common} -DROWS={rows} -DFLOATS={}", u32::from(floats));
            let row = (32 * format.bytes() + AROUND).next_multiple_of(16);
            let grid = [problem.outputs.div_ceil(OUTPUTS * WARPS), problem.rows.div_ceil(rows)];
            (&WALK, options, grid, WARPS * STAGES * OUTPUTS * row)
        }
        Way::Tile { rows } => {
            let options = format!("{common} -DMT={TILES} -DNT={rows}");
            let columns = if format == Format::Q8 { 4 } else { 8 };
            let row = ((columns * format.bytes() + AROUND).div_ceil(16) | 1) * 16;
            let grid = [problem.outputs.div_ceil(16 * TILES), problem.rows.div_ceil(8 * rows)];
            let sums = WARPS * 16 * TILES * 8 * rows * size_of::<f32>();
            (&TILE, options, grid, (WARPS * STAGES * 16 * TILES * row).max(sums))
        }
    };
    // SAFETY: both kernels wait before they read what x was made to, and nobody writes weights meanwhile: what was queued
    // before x was made ready is done.
    let kernel: Kernel = unsafe { lane.device().kernel(source, &options)?.early() };
    // One size, as the second one of a grid is small.
    let grid = [grid_size(grid[0].saturating_mul(grid[1]))?, 1, 1];
    // SAFETY: Product is the struct that the kernels declare; the op's checks prove that the buffers have these sizes.
    unsafe { lane.launch_with(&kernel, grid, 32 * WARPS as u32, shared as u32, params) }
}
