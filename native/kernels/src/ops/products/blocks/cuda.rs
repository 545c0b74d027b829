//! Blocks on CUDA. Quantizers use one warp per block. Products of quantized rows run on tensor cores: one row, which
//! each block of threads prepares by itself, or tiles of rows, in teams of warps or warp by warp. The others walk along
//! rows of weights: where x stays float, or where it has few rows and the device cannot copy rows of weights in whole
//! units. Fetching weights begins while rows of x are still being prepared. The same kernel prepares them where they
//! are few and fit into its shared memory, else a kernel before it.

mod boxes;
mod matvec;

use super::format::{BLOCK, Format};
use super::problem::{Conversion, Problem};
use crate::cuda::tiles::{eights, streamed};
use crate::cuda::{
    Buffer, Facts, Kernel, Lane, Source, TensorMap, Together, function, grid_size, launch_each, params, types,
};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Spec};
use boxes::Boxes;
use matvec::Matvec;

const QUANTIZE: Source<Convert> = Source::new("blocks_quantize", include_str!("convert.cu"));
const DEQUANTIZE: Source<Convert> = Source::new("blocks_dequantize", include_str!("convert.cu"));
const F16: Source<Halves> = Source::new("f16_convert", include_str!("f16.cu"));
const ROWS: Source<Rows> = Source::new(
    "blocks_rows",
    concat!(
        include_str!("../../../cuda/include/early.cu"),
        include_str!("ready.cu"),
        include_str!("order.cu"),
        include_str!("rows.cu")
    ),
);
const WALK: Source<Walked> = Source::new(
    "blocks_walk",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/early.cu"),
        include_str!("../../../cuda/include/copies.cu"),
        include_str!("ready.cu"),
        include_str!("stage.cu"),
        include_str!("walk.cu")
    ),
);
const TILE: Source<Tiled> = Source::new(
    "blocks_tile",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/early.cu"),
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("../../../cuda/include/pipeline.cu"),
        include_str!("../../../cuda/include/tiles.cu"),
        include_str!("ready.cu"),
        include_str!("order.cu"),
        include_str!("tile.cu")
    ),
);

/// The most rows of x in a walk.
const FEW: usize = 4;

/// Outputs of a warp in a walk.
const OUTPUTS: usize = 4;

/// Of a tile: outputs of warps that share columns, blocks of a row at a time, and threads that fetch where
/// the device does not copy by itself.
const SIDE: usize = 32;
const COLUMNS: usize = 8;
const PRODUCERS: usize = 128;

/// Upper limits: blocks of threads that share a tile, and stages.
const SPLIT: usize = 8;
const STAGES: usize = 24;

/// Bytes of shared memory that a tile declares statically, rounded up.
const DECLARED: usize = 512;

/// Bytes of a piece before its aligned address at most, and bytes read beyond its end.
const AROUND: usize = 14 + 2;

params! {
    /// The parameters of `convert.cu`.
    #[derive(Default)]
    struct Convert {
        x: u64 as "const STORAGE*",
        q: u64 as "unsigned char*",
        back: u64 as "float*",
        first: u64 as "unsigned long long*", // the first value without a finite scale, or null
        blocks: i64,
    }
}

params! {
    /// The parameters of `f16.cu`.
    struct Halves {
        x: u64 as "const float*",
        bits: u64 as "unsigned short*",
        back: u64 as "float*",
        count: i64,
    }
}

/// Blocks of a row that a block of threads prepares.
const SHARE: usize = 64;

/// Threads of a block that prepares rows, each with parts of `turns` blocks.
fn ready_threads(turns: usize) -> u32 {
    (4 * SHARE / turns) as u32
}

params! {
    /// The parameters of `rows.cu`.
    struct Rows {
        x: u64 as "const STORAGE*",
        ready: u64 as "unsigned char*",
        rows: i64,
        blocks: i64,
        given: i64, // blocks of a row of x; those after them are zeros
        offset: i32, // how much weights are too large
    }
}

params! {
    /// The parameters of `walk.cu`.
    struct Walked {
        w: u64 as "const unsigned char*",
        x: u64 as "const STORAGE*",
        ready: u64 as "const unsigned char*",
        b: u64 as "const float*",
        y: u64 as "STORAGE*",
        rows: i64,
        outputs: i64,
        blocks: i64,
        columns: i64, // blocks of threads that share the outputs
    }
}

