//! Quantizes floats to ternary numbers, and to bytes. Comparisons are strict and in f32, so NaN gives 0:
//!
//! ```text
//! q = 1 if w > t, -1 if w < -t, else 0            w ~ s q
//! threshold   t given                             s = 1
//! absmean     t = s / 2                           s = max(mean |w|, 1e-5)          (BitNet b1.58; Ma et al. 2024)
//! twn         t = 0.7 mean |w|                    s = mean |w| where |w| > t       (Li and Liu 2016)
//! ```
//!
//! Means are summed in f64 and rounded to f32, over the tensor or per row; NaN and infinity propagate. Activations of 8
//! bits are symmetric with one scale per row, and must be finite:
//!
//! ```text
//! a = max(max |x|, amax_floor)        q = round(x 127 / a), halves to even        x ~ q a / 127
//! ```

use super::problem::{ActivationOptions, Activations, Quantization};
use super::{cpu, cuda, reference};
use crate::chunks::Chunks;
use crate::cpu::Exec;
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};

pub use super::problem::{Rule, RuleOptions as Options};

/// Quantizes floats to planes and scales.
pub struct QuantizeTernary;

impl Op for QuantizeTernary {
    const NAME: &'static str = "quantize_ternary";
    const ABOUT: &'static str = "Floats to planes of ternary numbers and their scale";
    const INPUTS: &'static [Slot] = &[Slot::new("w", "(..., N)")];
    const HINT: &'static str = super::problem::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Quantization;

    fn check(call: &Bound<Self>) -> Result<Quantization> {
        Quantization::new(call.sizes.rows(), call.sizes.of('N'), call.options, call.storage)
    }

    fn outputs(problem: &Quantization, _: &Bound<Self>) -> Result<Named<Spec>> {
        let plane = problem.plane()?;
        let scale = Spec::new(DType::F32, &[problem.scales()])?;
        Ok([("plane0", plane), ("plane1", plane), ("scale", scale)].into_iter().collect())
    }

    fn parts(problem: &Quantization) -> usize {
        problem.parts()
    }

    fn cpu_in_chunks(
        problem: &Quantization,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &Exec,
        chunks: Chunks,
    ) -> Result<()> {
        cpu::quantize::planes(problem, inputs, outputs, exec, chunks)
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) { cpu::quantize::planes(problem, inputs, outputs, exec, Chunks::WHOLE) }
        reference(problem, inputs, _) { reference::quantize(problem, inputs) }
        cuda(problem, inputs, outputs, lane) { cuda::quantize(problem, inputs, outputs, lane) }
    }
}

/// Quantizes activations to 8 bits.
pub struct ActivationI8;

impl Op for ActivationI8 {
    const NAME: &'static str = "activation_i8";
    const ABOUT: &'static str = "Activations to 8 bits, each row with its own scale";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., I)")];
    const OUTPUTS: &'static [Output] =
        &[Output::new("q", "(..., I)").exactly(DType::I8), Output::new("scale", "(...)").exactly(DType::F32)];
    const HINT: &'static str = super::problem::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = ActivationOptions;
    type Problem = Activations;

    fn check(call: &Bound<Self>) -> Result<Activations> {
        let (leading, n) = (call.sizes.rows(), call.sizes.of('I'));
        // The floor may be 0 in f32 where it is not in f64.
        let floor = call.options.amax_floor as f32;
        op::Range::positive.check("amax_floor", &f64::from(floor))?;
        Ok(Activations { leading: leading.to_vec(), rows: leading.iter().product(), n, floor, dtype: call.storage })
    }

    crate::forward_by_kernels!(cpu::quantize::activations, reference::activations, cuda::activations);
}
