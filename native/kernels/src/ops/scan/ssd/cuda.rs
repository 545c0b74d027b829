//! The scan on CUDA: in chunks on tensor cores where storage and sizes allow, else as a selective scan.

mod chunks;
mod spread;

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
use chunks::{Chunks, Gradient};

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match Chunks::new(problem, inputs, outputs, lane)? {
        Some(chunks) => chunks.forward(),
        None => spread::forward(problem, inputs, outputs, lane),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match Gradient::new(problem, inputs, outputs, lane)? {
        Some(gradient) => gradient.backward(),
        None => spread::backward(problem, inputs, outputs, lane),
    }
}
