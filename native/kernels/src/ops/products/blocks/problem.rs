//! Checked calls, which kernels and references read.

use super::format::{Format, with_last};
use crate::base::activation::Activation;
use crate::error::Result;
use crate::op::{self, Named};
use crate::options;
use crate::tensor::{Shape, Spec};

/// A checked quantization of rows, or conversion back.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// Type and shape of the floats.
    pub x: Spec,
    /// Type and shape of the bytes.
    pub q: Spec,
    /// The format.
    pub format: Format,
    /// Whether scales may be infinite.
    pub unchecked: bool,
}

options! {
    /// The options of the products.
    pub struct Options {
        ..crate::ops::products::activation;
    }
}

/// The properties in which the products differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factors {
    /// The format of the weights.
    pub weights: Format,
    /// Whether x is quantized to Q8_0 first, or multiplied as floats.
    pub quantized: bool,
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// Rows of `x`: all its axes but the last.
    pub rows: usize,
    /// Columns of `x`, `I` in the shapes.
    pub inputs: usize,
    /// Columns of `y`, `O`.
    pub outputs: usize,
    /// The form of x and the format of the weights.
    pub factors: Factors,
    /// The activation applied to the sums.
    pub activation: Option<Activation>,
}

impl Problem {
    /// Checks the product of x and the weights.
    pub fn new(factors: Factors, inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (&x, w) = (inputs.get("x")?, inputs.get("w")?);
        factors.weights.quantized(&x)?;
        let (&columns, rows) = x.shape.split_last().expect("rows of blocks");
        let outputs = match w.shape[..] {
            [outputs, bytes] if bytes == factors.weights.row_bytes(columns) => outputs,
            _ => return Err(wrong_weights(factors.weights, columns, w)),
        };
        op::same_shape(inputs, "b", &[outputs])?;
        let (rows, activation) = (rows.iter().product(), options.activation);
        Ok(Problem { x, rows, inputs: columns, outputs, factors, activation })
    }

    /// The shape of `y`: that of `x` with another last axis.
    pub fn y(&self) -> Result<Shape> {
        with_last(&self.x.shape, self.outputs)
    }
}

fn wrong_weights(format: Format, columns: usize, got: &Spec) -> crate::error::Error {
    let bytes = format.row_bytes(columns);
    op::wrong_shape("w", &format!("(O, {bytes})"), got).hint(format_args!(
        "{columns} values of {} take {bytes} bytes; weights are stored (out, in), in blocks along `in`",
        format.name()
    ))
}
