//! Prepares rows of x for the products, in scratch memory.

use super::{COLUMNS, types_and_format};
use crate::cuda::{Lane, Source, grid_size, params};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::text;

const ROWS: Source<Rows> = Source::new("blocks_rows", text!(["early"], "blocks/ready", "blocks/order", "blocks/rows"));

/// Blocks of a row that a block of threads prepares.
const SHARE: usize = 64;

/// Threads of a block that prepares rows, each with parts of `turns` blocks.
pub fn ready_threads(turns: usize) -> u32 {
    (4 * SHARE / turns) as u32
}

params! {
    /// The parameters of `rows.cu`.
    struct Rows {
        x: u64 as "const STORAGE*",
        ready: u64 as "unsigned char*",
        rows: i64,
        blocks: i64,
        given: i64, // blocks of a row of x; blocks after these are zeros
        offset: i32, // excess of weights over their values
    }
}

/// Queues the kernel that prepares rows of x in scratch memory, and returns their address. There are `padded` rows of
/// `blocks` blocks and `bytes` bytes each, prepared by threads that have parts of `turns` blocks each.
pub fn make_ready(
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
        "{} -DCOLUMNS={COLUMNS} -DSHARE={SHARE} -DTURNS={turns} {options}",
        types_and_format(problem.x.dtype, format)
    );
    // SAFETY: the kernel waits before it accesses memory.
    let kernel = unsafe { lane.device().kernel(&ROWS, &options)?.early() };
    // SAFETY: scratch has room for `padded` rows.
    unsafe { lane.launch(&kernel, grid, ready_threads(turns), &params)? };
    Ok(ready)
}
