//! Memory decay integration, one step of it for each row, and its gradient. With `linear(v, W, b) = v W^T + b`,
//! weights stored (out, in), and the logistic function s:
//!
//! ```text
//! gate = s(linear([z; h_prev], wm, bm))
//! gamma = mdi_gamma(z, context)
//! h_new = gate z + (1 - gate) h_prev + gamma h_prev
//! ```
//!
//! The coefficient is [`gamma`], and the last line [`update`]. The weight of `h_prev` is `1 - gate + gamma`, up to 2:
//! over many steps the state grows unless `gamma` is small.
//!
//! The gradient recomputes the intermediate tensors, which have the storage type.

pub mod gamma;
mod steps;
pub mod update;

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot};
use gamma::Problem;
use update::Options;

/// The inputs in addition to those of [`gamma::MdiGamma`].
const OWN: [Slot; 3] = [Slot::new("h_prev", "(..., D)"), Slot::new("wm", "(D, 2D)"), Slot::new("bm", "(D)")];

/// One step of the integration.
pub struct Mdi;

impl Op for Mdi {
    const NAME: &'static str = "mdi";
    const ABOUT: &'static str = "One step of memory decay integration";
    const INPUTS: &'static [Slot] = &op::slots::<13>(&gamma::SLOTS, &OWN);
    const OUTPUTS: &'static [Output] =
        &[Output::new("h_new", "(..., D)"), Output::new("gamma", "(..., D)"), Output::new("gate", "(..., D)")];
    const HINT: &'static str = gamma::MdiGamma::HINT;
    const COTANGENTS: &'static [&'static str] = &["dh_new", "dgamma", "dgate"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call.inputs, &call.sizes)
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
