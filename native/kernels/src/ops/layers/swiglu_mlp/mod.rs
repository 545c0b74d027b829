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

use crate::base::activation::Activation;
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    pub struct Options {
        /// activation of the gate; silu by default
        activation: Option<Activation> = None;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// The hidden width, `F` in the shapes.
    pub hidden: usize,
    /// The activation of the gate.
    pub activation: Activation,
}

impl Problem {
    fn in_f64(self) -> Problem {
        Problem { x: Spec { dtype: DType::F64, ..self.x }, ..self }
    }
}

/// The layer.
pub struct SwigluMlp;

impl Op for SwigluMlp {
    const NAME: &'static str = "swiglu_mlp";
    const ABOUT: &'static str = "Gated feed-forward layer";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., D)"), Slot::new("wg", "(F, D)"), Slot::new("wu", "(F, D)"), Slot::new("wd", "(D, F)")];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(..., D)")];
    const HINT: &'static str = "Weights are stored (out, in)";
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let activation = call.options.activation.unwrap_or(Activation::Silu);
        Ok(Problem { x: *call.inputs.get("x")?, hidden: call.sizes.of('F'), activation })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[3, problem.x.shape.elements(), problem.hidden])
    }

    crate::forward_by_steps!();
}

/// The gradient of [`SwigluMlp`].
pub type SwigluMlpBackward = Backward<SwigluMlp>;

impl Differentiable for SwigluMlp {
    const BACKWARD: &'static str = "swiglu_mlp_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "wg", "wu", "wd", "dy"]);

    crate::backward_by_steps!();
}
