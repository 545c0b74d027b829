//! Ternary numbers on CUDA.
//!
//! Conversions handle one byte of the target per thread. Products read planes as words of 32 cells, whose codes are
//! made in registers and meet four activations per instruction (`dp4a`). For many rows they run on tensor cores, in
//! teams of warps or warp by warp. Others are counted, by words (`popc`) or on tensor cores. Kernels detect content
//! that must be refused, and the host reads the verdict back. So conversions, quantized activations and proofs wait for
//! the device; products do not.

mod boxes;

use super::grid::{Conversion, Grid, Layout, OnSentinel};
use super::problem::{Activations, Form, Pairs, Product, Proof, Quantization, Rows, Rule, Weights, plane_bytes};
use crate::cuda::tiles::eights;
use crate::cuda::{Buffer, Kernel, Lane, Source, Together, function, grid_size, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Described, Spec};
use boxes::Boxes;

const CELLS: Source<Cells> = Source::new("ternary_cells", include_str!("cells.cu"));
const RULES: &str =
    concat!(include_str!("../../../cuda/include/early.cu"), include_str!("bytes.cu"), include_str!("rules.cu"));
const SIZES: Source<Rules> = Source::new("ternary_sizes", RULES);
const THRESHOLD: Source<Rules> = Source::new("ternary_threshold", RULES);
const CUT: Source<Rules> = Source::new("ternary_cut", RULES);
const BYTES: Source<Rules> = Source::new("ternary_bytes", RULES);
const BITS: Source<Rules> = Source::new("ternary_bits", RULES);
const PARTS: Source<Rules> = Source::new(
    "ternary_parts",
    concat!(
        include_str!("../../../cuda/include/early.cu"),
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("../../../cuda/include/pipeline.cu"),
        include_str!("bytes.cu"),
        include_str!("rules.cu"),
        include_str!("parts.cu")
    ),
);
const PRODUCT: Source<Params> = Source::new(
    "ternary_product",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/early.cu"),
        include_str!("ends.cu"),
        include_str!("products.cu")
    ),
);
const TILE: Source<Params> = Source::new(
    "ternary_tile",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/early.cu"),
        include_str!("../../../cuda/include/copies.cu"),
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("ends.cu"),
        include_str!("tile.cu")
    ),
);
const COUNTS: Source<Params> = Source::new(
    "ternary_counts",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/early.cu"),
        include_str!("../../../cuda/include/copies.cu"),
        include_str!("ends.cu"),
        include_str!("bytes.cu"),
        include_str!("counts.cu")
    ),
);
const SUMS: &str = include_str!("sums.cu");
const DOT: Source<Sums> = Source::new("ternary_dot", SUMS);
const COLUMNS: Source<Sums> = Source::new("ternary_columns", SUMS);
const PROOF: Source<Sums> = Source::new("ternary_proof", SUMS);
const ARGMAX: Source<Sums> = Source::new("argmax", SUMS);

/// Threads of a block that handles one row.
const THREADS: u32 = 256;

/// Threads of a block that prepares a row for products.
const WIDE: u32 = 1024;

/// Warps of a block of products.
const WARPS: usize = 8;

/// Warps of a block that counts.
const COUNTING: usize = 16;

/// Up to this number of rows, bytes are counted. More rows are faster multiplied on tensor cores, and more signs
/// counted there.
const FEW: usize = 4;

/// Columns that a tile takes at a time.
const CHUNK: usize = 512;

/// The most blocks of threads that prepare a row together.
const MOST_PARTS: usize = 8;

/// Rows of a column that one thread sums.
const PART: usize = 512;

fn at(tensors: &Named<&Buffer>, name: &str, lane: &Lane) -> Result<u64> {
    tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer))
}

/// A position reported by a kernel; all bits set if there is none.
struct Found(Buffer);

impl Found {
    fn new(lane: &Lane) -> Result<Found> {
        let buffer = lane.temporary(Spec::new(DType::I64, &[1])?)?;
        lane.fill(&buffer, 0xff)?;
        Ok(Found(buffer))
    }

