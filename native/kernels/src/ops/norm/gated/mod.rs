//! Root mean square normalisation with a gate, of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"; `RMSNormGated` in
//! `mamba_ssm/ops/triton/layernorm_gated.py`). Each row is divided into `groups` equal parts, which are normalised
//! separately:
//!
//! ```text
//! gate first        u = x silu(z)      y = w u^
//! norm_before_gate  u = x              y = w u^ silu(z)
//! u^ = u r          r = 1 / sqrt(mean(u^2) + eps)        mean over a part
//! ```
//!
//! Given `dy`, with `e = dy`, or `dy silu(z)` where the norm comes before the gate:
//!
//! ```text
//! du = r (w e - u^ mean(w e u^))         dw = sum e u^        sum over all rows
//! gate first        dx = du silu(z)      dz = du x silu'(z)
//! norm_before_gate  dx = du              dz = dy w u^ silu'(z)
//! ```
//!
//! Storage is f32, f64, bf16 or f16; `w` and the arithmetic are f32 (f64 for f64), and results are rounded once.
//! Squares are scaled as in [`norm`]. The order of all sums depends on the sizes alone (on a GPU, also on the GPU).

mod cpu;
mod cuda;
mod reference;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot};
use crate::ops::norm;
use crate::options;
use crate::tensor::DType;

options! {
    /// The options.
    pub struct Options {
        /// epsilon of the norm
        eps: f64 = 1e-5, positive;
        /// number of equal groups of a row, each normalised separately
        groups: usize = 1, positive;
        /// norm x before the gate: norm(x) silu(z) in place of norm(x silu(z))
        norm_before_gate: bool = false;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// The storage type.
    pub dtype: DType,
    /// The number of parts in all rows together.
    pub parts: usize,
    /// The number of parts in a row.
    pub groups: usize,
    /// The length of a part.
    pub columns: usize,
    /// The epsilon that is added to the divisor.
    pub eps: f64,
    /// Whether the gate comes after the norm.
    pub norm_before_gate: bool,
}

/// The gated norm.
pub struct GatedRmsNorm;

impl Op for GatedRmsNorm {
    const NAME: &'static str = "gated_rms_norm";
    const ABOUT: &'static str = "Root mean square normalisation of rows with a gate";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., D)"), Slot::new("z", "(..., D)"), Slot::new("w", "(D)").wide()];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(..., D)")];
    const HINT: &'static str = norm::HINT;
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (&Options { eps, groups, norm_before_gate }, width) = (call.options, call.sizes.of('D'));
        if !width.is_multiple_of(groups) {
            return Err(Error::new(Kind::Option, "groups").expected(format_args!("a divisor of {width}")).got(groups));
        }
        let rows: usize = call.sizes.rows().iter().product();
        let parts = if width == 0 { 0 } else { rows * groups };
        Ok(Problem { dtype: call.storage, parts, groups, columns: width / groups, eps, norm_before_gate })
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`GatedRmsNorm`].
pub type GatedRmsNormBackward = Backward<GatedRmsNorm>;

impl Differentiable for GatedRmsNorm {
    const BACKWARD: &'static str = "gated_rms_norm_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "z", "w", "dy"]);

    crate::backward_by_kernels!();
}
