//! The reference: f64, one loop per axis, in the form of the formula.

use super::Problem;
use crate::error::Result;
use crate::op::Named;
use crate::ops::activations;
use ndarray::{Array2, ArrayD, ArrayView2};

/// A tensor as a matrix with all of its rows.
fn matrix(tensor: &ArrayD<f64>, rows: usize, columns: usize) -> ArrayView2<'_, f64> {
    tensor.view().into_shape_with_order((rows, columns)).expect("checked sizes in order")
}

fn shaped(matrix: Array2<f64>, dims: &[usize]) -> ArrayD<f64> {
    matrix.into_shape_with_order(dims).expect("as many elements")
}

/// The sums `z`.
fn sums(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Array2<f64>> {
    let (x, w) = (matrix(inputs.get("x")?, problem.rows, problem.inputs), inputs.get("w")?);
    let mut z = Array2::zeros((problem.rows, problem.outputs));
    for row in 0..problem.rows {
        for o in 0..problem.outputs {
            z[[row, o]] = inputs.find("b").map_or(0.0, |b| b[o]);
            for i in 0..problem.inputs {
                z[[row, o]] += x[[row, i]] * w[[o, i]];
            }
        }
    }
    Ok(z)
}

/// The layer: `y`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let y = sums(problem, inputs)?.mapv(|z| problem.activation.map_or(z, |f| activations::value(f, z)));
    Ok([("y", shaped(y, &problem.y()?))].into_iter().collect())
}

/// The gradients `dx`, `dw` and `db`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (x, w) = (matrix(inputs.get("x")?, problem.rows, problem.inputs), inputs.get("w")?);
    let slopes = sums(problem, inputs)?.mapv(|z| problem.activation.map_or(1.0, |f| activations::slope(f, z)));
    let dz = slopes * matrix(inputs.get("dy")?, problem.rows, problem.outputs);
    let mut dx = Array2::zeros((problem.rows, problem.inputs));
    let (mut dw, mut db) = (ArrayD::zeros(w.shape()), ArrayD::zeros(&[problem.outputs][..]));
    for row in 0..problem.rows {
        for o in 0..problem.outputs {
            for i in 0..problem.inputs {
                dx[[row, i]] += dz[[row, o]] * w[[o, i]];
                dw[[o, i]] += dz[[row, o]] * x[[row, i]];
            }
            db[o] += dz[[row, o]];
        }
    }
    Ok([("dx", shaped(dx, &problem.x)), ("dw", dw), ("db", db)].into_iter().collect())
}
