//! Column sums that verify integer results. Let `c[j] = sum of W[i, j] over i`, stored with the weights. Then every
//! product `y = W x` satisfies `sum of y[i] = sum of c[j] x[j]`, exactly.

use super::problem::{HINT, Proof, Weights, plane_bytes, split_last, wrong};
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

pub use super::problem::CellOptions as Options;

/// The column sums of weights in planes.
pub struct ColumnSumsTernary;

impl Op for ColumnSumsTernary {
    const NAME: &'static str = "column_sums_ternary";
    const ABOUT: &'static str = "Sums of the columns of ternary weights in planes, to prove products by";
    const INPUTS: &'static [Slot] =
        &[Slot::new("plane0", "(O, P)").exactly(DType::U8), Slot::new("plane1", "(O, P)").exactly(DType::U8)];
    const HINT: &'static str = HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Weights;

    fn check(call: &Bound<Self>) -> Result<Weights> {
        let [rows, bytes] = call.sizes.all("OP");
        let n = call.options.n.unwrap_or(bytes * 8);
        if plane_bytes(n) != bytes || rows > i32::MAX as usize {
            return Err(Error::new(Kind::Option, "n").expected(format_args!("cells of {bytes} bytes")).got(n));
        }
        Ok(Weights { rows, n })
    }

    fn outputs(problem: &Weights, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("column_sums", Spec::new(DType::I32, &[problem.n])?)].into_iter().collect())
    }

    crate::forward_by_kernels!(cpu::sums::column_sums, reference::column_sums, cuda::column_sums);
}

/// Verifies a product's sums.
pub struct VerifySumsTernary;

impl Op for VerifySumsTernary {
    const NAME: &'static str = "verify_sums_ternary";
    const ABOUT: &'static str = "Proves sums of a product by those of the weights' columns; an error if they differ";
    const INPUTS: &'static [Slot] = &[
        Slot::new("acc", "(..., O)").exactly(DType::I32).loose(),
        Slot::new("column_sums", "(I)").exactly(DType::I32).loose(),
        Slot::new("xq", "(..., I)").exactly(DType::I8),
    ];
    /// `difference` is 0 for a correct product.
    const OUTPUTS: &'static [Output] = &[Output::new("difference", "(...)").exactly(DType::I64)];
    const HINT: &'static str = HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = op::NoOptions;
    type Problem = Proof;

    fn check(call: &Bound<Self>) -> Result<Proof> {
        // Sizes come from xq alone. The other inputs are checked against them, so that errors name those.
        let (leading, n) = (call.sizes.rows(), call.sizes.of('I'));
        let acc = call.inputs.get("acc")?;
        let (of_acc, outs) = split_last("acc", "(..., O)", acc)?;
        if of_acc != leading {
            return Err(wrong("acc", "that of xq with O in place of I", acc));
        }
        op::same_shape(call.inputs, "column_sums", &[n])?;
        Ok(Proof { leading: leading.to_vec(), rows: leading.iter().product(), n, outs })
    }

    fn cpu(problem: &Proof, inputs: &Named<View>, mut outputs: Named<ViewMut>, _: &crate::cpu::Exec) -> Result<()> {
        let (acc, columns) = (inputs.get("acc")?.slice::<i32>()?, inputs.get("column_sums")?.slice::<i32>()?);
        let (xq, to) = (inputs.get("xq")?.slice::<i8>()?, outputs.expect("difference")?.slice::<i64>()?);
        for (row, to) in to.iter_mut().enumerate() {
            let sum: i64 = acc[row * problem.outs..][..problem.outs].iter().map(|&v| i64::from(v)).sum();
            let x = xq[row * problem.n..][..problem.n].iter().map(|&x| i64::from(x));
            *to = sum - x.zip(columns).map(|(x, &c)| x * i64::from(c)).sum::<i64>();
        }
        match to.iter().position(|&difference| difference != 0) {
            Some(row) => Err(problem.refuse(row, to[row])),
            None => Ok(()),
        }
    }

    fn reference(problem: &Proof, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::verify_sums(problem, inputs)
    }

    fn cuda(problem: &Proof, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::verify_sums(problem, inputs, outputs, lane)
    }
}
