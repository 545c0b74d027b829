//! Quantizes rows of floats to blocks, and back.

use super::format::Format;
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

const FORMAT: OptionDoc = OptionDoc { name: "format", takes: "text", help: "q8_0 or q4_0; q8_0 by default" };

/// Options of the quantizer.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuantizeOptions {
    /// The format; Q8_0 by default.
    pub format: Format,
    /// Stores infinite scales for values that are not finite or too large, in place of an error.
    pub unchecked: bool,
}

/// Options of the conversion back to floats.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DequantizeOptions {
    /// The format; Q8_0 by default.
    pub format: Format,
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
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., N)")];
    const STORAGE: &'static [DType] = super::STORAGE;
    const OPTIONS: &'static [OptionDoc] = &[
        FORMAT,
        OptionDoc {
            name: "unchecked",
            takes: "flag",
            help: "store infinite scales, as ggml does, in place of an error",
        },
    ];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = QuantizeOptions;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &QuantizeOptions) -> Result<Problem> {
        let (&x, QuantizeOptions { format, unchecked }) = (inputs.get("x")?, *options);
        Ok(Problem { x, q: Spec { dtype: DType::U8, shape: format.quantized("x", &x)? }, format, unchecked })
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
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

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
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
    const INPUTS: &'static [Slot] = &[Slot::new("q", "(..., Q)").exactly(DType::U8)];
    const OPTIONS: &'static [OptionDoc] = &[FORMAT];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = DequantizeOptions;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &DequantizeOptions) -> Result<Problem> {
        Dequantize::problem("q", inputs.get("q")?, options.format)
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
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

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        Ok([("x", reference::dequantize(problem, inputs.get("q")?))].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::dequantize(problem.format, inputs.get("q")?, outputs.get("x")?, lane)
    }
}

impl Problem {
    /// The quantizer's checked call for rows of this spec.
    pub fn quantizer(x: &Spec, format: Format) -> Result<Problem> {
        Quantize::check(&[("x", *x)].into_iter().collect(), &QuantizeOptions { format, unchecked: false })
    }
}
