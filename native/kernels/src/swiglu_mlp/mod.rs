//! The gated feed-forward layer of Llama (Shazeer 2020, "GLU Variants Improve Transformer") and its gradient.
//! With `linear(v, M) = v M^T`, and weights stored (out, in):
//!
//! ```text
//! g = linear(x, wg)        u = linear(x, wu)        h = activation(g) u        y = linear(h, wd)
//! e = dy wd                dg = e u activation'(g)  du = e activation(g)
//! dx = dg wg + du wu       dwg = dg^T x             dwu = du^T x               dwd = dy^T h
//! ```
//!
//! The activation is SiLU by default. The gradient recomputes `g`, `u` and `h`. Intermediate tensors have the
//! storage type.

mod steps;

use crate::activations::{self, Activation};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// What the gate goes through; SiLU by default.
    pub activation: Option<Activation>,
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// How many rows `x` has.
    pub rows: usize,
    /// The hidden width, `F` in the shapes.
    pub hidden: usize,
    /// What the gate goes through.
    pub activation: Activation,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (x, wg) = (*inputs.get("x")?, inputs.get("wg")?);
        let Some((&width, rows)) = x.shape.split_last() else {
            return Err(op::wrong_shape("x", "(..., D)", &x).hint("The layer works on the last axis"));
        };
        let hidden = match wg.shape[..] {
            [hidden, inputs] if inputs == width => hidden,
            _ => return Err(op::wrong_shape("wg", &format!("(F, {width})"), wg).hint(WEIGHTS)),
        };
        op::same_shape(inputs, "wu", &[hidden, width]).map_err(|e| e.hint(WEIGHTS))?;
        op::same_shape(inputs, "wd", &[width, hidden]).map_err(|e| e.hint(WEIGHTS))?;
        let activation = options.activation.unwrap_or(Activation::Silu);
        Ok(Problem { x, rows: rows.iter().product(), hidden, activation })
    }

    fn in_f64(self) -> Problem {
        Problem { x: Spec { dtype: DType::F64, ..self.x }, ..self }
    }
}

const WEIGHTS: &str = "Weights are stored (out, in)";

/// The layer.
pub struct SwigluMlp;

impl Op for SwigluMlp {
    const NAME: &'static str = "swiglu_mlp";
    const ABOUT: &'static str = "Gated feed-forward layer";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., D)"), Slot::new("wg", "(F, D)"), Slot::new("wu", "(F, D)"), Slot::new("wd", "(D, F)")];
    const OPTIONS: &'static [OptionDoc] = &[OptionDoc { name: "activation", takes: "text", help: activations::NAMES }];
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[3, problem.x.shape.elements(), problem.hidden])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        Ok([("y", problem.x)].into_iter().collect())
    }

    crate::forward_by_steps!();
}

/// The gradient of [`SwigluMlp`].
pub type SwigluMlpBackward = Backward<SwigluMlp>;

impl Differentiable for SwigluMlp {
    const BACKWARD: &'static str = "swiglu_mlp_backward";
    const GIVEN: &'static [Slot] = &op::slots::<5>(Self::INPUTS, &[Slot::new("dy", "(..., D)")]);

    crate::backward_by_steps!();
}
