//! The coefficient of decay of a memory, from the input and optionally a context, each through a network of its
//! own, and the gradient. With `linear(v, W, b) = v W^T + b`, weights stored (out, in), the logistic function s
//! and the erf form of GELU:
//!
//! ```text
//! a = linear(gelu(linear(z, wg1, bg1)), wg2, bg2)
//! c = linear(gelu(linear(context, wc1, bc1)), wc2, bc2)      if there is a context
//! gamma = clamp(s(a) s(c), 1e-6, 1 - 1e-6)
//! ```
//!
//! Strictly outside of the clamp the gradient is 0. It recomputes `a` and `c`. Intermediate tensors have the
//! storage type.

mod steps;

use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

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

/// What each network computes from, and its weights.
pub const NETWORKS: [[&str; 5]; 2] = [["z", "wg1", "bg1", "wg2", "bg2"], ["context", "wc1", "bc1", "wc2", "bc2"]];

impl Problem {
    /// Checks the inputs of the networks.
    pub fn new(inputs: &Named<Spec>) -> Result<Problem> {
        let (z, wg1) = (*inputs.get("z")?, inputs.get("wg1")?);
        let Some(&width) = z.shape.last() else {
            return Err(op::wrong_shape("z", "(..., D)", &z).hint("The networks work on the last axis"));
        };
        let inner = match wg1.shape[..] {
            [inner, inputs] if inputs == width => inner,
            _ => return Err(op::wrong_shape("wg1", &format!("(I, {width})"), wg1).hint(WEIGHTS)),
        };
        op::same_shape(inputs, "context", &z.shape).map_err(|e| e.hint("A context has the shape of z"))?;
        for [_, w1, b1, w2, b2] in NETWORKS {
            for (name, dims) in [(w1, &[inner, width][..]), (b1, &[inner]), (w2, &[width, inner]), (b2, &[width])] {
                op::same_shape(inputs, name, dims).map_err(|e| e.hint(WEIGHTS))?;
            }
        }
        Ok(Problem { z, inner, context: all_or_none(inputs)? })
    }

    /// The problem in f64, for the reference.
    pub fn in_f64(self) -> Problem {
        Problem { z: Spec { dtype: DType::F64, ..self.z }, ..self }
    }
}

const WEIGHTS: &str = "Weights are stored (out, in), and both networks have the same inner width";

/// Whether the second network is there, which it is as a whole or not at all.
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

/// The coefficient.
pub struct MdiGamma;

impl Op for MdiGamma {
    const NAME: &'static str = "mdi_gamma";
    const ABOUT: &'static str = "How much of a memory is kept, from what comes in and maybe from a context";
    const INPUTS: &'static [Slot] = &SLOTS;
    const OPTIONS: &'static [OptionDoc] = &[];
    const COTANGENTS: &'static [&'static str] = &["dgamma"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, _options: &Options) -> Result<Problem> {
        Problem::new(inputs)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[if problem.context { 4 } else { 2 }, problem.z.shape.elements(), problem.inner])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        Ok([("gamma", problem.z)].into_iter().collect())
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