params! {
    /// The parameters of `tile.cu`.
    struct Tiled with TensorMap {
        matrix: TensorMap, // that of the weights where PIECE is 0
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

fn number(format: Format) -> u32 {
    match format {
        Format::Q8 => 8,
        Format::Q4 => 4,
    }
}

fn convert(lane: &Lane, source: &Source<Convert>, dtype: DType, format: Format, params: &Convert) -> Result<()> {
    let quantize = u32::from(source.name == QUANTIZE.name);
    let options = format!("{} -DFORMAT={} -DQUANTIZE={quantize}", types(dtype), number(format));
    let kernel = lane.device().kernel(source, &options)?;
    // SAFETY: the op's checks prove the number of blocks.
    unsafe { launch_each(lane, &kernel, params.blocks as usize * BLOCK, params) }
}

/// Queues the quantizer. With checks, waits for their result.
pub fn quantize(problem: &Conversion, x: &Buffer, q: &Buffer, lane: &Lane) -> Result<()> {
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

/// The address of blocks, which must be even because scales have two bytes.
fn even(name: &str, blocks: &Buffer, lane: &Lane) -> Result<u64> {
    let at = lane.address(blocks)?;
    if at % 2 == 0 {
        return Ok(at);
    }
    let error = Error::new(Kind::Argument, name).expected("blocks at an even address").got(format_args!("{at:#x}"));
    Err(error.hint("Copy the part of the tensor to one of its own"))
}

/// Queues the conversion back to floats.
pub fn dequantize(format: Format, q: &Buffer, x: &Buffer, lane: &Lane) -> Result<()> {
    let blocks = (x.spec().shape.elements() / BLOCK) as i64;
    let params = Convert { q: even("q", q, lane)?, back: lane.address(x)?, blocks, ..Convert::default() };
    convert(lane, &DEQUANTIZE, DType::F32, format, &params)
}

/// Queues the conversion to bits of half-precision numbers, and their values read back.
pub fn to_f16(x: &Buffer, [bits, back]: [&Buffer; 2], lane: &Lane) -> Result<()> {
    let count = x.spec().shape.elements();
    let kernel = lane.device().kernel(&F16, &types(DType::F32))?;
    let params =
        Halves { x: lane.address(x)?, bits: lane.address(bits)?, back: lane.address(back)?, count: count as i64 };
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { launch_each(lane, &kernel, count, &params) }
}

/// The addresses of a product's tensors.
struct Tensors {
    x: u64,
    w: u64,
    b: u64,
    y: u64,
}

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
    let facts = lane.device().facts();
    if Tile::piece(problem, tensors.w, &facts) == 0 {
        if let Some((boxes, kernel)) = Boxes::of(problem, lane)? {
            return boxes.launch(problem, &kernel, &tensors, lane);
        }
        if let Some(matvec) = Matvec::of(problem, &facts) {
            return matvec.launch(problem, &tensors, lane);
        }
    }
    match Tile::of(problem, tensors.w, &facts) {
        Some(tile) => tile.launch(problem, &tensors, lane),
        None => Walk::of(problem, &facts).launch(problem, &tensors, lane),
    }
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

/// The compiler options of all product kernels.
fn common(problem: &Problem) -> String {
    let format = number(problem.factors.weights);
    format!("{} -DFORMAT={format} -DCOLUMNS={COLUMNS} -DFN={}", types(problem.x.dtype), function(problem.activation))
}

/// Queues the kernel that prepares rows of x in scratch memory, and returns their address. There are `padded` rows of
/// `blocks` blocks and `bytes` bytes each, prepared by threads that have parts of `turns` blocks each.
fn make_ready(
    problem: &Problem,
    [padded, blocks, bytes]: [usize; 3],
    turns: usize,
    x: u64,
    options: &str,
    lane: &Lane,
) -> Result<u64> {
    let ready = lane.scratch((padded * bytes).max(16))?;
    let format = problem.factors.weights;
    let offset = if format == Format::Q4 { 8 } else { 0 };
    let grid = [grid_size(padded.saturating_mul(blocks.div_ceil(SHARE)))?, 1, 1];
    let [rows, given, blocks] = [problem.rows, problem.inputs / BLOCK, blocks].map(|size| size as i64);
    let params = Rows { x, ready, rows, blocks, given, offset };
    let options = format!(
        "{} -DFORMAT={} -DCOLUMNS={COLUMNS} -DSHARE={SHARE} -DTURNS={turns} {options}",
        types(problem.x.dtype),
        number(format)
    );
    // SAFETY: the kernel waits before it accesses memory.
    let kernel = unsafe { lane.device().kernel(&ROWS, &options)?.early() };
    // SAFETY: scratch has room for `padded` rows.
    unsafe { lane.launch(&kernel, grid, ready_threads(turns), &params)? };
    Ok(ready)
}

/// A kernel that fetches weights while x is being prepared, by the kernel before it or by itself.
fn early<P>(source: &Source<P>, options: &str, lane: &Lane) -> Result<Kernel<P>> {
    // SAFETY: these kernels wait before they access anything but weights, which they only read.
    Ok(unsafe { lane.device().kernel(source, options)?.early() })
}

/// The plan of a product of few rows: the constants that `walk.cu` is compiled with, and the number of blocks of
/// threads that share the outputs.
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
    fn of(problem: &Problem, facts: &Facts) -> Walk {
        let (rows, floats) = (problem.rows.next_power_of_two().min(FEW), !problem.factors.quantized);
        let groups = problem.rows.div_ceil(rows);
        let busy = facts.multiprocessors as usize;
        let plan = |fused, warps: usize, stages: usize| {
            let shared = warps * stages * Walk::stage(problem) + usize::from(fused) * rows * Walk::ready(problem);
            // Blocks go on with further outputs until all are done.
            let at_once = (facts.shared as usize / shared).clamp(1, 32 / warps);
            let most = (busy * at_once).div_ceil(groups);
            let columns = problem.outputs.div_ceil(OUTPUTS * warps).min(most);
            Walk { floats, fused, rows, warps, stages, columns, shared }
        };
        let plans = [true, false].into_iter().flat_map(|fused| {
            [16, 8, 4].into_iter().flat_map(move |warps| [4, 3, 2].map(|stages| (fused, warps, stages)))
        });
        let mut plans = plans.map(|(fused, warps, stages)| plan(fused, warps, stages));
        // Large blocks prepare x less often, and small ones leave no multiprocessor idle. Many floats per thread do not
        // fit into registers.
        let good = |plan: &Walk| {
            let fits = plan.shared <= facts.shared as usize && (!floats || plan.warps * rows <= 32);
            fits && (plan.warps == 4 || plan.columns * groups * 10 >= busy * 9)
        };
        plans.find(good).expect("a small one")
    }

    /// Bytes of a warp's stage.
    fn stage(problem: &Problem) -> usize {
        OUTPUTS * (32 * problem.factors.weights.bytes() + AROUND).next_multiple_of(16)
    }

    /// Bytes of a prepared row of x; `ready.cu` has those of 32 blocks.
    fn ready(problem: &Problem) -> usize {
        let of_32 = if problem.factors.quantized { 32 * (BLOCK + 8) } else { 32 * BLOCK * 4 };
        problem.inputs.div_ceil(32 * BLOCK) * of_32
    }

    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Walk { floats, fused, rows, warps, stages, columns, shared } = *self;
        let groups = problem.rows.div_ceil(rows);
        let given = format!("-DFLOATS={}", u32::from(floats));
        let options = format!(
            "{} {given} -DROWS={rows} -DFUSED={} -DWARPS={warps} -DSTAGES={stages} -DOUTPUTS={OUTPUTS}",
            common(problem),
            u32::from(fused)
        );
        let (ready, kernel) = if fused {
            (0, lane.device().kernel(&WALK, &options)?)
        } else {
            let sizes = [groups * rows, problem.inputs / BLOCK, Walk::ready(problem)];
            let ready = make_ready(problem, sizes, 1, tensors.x, &format!("{given} -DTILE=0 -DNT=1"), lane)?;
            (ready, early(&WALK, &options, lane)?)
        };
        let Tensors { x, w, b, y } = *tensors;
        let [rows, outputs, blocks, columns] =
            [problem.rows, problem.outputs, problem.inputs / BLOCK, columns].map(|size| size as i64);
        let params = Walked { w, x, ready, b, y, rows, outputs, blocks, columns };
        let grid = [grid_size(self.columns.saturating_mul(groups))?, 1, 1];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe { lane.launch_with(&kernel, grid, 32 * warps as u32, shared as u32, &params) }
    }
}

/// The plan of a product on tensor cores: the constants that `tile.cu` is compiled with.
#[derive(Debug)]
struct Tile {
    eights: usize,
    sides: usize,
    split: usize,
    stages: usize,
    piece: u64,
    shared: usize,
}

impl Tile {
    /// `None` where a walk is faster, or is the only possibility.
    fn of(problem: &Problem, w: u64, facts: &Facts) -> Option<Tile> {
        let piece = Tile::piece(problem, w, facts);
        // For few rows a walk is no slower if threads must fetch the weights.
        let few = problem.rows <= FEW && piece != 0 || problem.rows == 1;
        if few || !problem.factors.quantized || facts.capability.0 < 8 || problem.inputs == 0 {
            return None;
        }
        let eights = eights(problem.rows);
        let busy = facts.multiprocessors as usize;
        let most = if facts.capability.0 < 9 { 1 } else { SPLIT };
        let tiles = |sides| problem.outputs.div_ceil(SIDE * sides) * problem.rows.div_ceil(8 * eights);
        // Large tiles read x less often; small or shared ones leave no multiprocessor idle.
        let good = |&sides: &usize| sides == 1 || tiles(sides) * most >= busy;
        [2, 1].into_iter().filter(good).find_map(|sides| {
            let split = shares(tiles(sides), pieces(problem), most, busy);
            let rows = 8 * eights;
            let stage = COLUMNS * (SIDE * sides * problem.factors.weights.bytes() + rows * (BLOCK + 4));
            let sums = 4 * rows * (SIDE * sides + 4) * size_of::<f32>();
            let stages = ((facts.shared as usize - DECLARED).checked_sub(sums)? / stage).min(STAGES);
            let shared = stages * stage + sums;
            (stages >= 3).then_some(Tile { eights, sides, split, stages, piece, shared })
        })
    }

    /// The largest piece that divides rows of weights; 0 where the device copies them by itself.
    fn piece(problem: &Problem, w: u64, facts: &Facts) -> u64 {
        let bytes = (problem.inputs / BLOCK * problem.factors.weights.bytes()) as u64;
        let piece = 1 << (w | bytes | TensorMap::UNIT).trailing_zeros();
        let by_itself = facts.capability.0 >= 9 && bytes > 0 && bytes.max(problem.outputs as u64) < 1 << 31;
        if piece == TensorMap::UNIT && by_itself { 0 } else { piece }
    }

    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Tile { eights, sides, split, stages, piece, shared } = *self;
        let blocks = problem.inputs / BLOCK;
        let many = problem.rows.div_ceil(8 * eights);
        let padded = blocks.next_multiple_of(COLUMNS);
        let sizes = [many * 8 * eights, padded, padded * (BLOCK + 4)];
        let ready = make_ready(problem, sizes, 1, tensors.x, &format!("-DFLOATS=0 -DTILE=1 -DNT={eights}"), lane)?;
        let matrix = match piece {
            0 => {
                let bytes = problem.factors.weights.bytes();
                let (all, part) = ([problem.outputs, blocks * bytes / 2], [SIDE * sides, COLUMNS * bytes / 2]);
                lane.device().tensor_map(tensors.w, all, part, false)?
            }
            _ => TensorMap::NONE,
        };
        let producers = if piece == 0 { 32 } else { PRODUCERS };
        let options = format!(
            "{} -DFLOATS=0 -DNT={eights} -DSIDE={SIDE} -DSIDES={sides} -DSPLIT={split} -DSTAGES={stages} \
             -DPIECE={piece} -DPRODUCERS={producers} {}",
            common(problem),
            streamed(if piece == 0 { weights(problem) } else { 0 }, lane)
        );
        let kernel = early(&TILE, &options, lane)?;
        let Tensors { w, b, y, .. } = *tensors;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, blocks].map(|size| size as i64);
        let columns = problem.outputs.div_ceil(SIDE * sides);
        let tiles = grid_size(columns.saturating_mul(many))?;
        let params =
            Tiled { matrix, w, ready, b, y, rows, outputs, blocks, columns: columns as i32, tiles: tiles as i32 };
        let grid = if split > 1 { tiles * split as u32 } else { tiles.min(lane.device().facts().multiprocessors) };
        let size = [(32 * 4 * sides + producers) as u32, shared as u32];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe {
            match split {
                1 => lane.launch_with(&kernel, [grid, 1, 1], size[0], size[1], &params),
                split => lane.launch_together(&kernel, Together::Cluster(split as u32), grid, size, &params),
            }
        }
    }
}
