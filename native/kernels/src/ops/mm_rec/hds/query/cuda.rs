//! Top-k search down the hierarchy on CUDA: a block processes one query at a time.

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, grid_size, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::mm_rec::hds::{MOST_LEVELS, cuda::unrounded};

const QUERY: Source<Params> = Source::new("hds_query", include_str!("query.cu"));

/// Threads per block.
const THREADS: u32 = 256;

/// Resident blocks per multiprocessor.
const BLOCKS: usize = 8;

/// Limit for the bytes of all scores, unless a single block needs more.
const MOST_SCORES: usize = 256 << 20;

params! {
    /// The kernel's parameters.
    struct Params {
        q: u64 as "const STORAGE*",
        k: u64 as "const STORAGE*",
        v: u64 as "const STORAGE*",
        above: [u64; MOST_LEVELS] as "const REAL*", // by level; unused for the bank
        sizes: [i64; MOST_LEVELS],
        context: u64 as "STORAGE*",
        slots: u64 as "int*",
        scores: u64 as "REAL*", // (blocks, most)
        kept: u64 as "int*", // (blocks, 2, top_k)
        queries: i64,
        length: i64,
        width: i64,
        levels: i64,
        ratio: i64,
        top_k: i64,
        most: i64,
        shared: i64,
        scale: f64,
    }
}

/// Queues the search and the attention.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let levels = &problem.levels;
    let queries = problem.batch * problem.length;
    if queries == 0 {
        return Ok(());
    }
    let made = unrounded(levels, problem.dtype, inputs.get("k")?, lane)?;
    let (mut above, mut sizes) = ([0; MOST_LEVELS], [0; MOST_LEVELS]);
    for (level, buffer) in made.iter().enumerate() {
        above[level + 1] = lane.address(buffer)?;
    }
    for (to, &size) in sizes.iter_mut().zip(&levels.sizes) {
        *to = size as i64;
    }
    let counts = problem.candidates();
    let most = counts.iter().copied().max().unwrap_or(0);
    // No level keeps more slots than it has candidates.
    let top_k = problem.top_k.min(most);
    let of_block = most * problem.dtype.wide().size();
    let busy = BLOCKS * lane.device().facts().multiprocessors as usize;
    let blocks = queries.min(busy).min((MOST_SCORES / of_block.max(1)).max(1));
    let scores = (blocks * of_block).next_multiple_of(8);
    let scratch = lane.scratch(scores + blocks * 2 * top_k * size_of::<i32>())?;
    let params = Params {
        q: lane.address(inputs.get("q")?)?,
        k: lane.address(inputs.get("k")?)?,
        v: lane.address(inputs.get("v")?)?,
        above,
        sizes,
        context: lane.address(outputs.get("context")?)?,
        slots: lane.address(outputs.get("slots")?)?,
        scores: scratch,
        kept: scratch + scores as u64,
        queries: queries as i64,
        length: problem.length as i64,
        width: levels.width as i64,
        levels: levels.sizes.len() as i64,
        ratio: problem.ratio as i64,
        top_k: top_k as i64,
        most: most as i64,
        shared: i64::from(levels.batch == 1),
        scale: problem.scale(),
    };
    let options = format!("{} -DTHREADS={THREADS} -DMOST_LEVELS={MOST_LEVELS}", types(problem.dtype));
    let kernel = lane.device().kernel(&QUERY, &options)?;
    // SAFETY: the op's checks prove that the buffers have these sizes, and each block has scratch memory of its own.
    unsafe { lane.launch(&kernel, [grid_size(blocks)?, 1, 1], THREADS, &params) }
}
