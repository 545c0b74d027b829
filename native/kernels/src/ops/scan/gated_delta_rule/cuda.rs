//! The recurrence on CUDA: the kernels of [`matrix_state`](crate::ops::scan::matrix_state).

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::matrix_state::cuda::Call;

pub use crate::ops::scan::matrix_state::cuda::backward;

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    Call::new(problem, inputs, outputs, lane)?.forward()
}
