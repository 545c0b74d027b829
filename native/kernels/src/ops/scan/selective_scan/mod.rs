//! The Mamba selective scan (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with
//! Selective State Spaces", section 3), forward; [`backward`] is its gradient.
//!
//! For each batch, channel `d`, state `n` and time `t`:
//!
//! ```text
//! s = dt + dt_bias             delta = clamp(softplus(s))      (bias, softplus and clamp are optional)
//! h = exp(delta * A[d,n]) * h + delta * B[t,n] * x[t]          (h starts as initial_state, or zero)
//! y = sum_n C[t,n] * h[n] + D[d] * x                           (D where it is given)
//! out = y * silu(z)                                            (z where it is given)
//! ```
//!
//! Storage is f32, f64, bf16 or f16; `A`, `D`, `dt_bias`, `initial_state`, the states and all arithmetic are
//! f32 (f64 for f64 storage), and outputs are rounded once.

pub mod backward;
mod cpu;
#[doc(hidden)]
pub mod cuda;
mod reference;

use crate::error::{Error, Kind, Result};
use crate::op::{Bound, Named, Op, Output, Sizes, Slot, wrong_shape};
pub use crate::ops::scan::step_size::ClampGrad;
use crate::ops::scan::step_size::StepSize;
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options of the scan.
    pub struct Options {
        ..super::step_size::step;
        /// gradient of the clamp
        clamp_grad: ClampGrad = ClampGrad::Mask;
        /// write last_state (B, D, N)
        return_state: bool = false;
        /// write states (B, L, D, N)
        return_states: bool = false;
    }
}

impl Options {
    /// How `dt` becomes the step size.
    pub fn step_size(&self) -> StepSize {
        StepSize { softplus: self.dt_softplus, clamp: self.dt_clamp, clamp_grad: self.clamp_grad }
    }
}

/// How `B` or `C` varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `(B, L, N)` or `(B, L, G, N)`: new at every step, shared by the channels of a group.
    PerStep {
        /// The number of groups of channels.
        groups: usize,
    },
    /// `(D, N)`: constant over batch and time, with a row for each channel.
    Constant,
}

/// A checked call of the scan.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Channels, `D`.
    pub channels: usize,
    /// State size per channel, `N`.
    pub state: usize,
    /// How `B` varies.
    pub b: Form,
    /// How `C` varies.
    pub c: Form,
    /// The storage type.
    pub dtype: DType,
    /// The options.
    pub options: Options,
}

/// The op.
pub struct SelectiveScan;

impl Op for SelectiveScan {
    const NAME: &'static str = "selective_scan";
    const ABOUT: &'static str = "Mamba selective scan over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, L, D)"),
        Slot::new("dt", "(B, L, D)"),
        Slot::new("A", "(D, N)").wide(),
        // B and C may have different numbers of groups.
        Slot::new("B", "(B, L, N) | (B, L, G, N) | (D, N)").loose(),
        Slot::new("C", "(B, L, N) | (B, L, G, N) | (D, N)").loose(),
        Slot::new("D", "(D)").wide().optional(),
        Slot::new("z", "(B, L, D)").optional(),
        Slot::new("dt_bias", "(D)").wide().optional(),
        Slot::new("initial_state", "(B, D, N)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[
        Output::new("y", "(B, L, D)"),
        Output::new("last_state", "(B, D, N)").wide().asked_by("return_state"),
        Output::new("states", "(B, L, D, N)").wide().asked_by("return_states"),
    ];
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state", "dstates"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, channels, state] = call.sizes.all("BLDN");
        call.options.step_size().checked()?;
        Ok(Problem {
            batch,
            length,
            channels,
            state,
            b: form("B", call.inputs.get("B")?, &call.sizes)?,
            c: form("C", call.inputs.get("C")?, &call.sizes)?,
            dtype: call.storage,
            options: call.options.clone(),
        })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        crate::op::product(&[problem.batch, problem.length, problem.channels, problem.state])
    }

    crate::forward_by_kernels!(cpu::forward, reference::selective_scan, cuda::forward);
    crate::packed_by_kernels!(cuda_packed, cuda::forward_packed);
}

fn form(name: &str, spec: &Spec, sizes: &Sizes) -> Result<Form> {
    let [batch, length, channels, state] = sizes.all("BLDN");
    match spec.shape[..] {
        [d, n] if (d, n) == (channels, state) => Ok(Form::Constant),
        [b, l, n] if (b, l, n) == (batch, length, state) => Ok(Form::PerStep { groups: 1 }),
        [b, l, groups, n] if (b, l, n) == (batch, length, state) && divides(groups, channels) => {
            Ok(Form::PerStep { groups })
        }
        [_, _, groups, _] if !divides(groups, channels) => Err(Error::new(Kind::Shape, name)
            .expected(format_args!("a number of groups that divides {channels} channels"))
            .got(format_args!("{groups} groups"))),
        _ => {
            let expected =
                format!("({batch}, {length}, {state}), ({batch}, {length}, G, {state}) or ({channels}, {state})");
            Err(wrong_shape(name, &expected, spec))
        }
    }
}

fn divides(groups: usize, channels: usize) -> bool {
    groups > 0 && channels.is_multiple_of(groups)
}
