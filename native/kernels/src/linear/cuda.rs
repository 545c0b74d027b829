//! The dense layer on CUDA: matrix products by cuBLAS, and the bias added before the one rounding.

use super::Problem;
use crate::cuda::{Buffer, Lane, Matrix, add_row, columns};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Described, Spec};

/// Queues the layer.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let (y, b, dtype) = (outputs.get("y")?, inputs.find("b"), problem.dtype);
    let wide = match b {
        Some(_) if dtype != dtype.wide() => Some(lane.temporary(Spec { dtype: dtype.wide(), ..y.spec() })?),
        _ => None,
    };
    let product = wide.as_ref().unwrap_or(y);
    let x = Matrix::new(lane.address(inputs.get("x")?)?, problem.rows, problem.inputs);
    let w = Matrix::new(lane.address(inputs.get("w")?)?, problem.outputs, problem.inputs);
    let to = Matrix::new(lane.address(product)?, problem.rows, problem.outputs);
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { lane.multiply([dtype, product.spec().dtype], [x, w.transposed(), to])? };
    match b {
        Some(b) => add_row(product, b, y, lane),
        None => Ok(()),
    }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Problem { rows, dtype, .. } = *problem;
    let of = |buffer: &Buffer, rows, columns| Ok(Matrix::new(lane.address(buffer)?, rows, columns));
    let x = of(inputs.get("x")?, rows, problem.inputs)?;
    let w = of(inputs.get("w")?, problem.outputs, problem.inputs)?;
    let dy = of(inputs.get("dy")?, rows, problem.outputs)?;
    let dx = of(outputs.get("dx")?, rows, problem.inputs)?;
    let dw = of(outputs.get("dw")?, problem.outputs, problem.inputs)?;
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe {
        lane.multiply([dtype; 2], [dy, w, dx])?;
        lane.multiply([dtype; 2], [dy.transposed(), x, dw])?;
    }
    match outputs.find("db") {
        Some(db) => columns(inputs.get("dy")?, rows, db, lane),
        None => Ok(()),
    }
}
