//! The scan on CUDA: in chunks on tensor cores where storage and sizes allow, else as a selective scan.

mod chunks;
mod spread;

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
pub use spread::backward;

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    match chunks::Chunks::new(problem, inputs, outputs, lane)? {
        Some(chunks) => chunks.forward(),
        None => spread::forward(problem, inputs, outputs, lane),
    }
}
