//! The dense layer that quantizes its weights by a rule in each call, `y = x (s q)^T + bias`.

use super::problem::{Form, Options as Ends, Quantization, RuleOptions};
use super::products::{F32, I8, Matmul, Ternary};
use super::rules::QuantizeTernary;
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    #[derive(Copy)]
    pub struct Options {
        ..super::problem::rule;
        /// representation of x in the product
        activations: Form = Form::I8;
        ..crate::ops::products::activation;
    }
}

impl Options {
    fn rules(&self) -> RuleOptions {
        RuleOptions { rule: self.rule, threshold: self.threshold, per_row: self.per_row }
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The sizes of the axes of x before the last.
    leading: Vec<usize>,
    weights: Quantization,
    options: Options,
}

/// The layer.
pub struct TernaryLinear;

impl Op for TernaryLinear {
    const NAME: &'static str = "ternary_linear";
    const ABOUT: &'static str = "Dense layer of float weights that a rule makes ternary";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(..., I)"),
        Slot::new("w", "(O, I)"),
        Slot::new("bias", "(O)").exactly(DType::F32).optional(),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(..., O)")];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [outs, n] = call.sizes.all("OI");
        let weights = Quantization::new(&[outs], n, &call.options.rules(), call.storage)?;
        Ok(Problem { leading: call.sizes.rows().to_vec(), weights, options: *call.options })
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        op::product(&[problem.leading.iter().product(), op::elements(inputs, &["w"])])
    }

    crate::forward_by_steps!(F32, clone);
}

/// The layer as a sequence of ops.
mod steps {
    use super::*;

    /// The layer on any backend.
    pub fn forward<'a, P: Place>(
        place: &P,
        problem: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let Problem { weights, options, .. } = problem;
        let mut sums;
        let mut planes = [place.empty(weights.plane()?)?, place.empty(weights.plane()?)?];
        let mut scale = place.empty(Spec::new(DType::F32, &[weights.scales()])?)?;
        let [plane0, plane1] = planes.each_mut().map(P::view_mut);
        let made = [("plane0", plane0), ("plane1", plane1), ("scale", P::view_mut(&mut scale))].into_iter().collect();
        place.call::<QuantizeTernary>(&options.rules(), op::named([("w", inputs.find("w").map(P::briefly))]), made)?;
        let [plane0, plane1] = planes.each_ref().map(P::view);
        let given = op::named([
            ("x", inputs.find("x").map(P::briefly)),
            ("plane0", Some(plane0)),
            ("plane1", Some(plane1)),
            ("w_scale", Some(P::view(&scale))),
            ("bias", inputs.find("bias").map(P::briefly)),
        ]);
        let mut to: Named<_> = [("y", P::briefly_mut(outputs.expect("y")?))].into_iter().collect();
        let ends = Ends { activation: options.activation, return_sums: false };
        match options.activations {
            Form::I8 => place.call::<Matmul<I8>>(&ends, given, to),
            Form::F32 => place.call::<Matmul<F32>>(&ends, given, to),
            Form::Ternary => {
                let dims = [&problem.leading[..], &weights.leading[..]].concat();
                sums = place.empty(Spec::new(DType::I32, &dims)?)?;
                to.push("acc", P::view_mut(&mut sums));
                place.call::<Matmul<Ternary>>(&ends, given, to)
            }
        }
    }
}
