//! Memory decay integration, one step of it for each row, and its gradient. With `linear(v, W, b) = v W^T + b`,
//! weights stored (out, in), and the logistic function s:
//!
//! ```text
//! gate = s(linear([z; h_prev], wm, bm))
//! gamma = mdi_gamma(z, context)
//! h_new = gate z + (1 - gate) h_prev + gamma h_prev
//! ```
//!
//! [`gamma`] has the coefficient and [`update`] the last line. A row's weight on `h_prev` is `1 - gate + gamma`,
//! up to 2: over many steps the state grows unless `gamma` is small.
//!
//! The gradient recomputes the intermediate tensors, which have the storage type.

pub mod gamma;
mod steps;
pub mod update;

use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{Spec, View, ViewMut};
use gamma::Problem;
use ndarray::ArrayD;
use update::Options;

/// What it computes from beside the inputs of [`gamma::MdiGamma`].
const OWN: [Slot; 3] = [Slot::new("h_prev", "(..., D)"), Slot::new("wm", "(D, 2D)"), Slot::new("bm", "(D)")];

/// One step of the integration.
pub struct Mdi;

impl Op for Mdi {
    const NAME: &'static str = "mdi";
    const ABOUT: &'static str = "One step of memory decay integration";
    const INPUTS: &'static [Slot] = &op::slots::<13>(&gamma::SLOTS, &OWN);
    const OPTIONS: &'static [OptionDoc] = &[];
    const COTANGENTS: &'static [&'static str] = &["dh_new", "dgamma", "dgate"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, _options: &Options) -> Result<Problem> {
        let problem = Problem::new(inputs)?;
        let width = problem.z.shape.last().copied().unwrap_or(0);
        op::same_shape(inputs, "h_prev", &problem.z.shape).map_err(|e| e.hint("A memory has the shape of z"))?;
        op::same_shape(inputs, "wm", &[width, 2 * width])
            .map_err(|e| e.hint("Its first half is for z, the second for h_prev"))?;
        op::same_shape(inputs, "bm", &[width])?;
        Ok(problem)
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        Ok(["h_new", "gamma", "gate"].into_iter().map(|name| (name, problem.z)).collect())
    }

    crate::forward_by_steps!();
}

/// The gradient of [`Mdi`].
pub type MdiBackward = Backward<Mdi>;

impl Differentiable for Mdi {
    const BACKWARD: &'static str = "mdi_backward";
    const GIVEN: &'static [Slot] = &op::slots::<16>(
        Self::INPUTS,
        &[
            Slot::new("dh_new", "(..., D)"),
            Slot::new("dgamma", "(..., D)").optional(),
            Slot::new("dgate", "(..., D)").optional(),
        ],
    );

    crate::backward_by_steps!();
}
