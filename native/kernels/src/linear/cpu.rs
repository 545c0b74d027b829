//! The dense layer on the CPU: matrix products of f32 or f64 by [`matrix`], with 16-bit storage widened
//! before and rounded after. All levels run the same code, which asks the CPU itself.

use super::Problem;
use crate::cpu::convert::{rounded, widened};
use crate::cpu::matrix::{Matrix, multiply};
use crate::cpu::{Exec, Storage, sum};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;

/// Computes the layer on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let x = widened::<S>(inputs.get("x")?.slice()?, exec)?;
    let w = widened::<S>(inputs.get("w")?.slice()?, exec)?;
    let b = inputs.find("b").map(|b| widened::<S>(b.slice()?, exec)).transpose()?;
    let x = Matrix::new(&x, problem.rows, problem.inputs);
    let w = Matrix::new(&w, problem.outputs, problem.inputs);
    rounded::<S>(outputs.expect("y")?.slice()?, exec, |y| {
        if let Some(b) = &b {
            y.chunks_exact_mut(b.len().max(1)).for_each(|row| row.copy_from_slice(b));
        }
        multiply(x, w.transposed(), y, b.is_some(), exec)
    })
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = inputs.get("dy")?.slice::<S>()?;
    let x = widened::<S>(inputs.get("x")?.slice()?, exec)?;
    let w = widened::<S>(inputs.get("w")?.slice()?, exec)?;
    let dy = widened::<S>(given, exec)?;
    let x = Matrix::new(&x, problem.rows, problem.inputs);
    let w = Matrix::new(&w, problem.outputs, problem.inputs);
    let dy = Matrix::new(&dy, problem.rows, problem.outputs);
    rounded::<S>(outputs.expect("dx")?.slice()?, exec, |dx| multiply(dy, w, dx, false, exec))?;
    rounded::<S>(outputs.expect("dw")?.slice()?, exec, |dw| multiply(dy.transposed(), x, dw, false, exec))?;
    match outputs.take("db") {
        Some(db) => rounded::<S>(db.slice()?, exec, |db| sum::columns::<S>(given, db, exec)),
        None => Ok(()),
    }
}
