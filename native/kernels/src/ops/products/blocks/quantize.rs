//! Quantizes rows of floats to blocks, and back.

use super::format::Format;
use super::problem::Conversion;
use super::{cpu, cuda, reference};
use crate::chunks::Chunks;
use crate::cpu::Exec;
use crate::error::Result;
use crate::op::{Bound, Named, Op, Slot, named};
use crate::options;
use crate::tensor::{DType, Spec, View, ViewMut};

options! {
    /// Options of the quantizer.
    #[derive(Copy)]
    pub struct QuantizeOptions {
        /// format of the blocks
        format: Format = Format::Q8;
        /// store infinite scales, as ggml does, instead of failing
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

/// Quantizes rows of floats to blocks.
pub struct Quantize;

impl Op for Quantize {
    const NAME: &'static str = "quantize";
    const ABOUT: &'static str = "Rows of floats to blocks of 8 or 4 bits a value, ggml's Q8_0 or Q4_0";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., N)").loose()];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = QuantizeOptions;
    type Problem = Conversion;

    fn check(call: &Bound<Self>) -> Result<Conversion> {
        let (inputs, options) = (call.inputs, call.options);
        let (&x, QuantizeOptions { format, unchecked }) = (inputs.get("x")?, *options);
        Ok(Conversion { x, q: Spec { dtype: DType::U8, shape: format.quantized(&x)? }, format, unchecked })
    }

    fn outputs(problem: &Conversion, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("q", problem.q)].into_iter().collect())
    }

    fn parts(problem: &Conversion) -> usize {
        problem.x.shape.elements()
    }

    fn cpu_in_chunks(
        problem: &Conversion,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &Exec,
        chunks: Chunks,
    ) -> Result<()> {
        cpu::quantize(problem, inputs.get("x")?, outputs.expect("q")?, exec, chunks)
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) { Self::cpu_in_chunks(problem, inputs, outputs, exec, Chunks::WHOLE) }
        reference(problem, inputs, _) { Ok(named([("q", Some(reference::quantize(problem, inputs.get("x")?)?))])) }
        cuda(problem, inputs, outputs, lane) { cuda::quantize(problem, inputs.get("x")?, outputs.get("q")?, lane) }
    }
}

/// Converts blocks to rows of floats.
pub struct Dequantize;

impl Op for Dequantize {
    const NAME: &'static str = "dequantize";
    const ABOUT: &'static str = "Blocks of Q8_0 or Q4_0 to rows of f32";
    const INPUTS: &'static [Slot] = &[Slot::new("q", "(..., Q)").exactly(DType::U8).loose()];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = DequantizeOptions;
    type Problem = Conversion;

    fn check(call: &Bound<Self>) -> Result<Conversion> {
        let (&q, format) = (call.inputs.get("q")?, call.options.format);
        let x = Spec { dtype: DType::F32, shape: format.values("q", &q)? };
        Ok(Conversion { x, q, format, unchecked: true })
    }

    fn outputs(problem: &Conversion, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("x", problem.x)].into_iter().collect())
    }

    fn parts(problem: &Conversion) -> usize {
        problem.x.shape.elements()
    }

    fn cpu_in_chunks(
        problem: &Conversion,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &Exec,
        chunks: Chunks,
    ) -> Result<()> {
        cpu::dequantize(problem.format, inputs.get("q")?, outputs.expect("x")?, exec, chunks)
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) { Self::cpu_in_chunks(problem, inputs, outputs, exec, Chunks::WHOLE) }
        reference(problem, inputs, _) { Ok(named([("x", Some(reference::dequantize(problem, inputs.get("q")?)))])) }
        cuda(problem, inputs, outputs, lane) {
            cuda::dequantize(problem.format, inputs.get("q")?, outputs.get("x")?, lane)
        }
    }
}
