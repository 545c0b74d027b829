//! The scan on CUDA: in chunks on tensor cores where storage and sizes allow, else as a selective scan.

mod chunks;
mod narrow;
mod spread;

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::sequences::Sequences;
use chunks::{Chunks, Gradient};
use narrow::Narrow;
use std::ops::Range;

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match in_chunks(chunked, problem, of_batch(problem), inputs, outputs, lane)? {
        true => Ok(()),
        false => spread::forward(problem, inputs, outputs, lane),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match in_chunks(gradient, problem, of_batch(problem), inputs, outputs, lane)? {
        true => Ok(()),
        false => spread::backward(problem, inputs, outputs, lane),
    }
}

fn of_batch(problem: &Problem) -> Sequences<'static> {
    Sequences::Batch { count: problem.batch, length: problem.length }
}

/// Queues a packed call, if it runs in chunks.
pub fn forward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    in_chunks(chunked, problem, Sequences::Packed(steps), inputs, outputs, lane)
}

/// Queues the gradient of a packed call, if it runs in chunks.
pub fn backward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    in_chunks(gradient, problem, Sequences::Packed(steps), inputs, outputs, lane)
}

/// Queues a call for heads as wide as the kernels over chunks take; `false` where they do not support it.
type Way = fn(&Problem, Sequences, &Named<&Buffer>, &Named<&Buffer>, &Lane) -> Result<bool>;

fn chunked(
    problem: &Problem,
    sequences: Sequences,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<bool> {
    let chunks = Chunks::new(problem, sequences, inputs, outputs, lane)?;
    chunks.map_or(Ok(false), |chunks| chunks.forward().map(|()| true))
}

fn gradient(
    problem: &Problem,
    sequences: Sequences,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<bool> {
    let gradient = Gradient::new(problem, sequences, inputs, outputs, lane)?;
    gradient.map_or(Ok(false), |gradient| gradient.backward().map(|()| true))
}

/// Queues a call for heads of any width, if it runs in chunks.
fn in_chunks(
    way: Way,
    problem: &Problem,
    sequences: Sequences,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<bool> {
    let Some(narrow) = Narrow::new(problem, inputs, outputs, lane)? else {
        return way(problem, sequences, inputs, outputs, lane);
    };
    let queued = way(&narrow.problem, sequences, &narrow.inputs.as_ref(), &narrow.outputs.as_ref(), lane)?;
    if queued {
        narrow.finish(lane)?;
    }
    Ok(queued)
}
