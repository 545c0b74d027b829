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

use super::encode::decode;
use super::problem::{ActivationOptions, Activations, Quantization};
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::place::Place;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

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

    crate::forward_by_kernels!(cpu::quantize::planes, reference::quantize, cuda::quantize);
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
        // It may be 0 in f32 where it is not in f64.
        let floor = call.options.amax_floor as f32;
        op::Range::positive.check("amax_floor", &f64::from(floor))?;
        Ok(Activations { leading: leading.to_vec(), rows: leading.iter().product(), n, floor, dtype: call.storage })
    }

    crate::forward_by_kernels!(cpu::quantize::activations, reference::activations, cuda::activations);
}

/// The outputs of [`TernaryQuantize`]: names of the values and of the scale, if any, and the rule.
const ALL_RULES: [(&str, Option<&str>, Options); 5] = [
    ("q_t0", None, Options { rule: Rule::Threshold, threshold: Some(0.0), per_row: false }),
    ("q_t03", None, Options { rule: Rule::Threshold, threshold: Some(0.3), per_row: false }),
    (
        "q_absmean_tensor",
        Some("scale_absmean_tensor"),
        Options { rule: Rule::Absmean, threshold: None, per_row: false },
    ),
    ("q_absmean_row", Some("scale_absmean_row"), Options { rule: Rule::Absmean, threshold: None, per_row: true }),
    ("q_twn", Some("scale_twn"), Options { rule: Rule::Twn, threshold: None, per_row: false }),
];

/// Quantizes a tensor by every rule, for comparison.
pub struct TernaryQuantize;

impl Op for TernaryQuantize {
    const NAME: &'static str = "ternary_quantize";
    const ABOUT: &'static str = "Floats to ternary numbers by every rule: thresholds 0 and 0.3, absmean, twn";
    const INPUTS: &'static [Slot] = &[Slot::new("w", "(..., N)")];
    const HINT: &'static str = super::problem::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = op::NoOptions;
    type Problem = Quantization;

    fn check(call: &Bound<Self>) -> Result<Quantization> {
        Quantization::new(call.sizes.rows(), call.sizes.of('N'), &Options::default(), call.storage)
    }

    fn outputs(problem: &Quantization, _: &Bound<Self>) -> Result<Named<Spec>> {
        let q = Spec::new(DType::I8, &[&problem.leading[..], &[problem.n]].concat())?;
        let mut outputs = Named::default();
        for (name, scale, options) in ALL_RULES {
            outputs.push(name, q);
            let problem = Quantization { options, ..problem.clone() };
            if let Some(scale) = scale {
                outputs.push(scale, Spec::new(DType::F32, &[problem.scales()])?);
            }
        }
        Ok(outputs)
    }

    super::by_steps!();
}

fn steps<'a, P: Place>(
    place: &P,
    problem: &Quantization,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let w = inputs.get("w")?;
    for (name, scale, options) in ALL_RULES {
        let problem = Quantization { options, ..problem.clone() };
        let mut planes = [place.empty(problem.plane()?)?, place.empty(problem.plane()?)?];
        let mut alone = place.empty(Spec::new(DType::F32, &[problem.scales()])?)?;
        let [plane0, plane1] = planes.each_mut().map(P::view_mut);
        let to = match scale {
            Some(scale) => P::briefly_mut(outputs.expect(scale)?),
            None => P::view_mut(&mut alone),
        };
        let made = [("plane0", plane0), ("plane1", plane1), ("scale", to)].into_iter().collect();
        place.call::<QuantizeTernary>(&options, [("w", P::briefly(w))].into_iter().collect(), made)?;
        decode(place, &planes, problem.n, outputs.expect(name)?)?;
    }
    Ok(())
}
