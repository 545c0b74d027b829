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

use super::{cpu, cuda, plane_bytes, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::ops::products::ternary::encode::decode;
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::{Deserialize, Serialize};

/// The rule that makes ternary numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// By a given threshold.
    Threshold,
    /// The threshold is half the mean magnitude.
    #[default]
    Absmean,
    /// The threshold is 0.7 of the mean magnitude.
    Twn,
}

/// The lower limit of absmean's scale.
pub const LEAST_SCALE: f64 = 1e-5;

/// Twn's threshold as a fraction of the mean.
pub const TWN: f32 = 0.7;

options! {
    /// The options.
    #[derive(Copy)]
    pub struct Options {
        /// how the threshold is chosen
        rule: Rule = Rule::Absmean;
        /// the rule threshold's: of greater size is 1 or -1
        threshold: Option<f64> = None;
        /// whether each row has its own mean; by default the tensor has one
        per_row: bool = false;
    }
}

impl Options {
    /// Checks that a threshold is given exactly where the rule needs one.
    pub fn checked(&self) -> Result<Options> {
        let threshold = |got: String| Error::new(Kind::Option, "threshold").got(got);
        match (self.rule, self.threshold) {
            (Rule::Threshold, Some(value)) if value >= 0.0 && value.is_finite() => Ok(*self),
            (Rule::Threshold, Some(value)) => Err(threshold(value.to_string()).expected("0 or more")),
            (Rule::Threshold, None) => Err(threshold("none".into()).expected("a number, which this rule needs")),
            (_, Some(value)) => {
                Err(threshold(value.to_string()).expected("none").hint("Only the rule \"threshold\" has one"))
            }
            (_, None) => Ok(*self),
        }
    }
}

/// A checked quantization.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Cells of a row.
    pub n: usize,
    /// The rule.
    pub options: Options,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    /// The quantization of rows of `n` numbers. The axes before the last have the sizes `leading`.
    pub fn new(leading: &[usize], n: usize, options: &Options, dtype: DType) -> Result<Problem> {
        let (rows, leading) = (leading.iter().product(), leading.to_vec());
        Ok(Problem { leading, rows, n, options: options.checked()?, dtype })
    }

    /// Number of scales.
    pub fn scales(&self) -> usize {
        if self.options.per_row { self.rows } else { 1 }
    }

    /// The shape of a plane.
    pub fn plane(&self) -> Result<Spec> {
        Spec::new(DType::U8, &[&self.leading[..], &[plane_bytes(self.n)]].concat())
    }
}

/// Quantizes floats to planes and scales.
pub struct QuantizeTernary;

impl Op for QuantizeTernary {
    const NAME: &'static str = "quantize_ternary";
    const ABOUT: &'static str = "Floats to planes of ternary numbers and their scale";
    const INPUTS: &'static [Slot] = &[Slot::new("w", "(..., N)")];
    const HINT: &'static str = super::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call.sizes.rows(), call.sizes.of('N'), call.options, call.storage)
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let plane = problem.plane()?;
        let scale = Spec::new(DType::F32, &[problem.scales()])?;
        Ok([("plane0", plane), ("plane1", plane), ("scale", scale)].into_iter().collect())
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::quantize::planes(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::quantize(problem, inputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::quantize(problem, inputs, outputs, lane)
    }
}

options! {
    /// The options of activations of 8 bits.
    #[derive(Copy)]
    pub struct ActivationOptions {
        /// what the largest size of a row counts as at least
        amax_floor: f64 = 1e-5;
    }
}

/// A checked quantization of activations.
#[derive(Clone, Debug)]
pub struct Activations {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Lower limit for the largest magnitude of a row.
    pub floor: f32,
    /// The storage type.
    pub dtype: DType,
}

impl Activations {
    /// The error for a value that is not finite.
    pub fn refuse(&self, at: usize, value: f32) -> Error {
        let (row, column) = (at / self.n.max(1), at % self.n.max(1));
        Error::new(Kind::Argument, "x")
            .expected("finite numbers")
            .got(format_args!("{value} in row {row} at {column}"))
            .hint("What is not finite has no 8 bits: look for it where x comes from")
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
    const HINT: &'static str = super::HINT;
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

    fn cpu(
        problem: &Activations,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::quantize::activations(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Activations, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::activations(problem, inputs)
    }

    fn cuda(problem: &Activations, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::activations(problem, inputs, outputs, lane)
    }
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
    const HINT: &'static str = super::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = op::NoOptions;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call.sizes.rows(), call.sizes.of('N'), &Options::default(), call.storage)
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let q = Spec::new(DType::I8, &[&problem.leading[..], &[problem.n]].concat())?;
        let mut outputs = Named::default();
        for (name, scale, options) in ALL_RULES {
            outputs.push(name, q);
            let problem = Problem { options, ..problem.clone() };
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
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let w = inputs.get("w")?;
    for (name, scale, options) in ALL_RULES {
        let problem = Problem { options, ..problem.clone() };
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
