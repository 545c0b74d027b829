//! The decay coefficient of a memory, from the input and optionally a context, each through a network of its own, and
//! its gradient. With `linear(v, W, b) = v W^T + b`, weights stored (out, in), the logistic function s and the erf form
//! of GELU:
//!
//! ```text
//! a = linear(gelu(linear(z, wg1, bg1)), wg2, bg2)
//! c = linear(gelu(linear(context, wc1, bc1)), wc2, bc2)      if there is a context
//! gamma = clamp(s(a) s(c), 1e-6, 1 - 1e-6)
//! ```
//!
//! Strictly outside of the clamp's bounds the gradient is 0. It recomputes `a` and `c`. Intermediate tensors have the
//! storage type.

mod steps;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Sizes, Slot};
use crate::tensor::{DType, Spec};

pub use super::update::Options;

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `z`.
    pub z: Spec,
    /// The inner width of the networks, `I` in the shapes.
    pub inner: usize,
    /// Whether there is a context.
    pub context: bool,
}

/// The input of each network, and its weights.
pub const NETWORKS: [[&str; 5]; 2] = [["z", "wg1", "bg1", "wg2", "bg2"], ["context", "wc1", "bc1", "wc2", "bc2"]];

impl Problem {
    /// Checks that the second network is given completely or not at all, for inputs of these sizes.
    pub fn new(inputs: &Named<Spec>, sizes: &Sizes) -> Result<Problem> {
        Ok(Problem { z: *inputs.get("z")?, inner: sizes.of('I'), context: all_or_none(inputs)? })
    }

    /// The problem in f64, for the reference.
    pub fn in_f64(self) -> Problem {
        Problem { z: Spec { dtype: DType::F64, ..self.z }, ..self }
    }
}

/// Whether the second network is given; fails if it is incomplete.
fn all_or_none(inputs: &Named<Spec>) -> Result<bool> {
    let [_, names] = NETWORKS;
    let Some(given) = names.iter().find(|name| inputs.find(name).is_some()) else { return Ok(false) };
    match names.iter().find(|name| inputs.find(name).is_none()) {
        None => Ok(true),
        Some(missing) => Err(Error::new(Kind::Argument, *missing)
            .expected(format_args!("a tensor beside {given}"))
            .got("none")
            .hint(format_args!("Give all of {} or none of them", names.join(", ")))),
    }
}

/// The inputs.
pub const SLOTS: [Slot; 10] = [
    Slot::new("z", "(..., D)"),
    Slot::new("context", "(..., D)").optional(),
    Slot::new("wg1", "(I, D)"),
    Slot::new("bg1", "(I)"),
    Slot::new("wg2", "(D, I)"),
    Slot::new("bg2", "(D)"),
    Slot::new("wc1", "(I, D)").optional(),
    Slot::new("bc1", "(I)").optional(),
    Slot::new("wc2", "(D, I)").optional(),
    Slot::new("bc2", "(D)").optional(),
];

/// The decay coefficient.
pub struct MdiGamma;

impl Op for MdiGamma {
    const NAME: &'static str = "mdi_gamma";
    const ABOUT: &'static str = "How much of a memory is kept, from what comes in and maybe from a context";
    const INPUTS: &'static [Slot] = &SLOTS;
    const OUTPUTS: &'static [Output] = &[Output::new("gamma", "(..., D)")];
    const HINT: &'static str = "Weights are stored (out, in), and both networks have the same inner width";
    const COTANGENTS: &'static [&'static str] = &["dgamma"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call.inputs, &call.sizes)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[if problem.context { 4 } else { 2 }, problem.z.shape.elements(), problem.inner])
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MdiGamma`].
pub type MdiGammaBackward = Backward<MdiGamma>;

impl Differentiable for MdiGamma {
    const BACKWARD: &'static str = "mdi_gamma_backward";
    const GIVEN: &'static [Slot] = &op::slots::<11>(&SLOTS, &[Slot::new("dgamma", "(..., D)")]);

    crate::backward_by_steps!();
}
