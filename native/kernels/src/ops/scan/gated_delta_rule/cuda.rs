//! The recurrence on CUDA: the kernels of [`matrix_state`](crate::ops::scan::matrix_state).

pub use crate::ops::scan::matrix_state::cuda::{backward, backward_packed, forward, forward_packed};
