//! The dense layer whose weights are quantized by a rule in each call, `y = x (s q)^T + bias`. Also all products of one
//! matrix in planes, for golden values.

use super::by_steps;
use super::problem::{Form, HINT, Options as Ends, Quantization, RuleOptions, agree, plane};
use super::products::{F32, I8, Matmul, Ternary};
use super::rules::QuantizeTernary;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

options! {
    /// The options.
    #[derive(Copy)]
    pub struct Options {
        ..super::problem::rule;
        /// what x is in the product
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

    by_steps!(problem => problem.clone());
}

fn steps<'a, P: Place>(
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

/// All products of one matrix.
pub mod all {
    use super::*;

    options! {
        /// The sizes; where given, they must match the tensors.
        #[derive(Copy)]
        pub struct Sizes {
            /// rows of the weights, to prove them
            out: Option<usize> = None;
            /// columns of x, to prove them
            inputs as "in": Option<usize> = None;
        }
    }

    /// A checked call.
    #[derive(Clone, Debug)]
    pub struct Problem {
        leading: Vec<usize>,
        n: usize,
        outs: usize,
        dtype: DType,
    }

    /// The products.
    pub struct TernaryMatmul;

    impl Op for TernaryMatmul {
        const NAME: &'static str = "ternary_matmul";
        const ABOUT: &'static str = "All products of activations and ternary weights, with their sums";
        const INPUTS: &'static [Slot] = &[
            Slot::new("x", "(..., I)"),
            plane("plane0", "(O, P)"),
            plane("plane1", "(O, P)"),
            Slot::new("w_scale", "(O|1)").exactly(DType::F32).loose(),
        ];
        const HINT: &'static str = HINT;
        const STORAGE: &'static [DType] = crate::ops::products::ternary::STORAGE;
        const COTANGENTS: &'static [&'static str] = &[];

        type Options = Sizes;
        type Problem = Problem;

        fn check(call: &Bound<Self>) -> Result<Problem> {
            let (inputs, options) = (call.inputs, call.options);
            op::part::<Matmul<I8>>(inputs, &Ends::default()).and_then(|(product, _)| {
                agree("in", options.inputs, product.n)?;
                agree("out", options.out, product.outs)?;
                Ok(Problem { leading: product.leading, n: product.n, outs: product.outs, dtype: product.dtype })
            })
        }

        fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
            op::product(&[problem.leading.iter().product(), op::elements(inputs, &["plane0"]), 3])
        }

        fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
            let of = |dtype, last: usize| Spec::new(dtype, &[&problem.leading[..], &[last]].concat());
            let outputs = [
                ("xq", of(DType::I8, problem.n)?),
                ("x_scale", Spec::new(DType::F32, &problem.leading)?),
                ("acc_i8", of(DType::I32, problem.outs)?),
                ("acc_ternary", of(DType::I32, problem.outs)?),
                ("y_i8", of(problem.dtype, problem.outs)?),
                ("y_f32", of(problem.dtype, problem.outs)?),
            ];
            Ok(outputs.into_iter().collect())
        }

        by_steps!();
    }

    fn steps<'a, P: Place>(
        place: &P,
        _: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let mut take = |names: &[(&'static str, &str)]| -> Result<Named<P::ViewMut<'a>>> {
            names.iter().map(|&(of, name)| Ok((of, outputs.expect(name)?))).collect()
        };
        let (bytes, signs, floats) = (
            take(&[("xq", "xq"), ("x_scale", "x_scale"), ("acc", "acc_i8"), ("y", "y_i8")])?,
            take(&[("acc", "acc_ternary")])?,
            take(&[("y", "y_f32")])?,
        );
        let given = |names: &[&'static str]| -> Named<P::View<'a>> {
            names.iter().filter_map(|&name| Some((name, P::briefly(inputs.find(name)?)))).collect()
        };
        let all = ["x", "plane0", "plane1", "w_scale"];
        place.call::<Matmul<I8>>(&Ends { return_sums: true, ..Ends::default() }, given(&all), bytes)?;
        place.call::<Matmul<Ternary>>(&Ends::default(), given(&all[..3]), signs)?;
        place.call::<Matmul<F32>>(&Ends::default(), given(&all), floats)
    }
}
