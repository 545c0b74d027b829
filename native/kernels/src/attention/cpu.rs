//! Attention on the CPU.

use super::{Problem, reference};
use crate::cpu::Exec;
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};

/// Computes attention on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, _: &Exec) -> Result<()> {
    let mut results = reference::forward(problem, &inputs.map(View::to_f64))?;
    outputs.into_iter().try_for_each(|(name, output)| Ok(output.store_f64(&results.expect(&name)?)))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, _: &Exec) -> Result<()> {
    let mut results = reference::backward(problem, &inputs.map(View::to_f64))?;
    outputs.into_iter().try_for_each(|(name, output)| Ok(output.store_f64(&results.expect(&name)?)))
}
