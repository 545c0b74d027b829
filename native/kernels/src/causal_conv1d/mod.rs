//! The depthwise causal convolution in front of Mamba's scan (Gu and Dao 2023, section 3.4), its
//! gradient, and its step of one token.
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
//! where `dinitial_state` is the first W - 1 rows of `dxp`, and `dx` the others. Storage is f32, f64, bf16
//! or f16; `w`, `bias` and all arithmetic are f32 (f64 for f64 storage), and outputs are rounded once.
//! `u` is not kept but computed again. All sums are done in an order that depends on the sizes alone.

mod cpu;
mod cuda;
mod reference;
pub mod update;

use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// What is done with the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `u * sigmoid(u)`.
    Silu,
}

/// The options of the convolution.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// What is done with the sums; nothing by default.
    pub activation: Option<Activation>,
    /// Write `last_state`.
    pub return_state: bool,
}

/// The documentation of `activation`.
pub const ACTIVATION: OptionDoc = OptionDoc { name: "activation", takes: "text", help: "silu; none by default" };

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Channels, `D`.
    pub channels: usize,
    /// How many steps each output sees, `W`; at least 1.
    pub width: usize,
    /// The storage type.
    pub dtype: DType,
    /// What is done with the sums.
    pub activation: Option<Activation>,
    /// Whether `last_state` is wanted.
    pub return_state: bool,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (x, w) = (inputs.get("x")?, inputs.get("w")?);
        let &[batch, length, channels] = &x.shape[..] else {
            return Err(op::wrong_shape("x", "(B, L, D)", x));
        };
        let width = match w.shape[..] {
            [d, width] if d == channels && width > 0 => width,
            _ => return Err(op::wrong_shape("w", &format!("({channels}, W) with W of at least 1"), w)),
        };
        op::same_shape(inputs, "bias", &[channels])?;
        for name in ["initial_state", "dlast_state"] {
            op::same_shape(inputs, name, &[batch, width - 1, channels])?;
        }
        let Options { activation, return_state } = *options;
        Ok(Problem { batch, length, channels, width, dtype: x.dtype, activation, return_state })
    }

    /// Rows of `xp`.
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
    const OPTIONS: &'static [OptionDoc] =
        &[ACTIVATION, OptionDoc { name: "return_state", takes: "flag", help: "write last_state (B, W-1, D)" }];
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.batch, problem.length, problem.channels, problem.width])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let Problem { batch, length, channels, width, dtype, .. } = *problem;
        let mut outputs = Named::default();
        outputs.push("y", Spec::new(dtype, &[batch, length, channels])?);
        if problem.return_state {
            outputs.push("last_state", Spec::new(dtype, &[batch, width - 1, channels])?);
        }
        Ok(outputs)
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::forward(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::forward(problem, inputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::forward(problem, inputs, outputs, lane)
    }
}

/// The gradient of [`CausalConv1d`].
pub type CausalConv1dBackward = Backward<CausalConv1d>;

impl Differentiable for CausalConv1d {
    const BACKWARD: &'static str = "causal_conv1d_backward";
    const GIVEN: &'static [Slot] = &op::slots::<6>(
        Self::INPUTS,
        &[Slot::new("dy", "(B, L, D)"), Slot::new("dlast_state", "(B, W-1, D)").optional()],
    );

    fn cpu_backward(
        call: &Gradient<Problem>,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::backward(&call.of, inputs, outputs, exec)
    }

    fn reference_backward(call: &Gradient<Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::backward(&call.of, inputs)
    }

    fn cuda_backward(
        call: &Gradient<Problem>,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        lane: &Lane,
    ) -> Result<()> {
        cuda::backward(&call.of, inputs, outputs, lane)
    }
}
