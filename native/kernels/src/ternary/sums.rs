//! Column sums that verify integer results. Let `c[j] = sum of W[i, j] over i`, stored beside the weights. Then every
//! product `y = W x` satisfies `sum of y[i] = sum of c[j] x[j]`, exactly.

use super::{cpu, cuda, plane, plane_bytes, reference, wrong};
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Cells of a row; by default all that the planes have room for.
    pub n: Option<usize>,
}

/// Weights in planes.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Rows.
    pub rows: usize,
    /// Cells of a row.
    pub n: usize,
}

/// The column sums of weights in planes.
pub struct ColumnSumsTernary;

impl Op for ColumnSumsTernary {
    const NAME: &'static str = "column_sums_ternary";
    const ABOUT: &'static str = "Sums of the columns of ternary weights in planes, to prove products by";
    const INPUTS: &'static [Slot] = &[plane("plane0", "(O, P)"), plane("plane1", "(O, P)")];
    const STORAGE: &'static [DType] = super::STORAGE;
    const OPTIONS: &'static [OptionDoc] = &[super::layouts::N];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Weights;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Weights> {
        let plane = inputs.get("plane0")?;
        let &[rows, bytes] = &plane.shape[..] else { return Err(wrong("plane0", "(O, P)", plane)) };
        op::same_shape(inputs, "plane1", &plane.shape)?;
        let n = options.n.unwrap_or(bytes * 8);
        if plane_bytes(n) != bytes || rows > i32::MAX as usize {
            return Err(Error::new(Kind::Option, "n").expected(format_args!("cells of {bytes} bytes")).got(n));
        }
        Ok(Weights { rows, n })
    }

    fn outputs(problem: &Weights) -> Result<Named<Spec>> {
        Ok([("column_sums", Spec::new(DType::I32, &[problem.n])?)].into_iter().collect())
    }

    fn cpu(problem: &Weights, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::products::column_sums(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Weights, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::column_sums(problem, inputs)
    }

    fn cuda(problem: &Weights, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::column_sums(problem, inputs, outputs, lane)
    }
}

/// A checked proof.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Columns of x.
    pub n: usize,
    /// Columns of the product.
    pub outs: usize,
}

impl Proof {
    /// The error for a row whose sums differ.
    pub fn refuse(&self, row: usize, difference: i64) -> Error {
        Error::new(Kind::Argument, "acc")
            .expected("sums that are those of the columns by x")
            .got(format_args!("a difference of {difference} in row {row}"))
            .hint("The weights, the column sums or the result are damaged, or are not of each other")
    }
}

/// Verifies a product's sums.
pub struct VerifySumsTernary;

impl Op for VerifySumsTernary {
    const NAME: &'static str = "verify_sums_ternary";
    const ABOUT: &'static str = "Proves sums of a product by those of the weights' columns; an error if they differ";
    const INPUTS: &'static [Slot] = &[
        Slot::new("acc", "(..., O)").exactly(DType::I32),
        Slot::new("column_sums", "(I)").exactly(DType::I32),
        Slot::new("xq", "(..., I)").exactly(DType::I8),
    ];
    const STORAGE: &'static [DType] = super::STORAGE;
    const OPTIONS: &'static [OptionDoc] = &[];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = super::rules::NoOptions;
    type Problem = Proof;

    fn check(inputs: &Named<Spec>, _: &Self::Options) -> Result<Proof> {
        let (acc, xq) = (inputs.get("acc")?, inputs.get("xq")?);
        let (leading, n) = super::split_last("xq", "(..., I)", xq)?;
        let (of_acc, outs) = super::split_last("acc", "(..., O)", acc)?;
        if of_acc != leading {
            return Err(wrong("acc", "that of xq with O in place of I", acc));
        }
        op::same_shape(inputs, "column_sums", &[n])?;
        Ok(Proof { leading: leading.to_vec(), rows: leading.iter().product(), n, outs })
    }

    /// The differences, 0 where there is no error.
    fn outputs(problem: &Proof) -> Result<Named<Spec>> {
        Ok([("difference", Spec::new(DType::I64, &problem.leading)?)].into_iter().collect())
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

    fn reference(problem: &Proof, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::verify_sums(problem, inputs)
    }

    fn cuda(problem: &Proof, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::verify_sums(problem, inputs, outputs, lane)
    }
}