    /// The position, if any. Waits for the lane.
    fn read(&self, lane: &Lane) -> Result<Option<usize>> {
        let value = lane.downloaded(&self.0)?.view().slice::<i64>()?[0];
        Ok(usize::try_from(value).ok())
    }
}

params! {
    /// The parameters of `cells.cu`.
    struct Cells {
        from: [u64; 2] as "const unsigned char*",
        to: [u64; 2] as "unsigned char*",
        sentinels: u64 as "int*",
        first: u64 as "unsigned long long*",
        counts: u64 as "unsigned long long*",
        rows: i64,
        n: i64,
    }
}

/// The addresses of a layout's tensors; a single tensor is given twice.
fn pair(layout: Layout, tensors: &Named<&Buffer>, lane: &Lane) -> Result<[u64; 2]> {
    let names = layout.tensors();
    Ok([lane.address(tensors.get(names[0])?)?, lane.address(tensors.get(names[names.len() - 1])?)?])
}

fn cells(from: &Grid, to: usize, threads: usize, params: &Cells, lane: &Lane) -> Result<()> {
    let options = format!("{} -DFROM={} -DTO={to}", types(DType::F32), from.layout.number());
    let kernel = lane.device().kernel(&CELLS, &options)?;
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { launch_each(lane, &kernel, threads, params) }
}

/// Converts, then reads back whether a sentinel must be refused.
pub fn convert(problem: &Conversion, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Conversion { from, to, on_sentinel } = problem;
    let (count, first) = (*outputs.get("sentinels")?, *outputs.get("first")?);
    lane.fill(count, 0)?;
    lane.fill(first, 0xff)?;
    let params = Cells {
        from: pair(from.layout, inputs, lane)?,
        to: pair(to.layout, outputs, lane)?,
        sentinels: lane.address(count)?,
        first: lane.address(first)?,
        counts: 0,
        rows: from.rows as i64,
        n: from.n as i64,
    };
    let high = if to.layout == Layout::OffsetRows { to.quarter() } else { to.rows };
    let threads = high * to.n.div_ceil(to.layout.in_byte());
    cells(from, to.layout.number(), threads, &params, lane)?;
    if *on_sentinel != OnSentinel::Error {
        return Ok(());
    }
    match Found(first.clone()).read(lane)? {
        Some(at) => Err(from.refuse(lane.downloaded(count)?.view().slice::<i32>()?[0] as usize, at)),
        None => Ok(()),
    }
}

/// Counts.
pub fn stats(grid: &Grid, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let (counts, first) = (*outputs.get("counts")?, *outputs.get("first")?);
    lane.fill(counts, 0)?;
    lane.fill(first, 0xff)?;
    let params = Cells {
        from: pair(grid.layout, inputs, lane)?,
        to: [0; 2],
        sentinels: 0,
        first: lane.address(first)?,
        counts: lane.address(counts)?,
        rows: grid.rows as i64,
        n: grid.n as i64,
    };
    cells(grid, Layout::ALL.len(), grid.rows * grid.n.div_ceil(8), &params, lane)
}

params! {
    /// The parameters of `rules.cu`.
    #[derive(Default)]
    struct Rules {
        x: u64 as "const STORAGE*",
        sums: u64 as "double*", // of each row: sum of magnitudes, and their number
        thresholds: u64 as "float*", // one, or one for each row
        scales: u64 as "float*",
        planes: [u64; 2] as "unsigned char*",
        q: u64 as "signed char*", // in storage order
        // In product order: rows of `stride`, `tiles` tiles of 8 rows, or groups of `eights` eights.
        bits: u64 as "signed char*",
        totals: u64 as "int*", // sums of q
        bad: u64 as "unsigned long long*",
        rows: i64,
        n: i64,
        stride: i64,
        parts: i64,
        tiles: i64,
        eights: i64,
        floor: f32,
        stage: i32,
    }
}

