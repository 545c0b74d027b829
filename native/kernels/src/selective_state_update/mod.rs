//! One token of the Mamba selective scan: from the state of a running sequence and the inputs of one step to the
//! output of that step and the new state. It is defined and computed as the scan with `L = 1`.

use crate::cpu;
use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::op::{Named, Op, OptionDoc, Slot};
use crate::selective_scan::{self, Problem, SelectiveScan};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Axis};
use serde::Deserialize;

/// The options of the update: those of the scan that concern a single step.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Apply softplus to `dt + dt_bias`.
    pub dt_softplus: bool,
    /// Clamp the step to these bounds, both inside, rounded to the type of the arithmetic.
    pub dt_clamp: Option<(f64, f64)>,
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
        Slot::new("B", "(B, N) | (B, G, N)"),
        Slot::new("C", "(B, N) | (B, G, N)"),
        Slot::new("D", "(D)").wide().optional(),
        Slot::new("z", "(B, D)").optional(),
        Slot::new("dt_bias", "(D)").wide().optional(),
    ];
    const OPTIONS: &'static [OptionDoc] = &[selective_scan::DT_SOFTPLUS, selective_scan::DT_CLAMP];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let as_scan = inputs.iter().map(|(name, spec)| Ok((name.clone(), with_time(name, spec)?)));
        let options = selective_scan::Options {
            dt_softplus: options.dt_softplus,
            dt_clamp: options.dt_clamp,
            return_state: true,
            ..Default::default()
        };
        SelectiveScan::check(&as_scan.collect::<Result<_>>()?, &options).map_err(|error| as_update(error, inputs))
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let Problem { batch, channels, state, dtype, .. } = *problem;
        let y = Spec::new(dtype, &[batch, channels])?;
        let state = Spec::new(dtype.wide(), &[batch, channels, state])?;
        Ok([("y", y), ("last_state", state)].into_iter().collect())
    }

    // The scan reads and writes plain memory by its problem, whatever the shapes here.
    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        SelectiveScan::cpu(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        let as_scan = inputs.iter().map(|(name, array)| match PER_STEP.contains(&name.as_ref()) {
            true => (name.clone(), array.clone().insert_axis(Axis(1))),
            false => (name.clone(), array.clone()),
        });
        let mut results = SelectiveScan::reference(problem, &as_scan.collect())?;
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

/// Puts an error of the scan's checks in this op's terms: shapes without time.
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
