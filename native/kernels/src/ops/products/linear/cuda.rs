//! The dense layer on CUDA: matrix products by cuBLASLt. Bias and activation are applied before the single rounding: in
//! the epilogue of the product if cuBLASLt supports that, otherwise in a kernel after it.

use super::Problem;
use crate::cuda::{Buffer, Epilogue, Lane, Matrix, Source, columns, function, grid_size, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Described, Shape, Spec};

const EPILOGUE: Source<Params> = Source::new(
    "linear_epilogue",
    concat!(include_str!("../../../cuda/include/activation.cu"), include_str!("epilogue.cu")),
);

params! {
    /// The kernel's parameters.
    struct Params {
        sums: u64 as "const REAL*",
        b: u64 as "const STORAGE*",
        dy: u64 as "const STORAGE*",
        to: u64 as "STORAGE*",
        rows: i64,
        columns: i64,
    }
}

/// Queues the layer.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let (y, dtype) = (outputs.get("y")?, problem.dtype);
    let bias = inputs.find("b").map(|b| lane.address(b)).transpose()?;
    let then = Epilogue { bias, activation: problem.activation, add: false };
    if then == Epilogue::default() {
        return sums(problem, inputs, y, lane);
    }
    // SAFETY: the op's checks prove that the buffers have these sizes.
    if unsafe { lane.multiply_then([dtype; 2], matrices(problem, inputs, y, lane)?, then)? } {
        return Ok(());
    }
    if dtype == dtype.wide() {
        sums(problem, inputs, y, lane)?;
        return epilogue(problem, inputs, y, y, lane);
    }
    let wide = lane.temporary(Spec { dtype: dtype.wide(), ..y.spec() })?;
    sums(problem, inputs, &wide, lane)?;
    epilogue(problem, inputs, &wide, y, lane)
}

/// Queues the product without the bias, in the type of `to`.
fn sums(problem: &Problem, inputs: &Named<&Buffer>, to: &Buffer, lane: &Lane) -> Result<()> {
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { lane.multiply([problem.dtype, to.spec().dtype], matrices(problem, inputs, to, lane)?) }
}

/// The factors and the result.
fn matrices(problem: &Problem, inputs: &Named<&Buffer>, to: &Buffer, lane: &Lane) -> Result<[Matrix; 3]> {
    let x = Matrix::new(lane.address(inputs.get("x")?)?, problem.rows, problem.inputs);
    let w = Matrix::new(lane.address(inputs.get("w")?)?, problem.outputs, problem.inputs);
    Ok([x, w.transposed(), Matrix::new(lane.address(to)?, problem.rows, problem.outputs)])
}

/// Queues bias and activation; with a `dy` the gradient of the activation.
fn epilogue(problem: &Problem, inputs: &Named<&Buffer>, sums: &Buffer, to: &Buffer, lane: &Lane) -> Result<()> {
    let Problem { rows, outputs: columns, .. } = *problem;
    if rows * columns == 0 {
        return Ok(());
    }
    let address = |buffer: Option<&&Buffer>| buffer.map_or(Ok(0), |buffer| lane.address(buffer));
    let (b, dy) = (address(inputs.find("b"))?, address(inputs.find("dy"))?);
    let options =
        format!("{} -DFN={} -DGRADIENT={}", types(problem.dtype), function(problem.activation), u32::from(dy != 0));
    let kernel = lane.device().kernel(&EPILOGUE, &options)?;
    let (threads, most_rows) = (128, 8192);
    let params =
        Params { sums: lane.address(sums)?, b, dy, to: lane.address(to)?, rows: rows as i64, columns: columns as i64 };
    let grid = [grid_size(columns.div_ceil(threads))?, rows.min(most_rows) as u32, 1];
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { lane.launch(&kernel, grid, threads as u32, &params) }
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    if problem.activation.is_none() {
        return through_product(problem, inputs, inputs.get("dy")?, outputs, lane);
    }
    let of = |dtype| Ok(Spec { dtype, shape: Shape::new(&[problem.rows, problem.outputs])? });
    let wide = lane.temporary(of(problem.dtype.wide())?)?;
    let dz = lane.temporary(of(problem.dtype)?)?;
    sums(problem, inputs, &wide, lane)?;
    epilogue(problem, inputs, &wide, &dz, lane)?;
    through_product(problem, inputs, &dz, outputs, lane)
}

fn through_product(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    dz: &Buffer,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let Problem { rows, dtype, .. } = *problem;
    let of = |buffer: &Buffer, rows, columns| Ok(Matrix::new(lane.address(buffer)?, rows, columns));
    let x = of(inputs.get("x")?, rows, problem.inputs)?;
    let w = of(inputs.get("w")?, problem.outputs, problem.inputs)?;
    let by_row = of(dz, rows, problem.outputs)?;
    let dx = of(outputs.get("dx")?, rows, problem.inputs)?;
    let dw = of(outputs.get("dw")?, problem.outputs, problem.inputs)?;
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe {
        lane.multiply([dtype; 2], [by_row, w, dx])?;
        lane.multiply([dtype; 2], [by_row.transposed(), x, dw])?;
    }
    match outputs.find("db") {
        Some(db) => columns(dz, rows, db, lane),
        None => Ok(()),
    }
}
