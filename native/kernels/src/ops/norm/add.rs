//! The residual step between the layers of a model: the output of a layer is added to the residual stream, which is
//! then normalised for the next layer by its root mean square:
//!
//! ```text
//! sum = sum + x        y = w sum r        r = 1 / sqrt(mean(sum^2) + eps)
//! ```
//!
//! `sum` has the type of the arithmetic: in 16 bits it would lose the contributions of late layers. It is changed in
//! place. This is a step of models and not a public op: [`OPS`](crate::ops::OPS) does not list it.

use super::{HINT, Problem, RmsOptions, Y, cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Output, Slot};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;

/// The residual step.
pub struct AddRmsNorm;

impl Op for AddRmsNorm {
    const NAME: &'static str = "add_rms_norm";
    const ABOUT: &'static str = "Adds to a sum and normalises that";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., D)"), Slot::new("w", "(D)").wide(), Slot::new("sum", "(..., D)").wide()];
    const OUTPUTS: &'static [Output] = &[Output::new("sum", "(..., D)").wide(), Y];
    const HINT: &'static str = HINT;
    const COTANGENTS: &'static [&'static str] = &[];
    const IN_PLACE: &'static [&'static str] = &["sum"];

    type Options = RmsOptions;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Ok(Problem { eps_mode: call.options.eps_mode, ..Problem::new(call, call.options.eps)? })
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::add(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let sum = inputs.get("sum")? + inputs.get("x")?;
        let of_sum = [("x", sum.clone()), ("w", inputs.get("w")?.clone())].into_iter().collect();
        let mut outputs = reference::forward(problem, &of_sum)?;
        outputs.push("sum", sum);
        Ok(outputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::add(problem, inputs, outputs, lane)
    }
}
