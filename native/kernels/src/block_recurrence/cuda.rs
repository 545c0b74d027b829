//! The recurrence on CUDA.

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::Named;

/// Queues the recurrence.
pub fn forward(_: &Problem, _: &Named<&Buffer>, _: &Named<&Buffer>, _: &Lane) -> Result<()> {
    Err(Error::new(Kind::Unavailable, "backend").expected("cpu").got("cuda"))
}

/// Queues the gradient.
pub fn backward(_: &Problem, _: &Named<&Buffer>, _: &Named<&Buffer>, _: &Lane) -> Result<()> {
    Err(Error::new(Kind::Unavailable, "backend").expected("cpu").got("cuda"))
}
