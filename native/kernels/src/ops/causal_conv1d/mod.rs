//! The depthwise causal convolution before Mamba's scan (Gu and Dao 2023, section 3.4), its gradient, and its step by
//! one token.
//!
//! Let `xp` be `initial_state`, or zeros, followed by `x` in time: L + W - 1 rows. For each batch, channel
//! and time `t` from 0 to L - 1:
//!
//! ```text
//! u[t] = bias + sum_j w[j] xp[t+j]        j from 0 to W - 1: w[W-1] meets the current sample
//! y[t] = silu(u[t]) or u[t]
//! ```
//!
//! `last_state` is the last W - 1 rows of `xp`. Given the cotangents `dy` and `dlast_state`:
//!
//! ```text
//! du[t] = dy[t] silu'(u[t]) or dy[t]
//! dxp[r] = sum_j w[j] du[r-j] (+ dlast_state in the last W - 1 rows)
//! dw[j] = sum_{b,t} du[t] xp[t+j]         dbias = sum_{b,t} du[t]
//! ```
//!
//! where `dinitial_state` is the first W - 1 rows of `dxp`, and `dx` the others. Storage is f32, f64, bf16 or f16; `w`,
//! `bias` and all arithmetic are f32 (f64 for f64 storage), and outputs are rounded once. The gradient recomputes `u`.
//! The order of all sums depends on the sizes alone.

mod cpu;
mod cuda;
mod reference;
pub mod update;

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{DType, Spec};
use serde::{Deserialize, Serialize};

/// The activation of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `u * sigmoid(u)`.
    Silu,
}

options! {
    /// The options of the convolution.
    pub struct Options {
        /// activation of the output; none by default
        activation: Option<Activation> = None;
        /// write last_state (B, W-1, D)
        return_state: bool = false;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Channels, `D`.
    pub channels: usize,
    /// Width of the kernel, `W`; at least 1.
    pub width: usize,
    /// The storage type.
    pub dtype: DType,
    /// The activation of the sums.
    pub activation: Option<Activation>,
}

impl Problem {
    /// The problem of the convolution or of its step, which has equal sizes but no length.
    fn new<O: Op>(call: &Bound<O>, length: usize, activation: Option<Activation>) -> Result<Problem> {
        let [batch, channels, width] = call.sizes.all("BDW");
        if width == 0 {
            let expected = format!("({channels}, W) with W of at least 1");
            return Err(op::wrong_shape("w", &expected, call.inputs.get("w")?));
        }
        Ok(Problem { batch, length, channels, width, dtype: call.storage, activation })
    }

    /// Number of rows of `xp`.
    fn rows(&self) -> usize {
        self.length + self.width - 1
    }
}

/// The convolution.
pub struct CausalConv1d;

impl Op for CausalConv1d {
    const NAME: &'static str = "causal_conv1d";
    const ABOUT: &'static str = "Depthwise causal convolution over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, L, D)"),
        Slot::new("w", "(D, W)").wide(),
        Slot::new("bias", "(D)").wide().optional(),
        Slot::new("initial_state", "(B, W-1, D)").optional(),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::new("y", "(B, L, D)"), Output::new("last_state", "(B, W-1, D)").asked_by("return_state")];
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call, call.sizes.of('L'), call.options.activation)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.batch, problem.length, problem.channels, problem.width])
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`CausalConv1d`].
pub type CausalConv1dBackward = Backward<CausalConv1d>;

impl Differentiable for CausalConv1d {
    const BACKWARD: &'static str = "causal_conv1d_backward";
    const GIVEN: &'static [Slot] =
        &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "w", "bias", "initial_state", "dy", "dlast_state"]);

    crate::backward_by_kernels!();
}
