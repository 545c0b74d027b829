//! The scan on CUDA: in chunks on tensor cores where storage and sizes allow, else as a selective scan.

mod chunks;
mod spread;

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::sequences::Sequences;
use chunks::{Chunks, Gradient};
use std::ops::Range;

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match Chunks::new(problem, of_batch(problem), inputs, outputs, lane)? {
        Some(chunks) => chunks.forward(),
        None => spread::forward(problem, inputs, outputs, lane),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match Gradient::new(problem, of_batch(problem), inputs, outputs, lane)? {
        Some(gradient) => gradient.backward(),
        None => spread::backward(problem, inputs, outputs, lane),
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
    let chunks = Chunks::new(problem, Sequences::Packed(steps), inputs, outputs, lane)?;
    chunks.map_or(Ok(false), |chunks| chunks.forward().map(|()| true))
}

/// Queues the gradient of a packed call, if it runs in chunks.
pub fn backward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    let gradient = Gradient::new(problem, Sequences::Packed(steps), inputs, outputs, lane)?;
    gradient.map_or(Ok(false), |gradient| gradient.backward().map(|()| true))
}
