//! One token of the Mamba selective scan: from the state of a running sequence and the inputs of one step to the
//! output of that step and the new state. It is defined and computed as the scan with `L = 1`.

use crate::cpu;
use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::ops::scan::selective_scan::{self, Problem, SelectiveScan};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Axis};

options! {
    /// The options of the update: those of the scan that concern a single step.
    pub struct Options {
        ..super::step_size::step;
    }
}

/// The op.
pub struct SelectiveStateUpdate;

/// Inputs that have no time axis here and one of length 1 in the scan.
const PER_STEP: [&str; 5] = ["x", "dt", "B", "C", "z"];

impl Op for SelectiveStateUpdate {
    const NAME: &'static str = "selective_state_update";
    const ABOUT: &'static str = "Mamba selective scan of one token";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, D)"),
        Slot::new("initial_state", "(B, D, N)").wide(),
        Slot::new("dt", "(B, D)"),
        Slot::new("A", "(D, N)").wide(),
        // B and C may have different numbers of groups, which the scan checks.
        Slot::new("B", "(B, N) | (B, G, N)").loose(),
        Slot::new("C", "(B, N) | (B, G, N)").loose(),
        Slot::new("D", "(D)").wide().optional(),
        Slot::new("z", "(B, D)").optional(),
        Slot::new("dt_bias", "(D)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(B, D)"), Output::new("last_state", "(B, D, N)").wide()];
    const HINT: &'static str = "Layout is channel-last: (batch, channels)";
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let as_scan = inputs.iter().map(|(name, spec)| Ok((name.clone(), with_time(name, spec)?)));
        let options = selective_scan::Options {
            dt_softplus: options.dt_softplus,
            dt_clamp: options.dt_clamp,
            return_state: true,
            ..Default::default()
        };
        op::part::<SelectiveScan>(&as_scan.collect::<Result<_>>()?, &options)
            .map(|(problem, _)| problem)
            .map_err(|error| as_update(error, inputs))
    }

    // No reshape is needed: the scan's kernels address memory by the sizes in `problem`, not by shapes.
    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        SelectiveScan::cpu(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let as_scan = inputs.iter().map(|(name, array)| match PER_STEP.contains(&name.as_ref()) {
            true => (name.clone(), array.clone().insert_axis(Axis(1))),
            false => (name.clone(), array.clone()),
        });
        let mut results = SelectiveScan::reference(problem, &as_scan.collect(), &Named::default())?;
        let y = results.expect("y")?.remove_axis(Axis(1));
        let state = results.expect("last_state")?;
        Ok([("y", y), ("last_state", state)].into_iter().collect())
    }

    fn cuda(
        problem: &Problem,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()> {
        SelectiveScan::cuda(problem, inputs, outputs, lane)
    }
}

fn with_time(name: &str, spec: &Spec) -> Result<Spec> {
    if !PER_STEP.contains(&name) {
        return Ok(*spec);
    }
    match spec.shape.split_first() {
        Some((batch, rest)) if !rest.is_empty() => Spec::new(spec.dtype, &[&[*batch, 1], rest].concat()),
        _ => Err(Error::new(Kind::Shape, name).expected("shape (batch, ...)").got(spec.shape)),
    }
}

/// Restates a shape error of the scan's checks with the shapes of this op, which have no time axis.
fn as_update(error: Error, inputs: &Named<Spec>) -> Error {
    let slot = SelectiveStateUpdate::INPUTS.iter().find(|slot| *slot.name == *error.argument);
    match (slot, inputs.find(&error.argument)) {
        (Some(slot), Some(spec)) if error.kind == Kind::Shape => Error::new(Kind::Shape, error.argument)
            .expected(format_args!(
                "shape {} with the sizes of x {} and A {}",
                slot.shape,
                shape(inputs, "x"),
                shape(inputs, "A")
            ))
            .got(spec.shape),
        _ => error,
    }
}

fn shape(inputs: &Named<Spec>, name: &str) -> String {
    inputs.find(name).map_or("(absent)".to_string(), |spec| spec.shape.to_string())
}
