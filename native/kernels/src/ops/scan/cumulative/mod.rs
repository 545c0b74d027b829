//! Cumulative products, sums and log-sums along the length of tensors `(B, H, L, W)`, and their gradients.
//!
//! For each batch, head and channel, with time `t` from 1 to L, or from L to 1 where the scan is reversed:
//!
//! ```text
//! exp_product_scan   l[t] = max(ln(min(max(gamma[t], eps), 1)), log_min)
//!                    log_y[t] = initial_state + sum_{i<=t} l[i]           y[t] = exp(log_y[t])
//! cumprod_scan       y[t] = initial_state * prod_{i<=t} gamma[i]
//! logcumsumexp       y[t] = ln(exp(initial_state) + sum_{i<=t} exp(x[i]))
//! cumsum             y[t] = initial_state + sum_{i<=t} x[i]               reverse_cumsum: over i >= t
//! ```
//!
//! Without `initial_state` they start from the identity of the operation: 0, 1, or minus infinity for `logcumsumexp`.
//! `last_state` is the `initial_state` of the steps that follow.
//!
//! Gradients run in the opposite direction, and none divides by a value that may be 0. With `dlast_state` as the term
//! carried from step `L + 1`, and with `f = min(max(gamma, floor), 1)` for `floor` the larger of `eps` and
//! `exp(log_min)`:
//!
//! ```text
//! exp_product_scan   T[i] = dy[i] + f[i+1] T[i+1]              R[i] = dlog_y[i] + R[i+1]      R[L+1] = dlast_state
//!                    dgamma[i] = y[i-1] T[i] + R[i] / gamma[i] where floor <= gamma[i] <= 1, else 0
//!                    dinitial_state = exp(initial_state) f[1] T[1] + R[1]
//! cumprod_scan       T[i] = dy[i] + gamma[i+1] T[i+1]          dgamma[i] = y[i-1] T[i]
//!                    dinitial_state = gamma[1] T[1]
//! logcumsumexp       G[i] = dy[i] + exp(y[i] - y[i+1]) G[i+1]  dx[i] = exp(x[i] - y[i]) G[i]
//!                    dinitial_state = exp(initial_state - y[1]) G[1]    where x is minus infinity dx is 0
//! cumsum             dx[i] = sum_{t>=i} dy[t]                  dinitial_state = dx[1]
//! ```
//!
//! (Blelloch 1990, "Prefix Sums and Their Applications", has them as associative scans; the division-free form is
//! the linear recurrence of its section 1.4.) Storage is f32, f64, bf16 or f16; `log_y`, the states and all arithmetic
//! are f32 (f64 for f64 storage). Sums are compensated on the CPU and blocked on CUDA, so a long one is about as
//! exact as a short one. Gradients of products read the stored `y`; that of `logcumsumexp` recomputes it.

mod cpu;
mod cuda;
mod reference;
mod tables;

pub use tables::{CumSum, CumprodScan, ExpProductScan, LogCumSumExp, ReverseCumSum};
pub use tables::{ExpProductOptions, Options, SumOptions};

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot};
use crate::tensor::{DType, Spec};
use std::marker::PhantomData;

/// The gradient of [`ExpProductScan`].
pub type ExpProductScanBackward = Backward<ExpProductScan>;
/// The gradient of [`CumprodScan`].
pub type CumprodScanBackward = Backward<CumprodScan>;
/// The gradient of [`LogCumSumExp`].
pub type LogCumSumExpBackward = Backward<LogCumSumExp>;
/// The gradient of [`CumSum`].
pub type CumSumBackward = Backward<CumSum>;
/// The gradient of [`ReverseCumSum`].
pub type ReverseCumSumBackward = Backward<ReverseCumSum>;

/// The operation that is accumulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scan {
    /// The product of factors clamped to `[floor, 1]`, computed as the sum of their logarithms.
    ExpProduct {
        /// The least factor.
        eps: f64,
        /// The least logarithm of a factor.
        log_min: f64,
        /// The larger of `eps` and `exp(log_min)`.
        floor: f64,
    },
    /// The product.
    Product,
    /// The logarithm of the sum of exponentials.
    LogSumExp,
    /// The sum.
    Sum,
}

/// The options of a scan.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The operation that is accumulated.
    pub scan: Scan,
    /// Whether time runs from the last step to the first.
    pub reverse: bool,
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size times heads: the number of independent sequences.
    pub rows: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Channels, `W`, contiguous in memory.
    pub width: usize,
    /// Type and shape of the sequences, (B, H, L, W).
    pub sequence: Spec,
    /// Type and shape of states, (B, H, W).
    pub state: Spec,
    /// The options.
    pub settings: Settings,
}

impl Problem {
    /// The storage type.
    pub fn dtype(&self) -> DType {
        self.sequence.dtype
    }
}

/// The names, tensors and options that distinguish these ops.
pub trait Table: 'static {
    /// The op's name.
    const NAME: &'static str;
    /// A description in one line.
    const ABOUT: &'static str;
    /// The gradient's name.
    const BACKWARD: &'static str;
    /// The names of the sequence and of its gradient.
    const NAMES: [&'static str; 2];
    /// The op's inputs.
    const INPUTS: &'static [Slot];
    /// The op's outputs.
    const OUTPUTS: &'static [Output];
    /// The gradient's inputs.
    const GIVEN: &'static [Slot];
    /// The cotangents of its outputs.
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state"];
    /// The options as decoded from the caller.
    type Options: op::Options;
    /// The settings that the options select; bounds are rounded to `wide`, the type of the arithmetic.
    fn settings(options: &Self::Options, wide: DType) -> Settings;
}

/// The op that the table `T` describes.
pub struct Cumulative<T>(PhantomData<T>);

impl<T: Table> Op for Cumulative<T> {
    const NAME: &'static str = T::NAME;
    const ABOUT: &'static str = T::ABOUT;
    const INPUTS: &'static [Slot] = T::INPUTS;
    const OUTPUTS: &'static [Output] = T::OUTPUTS;
    const HINT: &'static str = "Layout is (batch, heads, length, channels of a head)";
    const COTANGENTS: &'static [&'static str] = T::COTANGENTS;

    type Options = T::Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, heads, length, width] = call.sizes.all("BHLW");
        let sequence = Spec::new(call.storage, &[batch, heads, length, width])?;
        let state = Spec::new(call.storage.wide(), &[batch, heads, width])?;
        let settings = T::settings(call.options, state.dtype);
        Ok(Problem { rows: batch * heads, length, width, sequence, state, settings })
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) { cpu::forward(problem, T::NAMES, inputs, outputs, exec) }
        reference(problem, inputs, _) { reference::forward(problem, T::NAMES, inputs) }
        cuda(problem, inputs, outputs, lane) { cuda::forward(problem, T::NAMES, inputs, outputs, lane) }
    }
}

impl<T: Table> Differentiable for Cumulative<T> {
    const BACKWARD: &'static str = T::BACKWARD;
    const GIVEN: &'static [Slot] = T::GIVEN;

    crate::runs! {
        cpu_backward(problem, inputs, outputs, exec) { cpu::backward(problem, T::NAMES, inputs, outputs, exec) }
        reference_backward(problem, inputs, _) { reference::backward(problem, T::NAMES, inputs) }
        cuda_backward(problem, inputs, outputs, lane) { cuda::backward(problem, T::NAMES, inputs, outputs, lane) }
    }
}
