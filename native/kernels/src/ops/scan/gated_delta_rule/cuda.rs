//! The recurrence on CUDA: the kernels of [`matrix_state`](crate::ops::scan::matrix_state).

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state::cuda::Call;
use std::ops::Range;

pub use crate::ops::scan::matrix_state::cuda::{backward, backward_packed};

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    Call::new(problem, inputs, outputs, lane)?.forward()
}

/// Queues a packed call, if it runs in chunks.
pub fn forward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    Call::new(problem, inputs, outputs, lane)?.forward_packed(steps)
}
