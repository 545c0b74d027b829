//! Quantizes rows of floats to blocks, and back.

use super::format::Format;
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

options! {
    /// Options of the quantizer.
    #[derive(Copy)]
    pub struct QuantizeOptions {
        /// format of the blocks
        format: Format = Format::Q8;
        /// store infinite scales, as ggml does, in place of an error
        unchecked: bool = false;
    }
}

options! {
    /// Options of the conversion back to floats.
    #[derive(Copy)]
    pub struct DequantizeOptions {
        /// format of the blocks
        format: Format = Format::Q8;
    }
}

/// A checked call of either op.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of the floats.
    pub x: Spec,
    /// Type and shape of the bytes.
    pub q: Spec,
    /// The format.
    pub format: Format,
    /// Whether scales may be infinite.
    pub unchecked: bool,
}

/// Quantizes rows of floats to blocks.
pub struct Quantize;

impl Op for Quantize {
    const NAME: &'static str = "quantize";
    const ABOUT: &'static str = "Rows of floats to blocks of 8 or 4 bits a value, ggml's Q8_0 or Q4_0";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., N)").loose()];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = QuantizeOptions;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let (&x, QuantizeOptions { format, unchecked }) = (inputs.get("x")?, *options);
        Ok(Problem { x, q: Spec { dtype: DType::U8, shape: format.quantized("x", &x)? }, format, unchecked })
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("q", problem.q)].into_iter().collect())
    }

    fn cpu(
        problem: &Problem,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::quantize(problem, inputs.get("x")?, outputs.expect("q")?, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        Ok([("q", reference::quantize(problem, inputs.get("x")?)?)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::quantize(problem, inputs.get("x")?, outputs.get("q")?, lane)
    }
}

/// Converts blocks to rows of floats.
pub struct Dequantize;

impl Dequantize {
    /// The checked call for bytes of this spec.
    pub fn problem(name: &str, q: &Spec, format: Format) -> Result<Problem> {
        let x = Spec { dtype: DType::F32, shape: format.values(name, q)? };
        Ok(Problem { x, q: *q, format, unchecked: true })
    }
}

impl Op for Dequantize {
    const NAME: &'static str = "dequantize";
    const ABOUT: &'static str = "Blocks of Q8_0 or Q4_0 to rows of f32";
    const INPUTS: &'static [Slot] = &[Slot::new("q", "(..., Q)").exactly(DType::U8).loose()];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = DequantizeOptions;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        Dequantize::problem("q", inputs.get("q")?, options.format)
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("x", problem.x)].into_iter().collect())
    }

    fn cpu(
        problem: &Problem,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::dequantize(problem.format, inputs.get("q")?, outputs.expect("x")?, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        Ok([("x", reference::dequantize(problem, inputs.get("q")?))].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::dequantize(problem.format, inputs.get("q")?, outputs.get("x")?, lane)
    }
}

impl Problem {
    /// The quantizer's checked call for rows of this spec.
    pub fn quantizer(x: &Spec, format: Format) -> Result<Problem> {
        let options = QuantizeOptions { format, unchecked: false };
        Ok(op::part::<Quantize>(&[("x", *x)].into_iter().collect(), &options)?.0)
    }
}
