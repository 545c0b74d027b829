//! The recurrence on CUDA: a thread for each channel. Where these are too few to fill the device, time is cut into
//! chunks.

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;

const SCAN: Source<Params> = Source::new("linear_scan", include_str!("scan.cu"));

/// Threads that keep a multiprocessor busy, as each of them does little work.
const BUSY: usize = 1024;

/// The fewest steps of a chunk: the last states of chunks cost an additional pass over the inputs.
const SHORTEST_CHUNK: usize = 32;

/// The most chunks: each thread composes the last states of all chunks before its own.
const MOST_CHUNKS: usize = 128;

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params {
        a: u64 as "const STORAGE*",
        b: u64 as "const STORAGE*",
        h: u64 as "const STORAGE*",
        dh: u64 as "const STORAGE*",
        initial_state: u64 as "const REAL*",
        dlast_state: u64 as "const REAL*",
        to: u64 as "STORAGE*",
        da: u64 as "STORAGE*",
        db: u64 as "STORAGE*",
        last_state: u64 as "REAL*",
        dinitial_state: u64 as "REAL*",
        // For each chunk the product of its a, and its last state from an initial state of zero, (chunks, B, K).
        products: u64 as "REAL*",
        ends: u64 as "REAL*",
        batch: i64,
        length: i64,
        channels: i64,
        chunk: i64,
        chunks: i64,
    }
}

/// Queues the recurrence.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    run(problem, inputs, outputs, lane, 0)
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    run(problem, inputs, outputs, lane, 1)
}

fn run(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane, backward: u32) -> Result<()> {
    let Problem { batch, length, channels, dtype, .. } = *problem;
    let rows = batch * channels;
    if rows == 0 {
        return Ok(());
    }
    let busy = BUSY * lane.device().facts().multiprocessors as usize;
    let wanted = (busy / rows).min(length / SHORTEST_CHUNK).clamp(1, MOST_CHUNKS);
    let chunk = length.div_ceil(wanted).max(1);
    let chunks = length.div_ceil(chunk).max(1);
    let half = rows * chunks * dtype.wide().size();
    let scratch = if chunks > 1 { lane.scratch(2 * half)? } else { 0 };
    let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
    let params = Params {
        a: at(inputs, "a")?,
        b: at(inputs, "b")?,
        h: at(inputs, "h")?,
        dh: at(inputs, "dh")?,
        initial_state: at(inputs, "initial_state")?,
        dlast_state: at(inputs, "dlast_state")?,
        to: at(outputs, "h")?,
        da: at(outputs, "da")?,
        db: at(outputs, "db")?,
        last_state: at(outputs, "last_state")?,
        dinitial_state: at(outputs, "dinitial_state")?,
        products: scratch,
        ends: scratch + half as u64,
        batch: batch as i64,
        length: length as i64,
        channels: channels as i64,
        chunk: chunk as i64,
        chunks: chunks as i64,
    };
    for ends in if chunks > 1 { &[1, 0][..] } else { &[0] } {
        let options = format!("{} -DBACKWARD={backward} -DENDS={ends}", types(dtype));
        let kernel = lane.device().kernel(&SCAN, &options)?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, as is the
        // scratch memory.
        unsafe { launch_each(lane, &kernel, rows * chunks, &params)? };
    }
    Ok(())
}
