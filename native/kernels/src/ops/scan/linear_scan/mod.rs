//! The linear recurrence that other scans are built on, and its gradient.
//!
//! For each batch, channel and time `t` from 1 to L, where `h[0]` is `initial_state`, or zero:
//!
//! ```text
//! h[t] = a[t] h[t-1] + b[t]
//! ```
//!
//! Given the cotangents `dh` and `dlast_state`, time runs backwards:
//!
//! ```text
//! g[t] = dh[t] + a[t+1] g[t+1]        a[L+1] g[L+1] = dlast_state
//! db[t] = g[t]                        da[t] = g[t] h[t-1]                 dinitial_state = a[1] g[1]
//! ```
//!
//! (Blelloch 1990, "Prefix Sums and Their Applications", section 1.4, has it as an associative scan.)
//! Any `a` is allowed: negative, zero, or above 1. Storage is f32, f64, bf16 or f16; `initial_state`, the state
//! and all arithmetic are f32 (f64 for f64 storage), and outputs are rounded once. The gradient reads
//! `h` as it was stored.

mod cpu;
mod cuda;
mod reference;

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options of the recurrence.
    pub struct Options {
        /// write last_state (B, K)
        return_state: bool = false;
    }
}

/// The sizes of a checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Channels, `K`.
    pub channels: usize,
    /// The storage type.
    pub dtype: DType,
}

/// The recurrence.
pub struct LinearScan;

impl Op for LinearScan {
    const NAME: &'static str = "linear_scan";
    const ABOUT: &'static str = "Linear recurrence h = a h + b over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("a", "(B, L, K)"),
        Slot::new("b", "(B, L, K)"),
        Slot::new("initial_state", "(B, K)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::new("h", "(B, L, K)"), Output::new("last_state", "(B, K)").wide().asked_by("return_state")];
    const COTANGENTS: &'static [&'static str] = &["dh", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, channels] = call.sizes.all("BLK");
        Ok(Problem { batch, length, channels, dtype: call.storage })
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`LinearScan`].
pub type LinearScanBackward = Backward<LinearScan>;

impl Differentiable for LinearScan {
    const BACKWARD: &'static str = "linear_scan_backward";
    const GIVEN: &'static [Slot] =
        &op::given(Self::INPUTS, Self::OUTPUTS, ["a", "h", "initial_state", "dh", "dlast_state"]);

    /// `b` itself is not needed, and `db` is of the same type and shape as `a`.
    fn gradients(inputs: &Named<Spec>) -> Named<Spec> {
        op::gradients(inputs, &[("a", "da"), ("a", "db"), ("initial_state", "dinitial_state")])
    }

    crate::backward_by_kernels!();
}