/// The compiler options of the kernels of `rules.cu`.
fn rules(dtype: DType) -> String {
    format!("{} -DTHREADS={THREADS} -DWIDE={WIDE} -DMOST_PARTS={MOST_PARTS}", types(dtype))
}

/// Queues one block per row or part.
fn blocks(source: &Source<Rules>, count: usize, params: &Rules, dtype: DType, lane: &Lane) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let kernel = lane.device().kernel(source, &rules(dtype))?;
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { lane.launch(&kernel, [grid_size(count)?, 1, 1], THREADS, params) }
}

fn cut(params: &Rules, dtype: DType, lane: &Lane) -> Result<()> {
    let kernel = lane.device().kernel(&CUT, &rules(dtype))?;
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { launch_each(lane, &kernel, params.rows as usize * plane_bytes(params.n as usize), params) }
}

/// Quantizes by a rule.
pub fn quantize(problem: &Quantization, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let (rows, parts) = (problem.rows, problem.scales());
    let sums = (rows * 16).next_multiple_of(256);
    let scratch = lane.scratch(sums + parts * 4)?;
    let mut params = Rules {
        x: at(inputs, "w", lane)?,
        sums: scratch,
        thresholds: scratch + sums as u64,
        scales: at(outputs, "scale", lane)?,
        planes: [at(outputs, "plane0", lane)?, at(outputs, "plane1", lane)?],
        rows: rows as i64,
        n: problem.n as i64,
        parts: parts as i64,
        floor: problem.options.threshold.unwrap_or_default() as f32,
        ..Rules::default()
    };
    let mut stage = |source, count, stage| {
        params.stage = stage;
        blocks(source, count, &params, problem.dtype, lane)
    };
    match problem.options.rule {
        Rule::Threshold => stage(&THRESHOLD, parts, 3)?,
        Rule::Absmean => {
            stage(&SIZES, rows, 0)?;
            stage(&THRESHOLD, parts, 0)?;
        }
        Rule::Twn => {
            stage(&SIZES, rows, 0)?;
            stage(&THRESHOLD, parts, 1)?;
            stage(&SIZES, rows, 2)?;
            stage(&THRESHOLD, parts, 2)?;
        }
    }
    cut(&params, problem.dtype, lane)
}

/// Quantizes activations, then reads back whether they were finite.
pub fn activations(
    problem: &Activations,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let found = Found::new(lane)?;
    let x = *inputs.get("x")?;
    let params = Rules {
        x: lane.address(x)?,
        scales: at(outputs, "scale", lane)?,
        q: at(outputs, "q", lane)?,
        bad: lane.address(&found.0)?,
        rows: problem.rows as i64,
        n: problem.n as i64,
        floor: problem.floor,
        ..Rules::default()
    };
    blocks(&BYTES, problem.rows, &params, problem.dtype, lane)?;
    match found.read(lane)? {
        Some(at) => Err(problem.refuse(at, value(x, at, lane)?)),
        None => Ok(()),
    }
}

/// One element of a tensor, read back.
fn value(x: &Buffer, at: usize, lane: &Lane) -> Result<f32> {
    let one = x.reshape(&[x.spec().shape.elements()])?.rows(at..at + 1)?;
    Ok(lane.downloaded(&one)?.view().to_f64()[[0]] as f32)
}

params! {
    /// The parameters of `products.cu`.
    #[derive(Default)]
    struct Params {
        planes: [u64; 2] as "const unsigned char*",
        x: u64 as "const STORAGE*",
        x_planes: [u64; 2] as "const unsigned char*",
        bits: u64 as "const signed char*",
        totals: u64 as "const int*",
        x_scale: u64 as "const float*",
        w_scale: u64 as "const float*",
        bias: u64 as "const float*",
        acc: u64 as "int*",
        y: u64 as "STORAGE*",
        // Written by kernels that quantize x: bytes in storage order, and their scales.
        q: u64 as "signed char*",
        x_scales: u64 as "float*",
        rows: i64,
        n: i64,
        outs: i64,
        stride: i64,
        scales: i64,
        floor: f32,
    }
}

