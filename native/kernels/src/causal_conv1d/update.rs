//! One token of the causal convolution: from the last W - 1 samples of a running sequence and a new one to its output
//! and the last W - 1 samples then. It is defined and computed as the convolution with `L = 1` and
//! `initial_state = state`.

use super::{ACTIVATION, Activation, CausalConv1d, Problem};
use crate::cpu;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Result};
use crate::op::{self, Named, Op, OptionDoc, Slot};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Axis};
use serde::Deserialize;

/// The options of the update.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// What is done with the sums; nothing by default.
    pub activation: Option<Activation>,
}

/// The op.
pub struct CausalConv1dUpdate;

impl Op for CausalConv1dUpdate {
    const NAME: &'static str = "causal_conv1d_update";
    const ABOUT: &'static str = "Depthwise causal convolution of one token";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, D)"),
        Slot::new("state", "(B, W-1, D)"),
        Slot::new("w", "(D, W)").wide(),
        Slot::new("bias", "(D)").wide().optional(),
    ];
    const OPTIONS: &'static [OptionDoc] = &[ACTIVATION];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let x = inputs.get("x")?;
        let &[batch, channels] = &x.shape[..] else {
            return Err(op::wrong_shape("x", "(B, D)", x));
        };
        let x = Spec::new(x.dtype, &[batch, 1, channels])?;
        let others = inputs.iter().filter(|(name, _)| *name != "x").map(|(name, spec)| (name.clone(), *spec));
        let as_conv = renamed([("x".into(), x)].into_iter().chain(others).collect(), "initial_state");
        let options = super::Options { activation: options.activation, return_state: true };
        CausalConv1d::check(&as_conv, &options).map_err(|error| match &*error.argument {
            "initial_state" => Error { argument: "state".into(), ..error },
            _ => error,
        })
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let Problem { batch, channels, width, dtype, .. } = *problem;
        let y = Spec::new(dtype, &[batch, channels])?;
        let state = Spec::new(dtype, &[batch, width - 1, channels])?;
        Ok([("y", y), ("state", state)].into_iter().collect())
    }

    // The convolution reads and writes plain memory by its problem, so new names are all it needs.
    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        CausalConv1d::cpu(problem, &renamed(inputs.map(|&v| v), "initial_state"), renamed(outputs, "last_state"), exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        let mut as_conv = renamed(inputs.clone(), "initial_state");
        let x = as_conv.expect("x")?.insert_axis(Axis(1));
        as_conv.push("x", x);
        let mut results = CausalConv1d::reference(problem, &as_conv)?;
        let y = results.expect("y")?.remove_axis(Axis(1));
        Ok([("y", y), ("state", results.expect("last_state")?)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let inputs = renamed(inputs.map(|&b| b), "initial_state");
        CausalConv1d::cuda(problem, &inputs, &renamed(outputs.map(|&b| b), "last_state"), lane)
    }
}

fn renamed<T>(tensors: Named<T>, state: &'static str) -> Named<T> {
    tensors.into_iter().map(|(name, t)| (if name == "state" { state.into() } else { name }, t)).collect()
}
