//! Conversions between layouts, and counts.

use super::Found;
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::cuda::{constant, constants, text};
use crate::ops::products::ternary::grid::{Conversion, Grid, Layout, OnSentinel};
use crate::tensor::DType;
use std::sync::LazyLock;

const CELLS: Source<Cells> = Source::new("ternary_cells", text!([], "ternary/cells"));

/// The numbers of layouts as compiler options, and that of no layout.
static LAYOUTS: LazyLock<String> =
    LazyLock::new(|| format!("{} -DCOUNTS={}", constants(&Layout::ALL), Layout::ALL.len()));

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

/// Queues `threads` threads that convert, or count values where there is no layout to convert to.
fn cells(from: &Grid, to: Option<Layout>, threads: usize, params: &Cells, lane: &Lane) -> Result<()> {
    let (from, to) = (constant(from.layout), to.map_or("COUNTS".to_string(), constant));
    let options = format!("{} {} -DFROM={from} -DTO={to}", types(DType::F32), *LAYOUTS);
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
    cells(from, Some(to.layout), threads, &params, lane)?;
    if *on_sentinel != OnSentinel::Error {
        return Ok(());
    }
    match Found(first.clone()).read(lane)? {
        Some(at) => Err(from.refuse(lane.downloaded(count)?.view().slice::<i32>()?[0] as usize, at)),
        None => Ok(()),
    }
}

/// Queues the counts of values and sentinels.
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
    cells(grid, None, grid.rows * grid.n.div_ceil(8), &params, lane)
}