/// Multiplies.
pub fn matmul(problem: &Product, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Product { rows, n, outs, dtype, form, .. } = *problem;
    let mut params = Params {
        planes: [at(inputs, "plane0", lane)?, at(inputs, "plane1", lane)?],
        x: at(inputs, "x", lane)?,
        x_planes: [at(inputs, "x_plane0", lane)?, at(inputs, "x_plane1", lane)?],
        w_scale: at(inputs, "w_scale", lane)?,
        bias: at(inputs, "bias", lane)?,
        acc: at(outputs, "acc", lane)?,
        y: at(outputs, "y", lane)?,
        rows: rows as i64,
        n: n as i64,
        outs: outs as i64,
        scales: problem.scales as i64,
        ..Params::default()
    };
    let whole = problem.bytes().is_multiple_of(16) && params.planes.iter().all(|at| at.is_multiple_of(16));
    let aligned = whole && params.x_planes.iter().all(|at| at.is_multiple_of(16));
    if aligned && let Some(counts) = Counts::of(problem, lane) {
        return counts.run(problem, &mut params, outputs, lane);
    }
    if whole && let Some((boxes, kernel)) = Boxes::of(problem, lane)? {
        return boxes.run(problem, &kernel, &mut params, outputs, lane);
    }
    let tile = if whole { Tile::of(problem, lane) } else { None };
    let order = tile.map_or(Order::Rows, |tile| Order::Tiles(tile.count(rows)));
    prepare(problem, order, &mut params, outputs, lane)?;
    if rows * outs == 0 {
        return Ok(());
    }
    if let Some(tile) = tile {
        return tile.launch(problem, &params, lane);
    }
    let of_rows = if rows == 1 { 1 } else { 4 };
    let busy = WARPS * lane.device().facts().multiprocessors as usize;
    let of_outs = if outs * rows.div_ceil(of_rows) >= 4 * busy { 4 } else { 1 };
    let options = format!(
        "{} -DFORM={} -DALIGNED={} -DOUTS={of_outs} -DROWS={of_rows} -DWARPS={WARPS} -DFN={}",
        types(dtype),
        form as usize,
        usize::from(aligned),
        function(problem.options.activation)
    );
    let kernel = lane.device().kernel(&PRODUCT, &options)?;
    // SAFETY: as for tiles; activations that are given as planes come from no early kernel, so those products are not
    // early.
    let kernel = if form == Form::I8 { unsafe { kernel.early() } } else { kernel };
    let grid = grid_size(outs.div_ceil(WARPS * of_outs))?;
    // The y size of a grid is limited to 65535.
    const MOST: usize = 32768;
    let widths = [n as u64, outs as u64, params.stride as u64, plane_bytes(n) as u64];
    for first in (0..rows).step_by(MOST * of_rows) {
        let (some, skipped) = ((rows - first).min(MOST * of_rows), first as u64);
        let skip = |at: u64, bytes: u64| if at == 0 { 0 } else { at + skipped * bytes };
        let part = Params {
            x: skip(params.x, widths[0] * dtype.size() as u64),
            x_planes: params.x_planes.map(|at| skip(at, widths[3])),
            bits: skip(params.bits, widths[2]),
            totals: skip(params.totals, 4),
            x_scale: skip(params.x_scale, 4),
            acc: skip(params.acc, 4 * widths[1]),
            y: skip(params.y, widths[1] * dtype.size() as u64),
            rows: some as i64,
            ..params
        };
        let grid = [grid, some.div_ceil(of_rows) as u32, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
        unsafe { lane.launch(&kernel, grid, 32 * WARPS as u32, &part)? };
    }
    Ok(())
}

/// The constants that `counts.cu` is compiled with: rows of activations per block, groups of 16 rows of weights, and
/// chunks in flight.
struct Counts {
    rows: usize,
    sides: usize,
    stages: usize,
    /// Whether two blocks fit on a multiprocessor, so that one fetches weights while another is still working.
    ahead: bool,
}

impl Counts {
    /// For few rows of bytes or many of signs, where tensor cores count bits and shared memory holds the activations.
    fn of(problem: &Product, lane: &Lane) -> Option<Counts> {
        let facts = lane.device().facts();
        let processors = facts.multiprocessors as usize;
        let most = match problem.form {
            Form::I8 if (1..=FEW).contains(&problem.rows) => problem.rows.next_power_of_two(),
            Form::Ternary if problem.rows > FEW => 8 * eights(problem.rows),
            _ => return None,
        };
        // Devices of other generations count bits one after the other. The y size of a grid is limited to 65535.
        if !matches!(facts.capability.0, 8 | 9) || problem.outs == 0 || problem.rows > 8 * 65535 {
            return None;
        }
        let sides = [1, 2].into_iter().find(|sides| problem.outs <= 16 * sides * processors).unwrap_or(4);
        let fits = |rows: usize| {
            let blocks = problem.outs.div_ceil(16 * sides) * problem.rows.div_ceil(rows);
            let steps = problem.n.div_ceil(CHUNK).div_ceil(COUNTING / sides).max(1);
            // With more blocks than multiprocessors, two run on each, if registers allow it.
            let most = steps.min(if blocks > processors && matches!(rows, 1 | 8) { 2 } else { 6 });
            let find = |least, ahead, room| {
                let counts = |stages| Counts { rows, sides, stages, ahead };
                (least..=most).rev().map(counts).find(|counts| counts.shared(problem) + 128 <= room)
            };
            let room = facts.shared as usize;
            let alone = || find(1, false, room);
            // The device reserves 1 KiB of shared memory per block.
            let beside = || find(steps.min(3), true, (room + 1024) / 2 - 1024);
            // A kernel can begin early only from capability 9 on.
            let early = facts.capability.0 == 9 && rows == 1 && blocks <= processors;
            if early { beside().or_else(alone) } else { alone() }
        };
        match problem.form {
            Form::I8 => fits(most),
            _ => [32, 16, 8].into_iter().filter(|&rows| rows <= most).find_map(fits),
        }
    }

    /// Bytes of shared memory: chunks of weights, and rows of bits, each an odd number of chunks long.
    fn shared(&self, problem: &Product) -> usize {
        let bits = if problem.form == Form::I8 { 8 } else { 2 };
        self.stages * COUNTING * 32 * 64 + bits * self.rows * (problem.n.div_ceil(CHUNK) | 1) * (CHUNK / 8)
    }

    fn run(self, problem: &Product, params: &mut Params, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let Product { rows, outs, dtype, form, .. } = *problem;
        if form == Form::I8 {
            (params.q, params.x_scales) = (at(outputs, "xq", lane)?, at(outputs, "x_scale", lane)?);
            params.floor = problem.activations().floor;
        } else {
            prepare(problem, Order::Rows, params, outputs, lane)?;
        }
        let options = format!(
            "{} -DFORM={} -DROWS={} -DSIDES={} -DSTAGES={} -DAHEAD={} -DWARPS={COUNTING} -DCHUNK={CHUNK} \
             -DFN={}",
            types(dtype),
            form as usize,
            self.rows,
            self.sides,
            self.stages,
            usize::from(self.ahead),
            function(problem.options.activation)
        );
        // SAFETY: the kernel waits before it accesses anything but weights, which it only reads.
        let kernel = unsafe { lane.device().kernel(&COUNTS, &options)?.early() };
        let busy = if self.ahead { lane.device().facts().multiprocessors } else { 0 };
        let grid = [grid_size(outs.div_ceil(16 * self.sides))?.max(busy), rows.div_ceil(self.rows) as u32, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
        unsafe { lane.launch_with(&kernel, grid, 32 * COUNTING as u32, self.shared(problem) as u32, params) }
    }
}

/// The constants that `tile.cu` is compiled with: warps side by side, groups of 8 rows of activations, groups of such
/// warps, blocks of a cluster, and stages. Stages are the chunks in flight and the current one.
#[derive(Clone, Copy)]
struct Tile {
    sides: usize,
    rows: usize,
    groups: usize,
    cluster: usize,
    stages: usize,
}

impl Tile {
    /// A tile for many rows of bytes, where tensor cores multiply them.
    fn of(problem: &Product, lane: &Lane) -> Option<Tile> {
        let facts = lane.device().facts();
        let rows = eights(problem.rows);
        // The y size of a grid is limited to 65535.
        let few = problem.rows <= FEW || problem.rows.div_ceil(8 * rows) > 65535;
        if problem.form != Form::I8 || facts.capability.0 < 8 || few {
            return None;
        }
        let sides = if problem.outs >= 128 * facts.multiprocessors as usize { 4 } else { 2 };
        let of = |sides| Tile { sides, rows, groups: WARPS / sides, cluster: 1, stages: 0 }.staged(problem, lane);
        of(sides).or_else(|| of(4))
    }

    /// Sets the largest number of stages that fits: 2 to 5, and no more than a group's chunks plus one.
    fn staged(self, problem: &Product, lane: &Lane) -> Option<Tile> {
        let turns = problem.n.div_ceil(CHUNK).div_ceil(self.groups * self.cluster);
        let fits = |tile: &Tile| tile.shared() <= lane.device().facts().shared as usize;
        (2..=(turns + 1).clamp(2, 5)).rev().map(|stages| Tile { stages, ..self }).find(fits)
    }

    /// A tile for clusters whose blocks share the columns, and so read less of x each, if all of them finish as early.
    fn clustered(self, problem: &Product, lane: &Lane) -> Result<Option<(Tile, Kernel<Params>)>> {
        let all = lane.device().facts().multiprocessors as usize;
        let alone = self.sides_of(problem.outs).div_ceil(all) * self.sides;
        if self.count(problem.rows) > self.rows {
            return Ok(None);
        }
        for (sides, cluster) in [(8, 8), (8, 4), (4, 2)] {
            let tile = Tile { sides, groups: WARPS / sides, cluster, ..self };
            let blocks = tile.sides_of(problem.outs);
            let empty = problem.n.div_ceil(CHUNK) <= cluster / 2;
            let Some(tile) = tile.staged(problem, lane).filter(|_| !empty && (cluster < 8 || 8 * blocks <= all)) else {
                continue;
            };
            let kernel = tile.kernel(problem, lane)?;
            let at_once = lane.device().clusters(&kernel, cluster as u32, tile.size())?;
            let together = blocks.div_ceil(at_once.max(1)) * sides / cluster;
            if at_once > 0 && together <= alone - usize::from(cluster == 8) {
                return Ok(Some((tile, kernel)));
            }
        }
        Ok(None)
    }

    fn shared(&self) -> usize {
        self.groups * self.stages * 8 * self.rows * CHUNK
    }

    /// Threads and bytes of shared memory of a block.
    fn size(&self) -> [u32; 2] {
        [32 * WARPS as u32, self.shared() as u32]
    }

    /// Rows of activations in units of 8, padded to whole tiles.
    fn count(&self, rows: usize) -> usize {
        rows.next_multiple_of(8 * self.rows) / 8
    }

    /// Blocks, or clusters, that cover all rows of weights.
    fn sides_of(&self, outs: usize) -> usize {
        outs.div_ceil(32 * self.sides)
    }

    fn kernel(&self, problem: &Product, lane: &Lane) -> Result<Kernel<Params>> {
        let Tile { sides, rows, groups, cluster, stages } = *self;
        let (form, function) = (problem.form as usize, function(problem.options.activation));
        let options = format!(
            "{} -DFORM={form} -DSIDES={sides} -DNT={rows} -DGROUPS={groups} -DCLUSTER={cluster} -DSTAGES={stages} \
             -DCHUNK={CHUNK} -DFN={function}",
            types(problem.dtype),
        );
        // SAFETY: the kernel waits before it accesses anything but weights, which it only reads.
        Ok(unsafe { lane.device().kernel(&TILE, &options)?.early() })
    }

    fn launch(&self, problem: &Product, params: &Params, lane: &Lane) -> Result<()> {
        if let Some((tile, kernel)) = self.clustered(problem, lane)? {
            let (cluster, blocks) = (tile.cluster, grid_size(tile.cluster * tile.sides_of(problem.outs))?);
            // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
            return unsafe {
                lane.launch_together(&kernel, Together::Cluster(cluster as u32), blocks, tile.size(), params)
            };
        }
        let (kernel, [threads, shared]) = (self.kernel(problem, lane)?, self.size());
        let grid = [grid_size(self.sides_of(problem.outs))?, (self.count(problem.rows) / self.rows) as u32, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
        unsafe { lane.launch_with(&kernel, grid, threads, shared, params) }
    }
}

/// The order of activation bytes that products expect, as in `rules.cu` and `parts.cu`.
#[derive(Clone, Copy)]
enum Order {
    Rows,
    /// This number of tiles of 8 rows.
    Tiles(usize),
    /// Matrices of groups of this number of eights of rows.
    Matrices(usize),
}

/// Prepares activations for the products, in scratch memory.
fn prepare(problem: &Product, order: Order, params: &mut Params, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Product { rows, n, dtype, .. } = *problem;
    match problem.form {
        Form::Ternary if !problem.planes => {
            let plane = (rows * plane_bytes(n)).next_multiple_of(256);
            let scratch = lane.scratch(2 * plane)?;
            params.x_planes = [scratch, scratch + plane as u64];
            let rules = Rules { x: params.x, rows: rows as i64, n: n as i64, parts: 1, ..Rules::default() };
            cut(&Rules { planes: params.x_planes, ..rules }, dtype, lane)
        }
        Form::I8 => make_bits(problem, order, params, outputs, lane),
        _ => Ok(()),
    }
}

/// Quantizes activations to bytes, in the order that products expect.
fn make_bits(
    problem: &Product,
    order: Order,
    params: &mut Params,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let Product { rows, n, .. } = *problem;
    // Rows are padded to four words of 32 cells, which are read at once.
    let (unit, all, [tiles, eights]) = match order {
        Order::Rows => (128, rows, [0, 0]),
        Order::Tiles(tiles) => (CHUNK, rows.max(8 * tiles), [tiles, 0]),
        Order::Matrices(eights) => (CHUNK, rows.next_multiple_of(8 * eights), [0, eights]),
    };
    let stride = n.next_multiple_of(unit);
    let (bits, numbers) = ((all * stride).next_multiple_of(256), (rows * 4).next_multiple_of(256));
    let scratch = lane.scratch(bits + 2 * numbers)?;
    let totals = scratch + bits as u64;
    params.bits = scratch;
    params.totals = totals;
    params.stride = stride as i64;
    params.x_scale = match outputs.find("x_scale") {
        Some(scales) => lane.address(scales)?,
        None => totals + numbers as u64,
    };
    let [tiles, eights] = [tiles, eights].map(|count| count as i64);
    let rules = Rules {
        x: params.x,
        scales: params.x_scale,
        q: at(outputs, "xq", lane)?,
        bits: params.bits,
        totals: params.totals,
        rows: rows as i64,
        n: n as i64,
        stride: stride as i64,
        tiles,
        eights,
        floor: problem.activations().floor,
        ..Rules::default()
    };
    launch_bits(problem.dtype, all, &rules, lane)
}

fn launch_bits(dtype: DType, rows: usize, rules: &Rules, lane: &Lane) -> Result<()> {
    if rules.rows == 0 {
        return Ok(());
    }
    let source = if rules.eights > 0 { &PARTS } else { &BITS };
    // SAFETY: the kernel waits before it accesses memory that other kernels use.
    let kernel = unsafe { lane.device().kernel(source, &self::rules(dtype))?.early() };
    // SAFETY: scratch has room for all rows.
    unsafe {
        if rules.eights == 0 {
            return lane.launch(&kernel, [grid_size(rows)?, 1, 1], WIDE, rules);
        }
        let parts = (rules.stride as usize).div_ceil(8 * THREADS as usize).next_power_of_two().min(MOST_PARTS);
        let (cluster, blocks) = (Together::Cluster(parts as u32), grid_size(rows * parts)?);
        lane.launch_together(&kernel, cluster, blocks, [THREADS, 0], &Rules { parts: parts as i64, ..*rules })
    }
}

params! {
    /// The parameters of `sums.cu`.
    #[derive(Default)]
    struct Sums {
        a: [u64; 2] as "const unsigned char*",
        b: [u64; 2] as "const unsigned char*",
        acc: u64 as "const int*",
        columns: u64 as "const int*",
        xq: u64 as "const signed char*",
        x: u64 as "const STORAGE*",
        to: u64 as "int*",
        difference: u64 as "i64*",
        bad: u64 as "unsigned long long*",
        rows: i64,
        n: i64,
        outs: i64,
        bytes: i64,
        part: i64,
    }
}

/// Queues `threads` threads.
fn each(source: &Source<Sums>, threads: usize, params: &Sums, dtype: DType, lane: &Lane) -> Result<()> {
    let kernel = lane.device().kernel(source, &types(dtype))?;
    // SAFETY: the ops' checks prove that all sizes fit the buffers.
    unsafe { launch_each(lane, &kernel, threads, params) }
}

/// Products of rows of planes.
pub fn dot(problem: &Pairs, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let of = |name| at(inputs, name, lane);
    let params = Sums {
        a: [of("a0")?, of("a1")?],
        b: [of("b0")?, of("b1")?],
        to: at(outputs, "dot", lane)?,
        rows: problem.rows as i64,
        bytes: problem.bytes as i64,
        ..Sums::default()
    };
    each(&DOT, problem.rows * 32, &params, DType::F32, lane)
}

/// Sums of columns.
pub fn column_sums(problem: &Weights, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Weights { rows, n } = *problem;
    let to = *outputs.get("column_sums")?;
    lane.fill(to, 0)?;
    if rows * n == 0 {
        return Ok(());
    }
    // The y size of a grid is limited to 65535.
    let part = rows.div_ceil(32768).max(PART.min(rows));
    let params = Sums {
        a: [at(inputs, "plane0", lane)?, at(inputs, "plane1", lane)?],
        to: lane.address(to)?,
        rows: rows as i64,
        n: n as i64,
        bytes: plane_bytes(n) as i64,
        part: part as i64,
        ..Sums::default()
    };
    let kernel = lane.device().kernel(&COLUMNS, &types(DType::F32))?;
    let grid = [grid_size(n.div_ceil(THREADS as usize))?, rows.div_ceil(part) as u32, 1];
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}

/// Verifies sums, then reads back whether they are right.
pub fn verify_sums(problem: &Proof, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let found = Found::new(lane)?;
    let difference = *outputs.get("difference")?;
    let params = Sums {
        acc: at(inputs, "acc", lane)?,
        columns: at(inputs, "column_sums", lane)?,
        xq: at(inputs, "xq", lane)?,
        difference: lane.address(difference)?,
        bad: lane.address(&found.0)?,
        rows: problem.rows as i64,
        n: problem.n as i64,
        outs: problem.outs as i64,
        ..Sums::default()
    };
    each(&PROOF, problem.rows * 32, &params, DType::F32, lane)?;
    match found.read(lane)? {
        Some(row) => Err(problem.refuse(row, lane.downloaded(difference)?.view().slice::<i64>()?[row])),
        None => Ok(()),
    }
}

/// The index of the largest element of each row.
pub fn argmax(problem: &Rows, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let rows = problem.shape.elements() / problem.n;
    let params = Sums {
        x: at(inputs, "x", lane)?,
        to: at(outputs, "class", lane)?,
        rows: rows as i64,
        n: problem.n as i64,
        ..Sums::default()
    };
    each(&ARGMAX, rows, &params, problem.dtype, lane)
}
