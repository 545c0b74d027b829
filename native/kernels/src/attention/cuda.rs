//! Attention on CUDA.

use super::Problem;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::Named;

/// Queues attention.
pub fn forward(_: &Problem, _: &Named<&Buffer>, _: &Named<&Buffer>, _: &Lane) -> Result<()> {
    Err(Error::new(Kind::Unavailable, "attention").got("not yet"))
}

/// Queues the gradient.
pub fn backward(_: &Problem, _: &Named<&Buffer>, _: &Named<&Buffer>, _: &Lane) -> Result<()> {
    Err(Error::new(Kind::Unavailable, "attention").got("not yet"))
}
