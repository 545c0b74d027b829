//! The step of the causal convolution by one token: from `initial_state`, the last W - 1 samples of a running sequence,
//! and a new sample, to its output and `last_state`. It is defined and computed as the convolution with `L = 1`.

use super::{Activation, CausalConv1d, Problem};
use crate::cpu;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Axis};

options! {
    /// The options of the update.
    pub struct Options {
        /// activation of the output; none by default
        activation: Option<Activation> = None;
    }
}

/// The step of the causal convolution by one token.
pub struct CausalConv1dUpdate;

impl Op for CausalConv1dUpdate {
    const NAME: &'static str = "causal_conv1d_update";
    const ABOUT: &'static str = "Depthwise causal convolution of one token";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, D)"),
        // W comes from w alone, so this shape is checked after that of w.
        Slot::new("initial_state", "(B, W-1, D)"),
        Slot::new("w", "(D, W)").wide(),
        Slot::new("bias", "(D)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(B, D)"), Output::new("last_state", "(B, W-1, D)")];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(call, 1, call.options.activation)
    }

    // The convolution indexes memory by the sizes of the problem, so tensors need not have its axis of length 1.
    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        CausalConv1d::cpu(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let mut as_conv = inputs.clone();
        let x = as_conv.expect("x")?.insert_axis(Axis(1));
        as_conv.push("x", x);
        let mut results = CausalConv1d::reference(problem, &as_conv, &Named::default())?;
        let y = results.expect("y")?.remove_axis(Axis(1));
        Ok([("y", y), ("last_state", results.expect("last_state")?)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        CausalConv1d::cuda(problem, inputs, outputs, lane)
    }
}
