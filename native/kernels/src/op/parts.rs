//! One sequence in parts that lie on several devices (sequence parallelism).
//!
//! Each part of a sequence starts from the state in which the part before it ends; a gradient goes from the last part to the
//! first, each with the cotangent of the state that the part after it started from. All parts run at once, but for that: on
//! CUDA an op first computes what each part makes of a state of zeros, then states are passed from device to device, and
//! then all outputs follow ([`Lane::states_first`]). Where an op, or a call of it, has no such kernels, a part waits for
//! all of the part before it.

use super::{About, CU_SEQLENS, Call, Configured, Named, Slot};
use crate::cpu::Exec;
use crate::cuda::{Buffer, Device, Lane};
use crate::error::{Error, Kind, Result};
use crate::tensor::{Described, Owned, Spec, View, ViewMut};

/// Checked calls for the parts of a sequence.
pub struct Parts {
    calls: Vec<Call>,
    states: Vec<State>,
    /// Whether states pass from the last part to the first.
    reverse: bool,
}

/// A state that parts pass on.
struct State {
    /// The input of the part that takes it.
    taken: String,
    /// The output of the part that gives it.
    given: String,
}

impl State {
    /// Those of an op, or the cotangents of those of a gradient.
    fn of(op: &About) -> Result<Vec<State>> {
        let [prefix, given] = if op.backward_of.is_some() { ["dlast_", "dinitial_"] } else { ["initial_", "last_"] };
        let of = |name: &str| Some(format!("{given}{}", name.strip_prefix(prefix)?));
        let state = |slot: &Slot| Some(State { taken: slot.name.into(), given: of(slot.name)? });
        let all: Vec<State> = op.inputs.iter().filter_map(state).collect();
        if !all.is_empty() && op.inputs.iter().any(|slot| slot.name == CU_SEQLENS) {
            return Ok(all);
        }
        let expected = "an op over sequences that start from a state, such as selective_scan, or its gradient";
        Err(Error::new(Kind::Argument, "op").expected(expected).got(op.name))
    }
}

impl Parts {
    /// Fails for an op that does not go on from a state.
    pub fn known(op: &About) -> Result<()> {
        State::of(op).map(|_| ())
    }

    /// Checks the inputs of all parts, in the order of time. The options must ask for the last state (of `linear_attention`
    /// with `normalize` also for `last_z`), and all parts but the first of a gradient need the states that they started from.
    pub fn new(op: &About, configured: &Configured, inputs: &[Named<Spec>]) -> Result<Parts> {
        let states = State::of(op)?;
        if inputs.is_empty() {
            return Err(Error::new(Kind::Argument, "parts").expected("the inputs of at least one part").got("none"));
        }
        let mut parts = Parts { calls: vec![], states, reverse: op.backward_of.is_some() };
        let mut calls: Vec<Option<Call>> = inputs.iter().map(|_| None).collect();
        let mut taken = Named::default();
        for at in parts.order(inputs.len()) {
            let call = parts.call(configured, &inputs[at], taken).map_err(|error| of_part(at, error))?;
            let is_last = at + 1 == if parts.reverse { 1 } else { inputs.len() };
            taken = if is_last { Named::default() } else { parts.passed(&call).map_err(|error| of_part(at, error))? };
            calls[at] = Some(call);
        }
        parts.calls = calls.into_iter().flatten().collect();
        Ok(parts)
    }

    /// The call of a part that takes these states.
    fn call(&self, configured: &Configured, inputs: &Named<Spec>, taken: Named<Spec>) -> Result<Call> {
        let mut all = inputs.clone();
        if inputs.find(CU_SEQLENS).is_some() {
            return Err(Error::new(Kind::Argument, CU_SEQLENS).expected("one sequence in parts").got("packed ones"));
        }
        for (name, spec) in taken {
            if inputs.find(&name).is_some() {
                let expected =
                    format!("none, since the part {} gives it", if self.reverse { "after" } else { "before" });
                return Err(Error::new(Kind::Argument, name.as_ref()).expected(expected).got("a tensor"));
            }
            all.push(name, spec);
        }
        configured(all)
    }

    /// The states that a call gives, by the names of the inputs that take them.
    fn passed(&self, call: &Call) -> Result<Named<Spec>> {
        let passed = |state: &State| Some((state.taken.clone(), *call.outputs().find(&state.given)?));
        let passed: Named<Spec> = self.states.iter().filter_map(passed).collect();
        if !passed.is_empty() {
            return Ok(passed);
        }
        Err(match self.reverse {
            true => Error::new(Kind::Argument, "initial_state")
                .expected("the state that this part started from")
                .got("none")
                .hint("The call of the op gives it"),
            false => Error::new(Kind::Option, "return_state").expected("true, for parts of a sequence").got("false"),
        })
    }

    /// The parts in the order in which states pass.
    fn order(&self, parts: usize) -> impl Iterator<Item = usize> + use<> {
        let reverse = self.reverse;
        (0..parts).map(move |turn| if reverse { parts - 1 - turn } else { turn })
    }

    /// The outputs of each part, and the states that it takes from another one.
    pub fn outputs(&self) -> Result<Vec<Named<Spec>>> {
        let mut all: Vec<Named<Spec>> = self.calls.iter().map(|call| call.outputs().clone()).collect();
        let order: Vec<usize> = self.order(all.len()).collect();
        for pair in order.windows(2) {
            self.passed(&self.calls[pair[0]])?.into_iter().for_each(|(name, spec)| all[pair[1]].push(name, spec));
        }
        Ok(all)
    }

    /// Computes on the CPU, part after part; views must have the specs that were checked.
    pub fn cpu(&self, inputs: &[Named<View>], outputs: Vec<Named<ViewMut>>, exec: &Exec) -> Result<()> {
        let mut outputs: Vec<_> = outputs.into_iter().map(Some).collect();
        let mut passed: Named<Owned> = Named::default();
        for at in self.order(self.calls.len()) {
            let mut own = outputs[at].take().unwrap_or_default();
            for (name, state) in passed.iter() {
                own.expect(name)?.bytes().copy_from_slice(state.view().bytes());
            }
            let taken = passed.iter().map(|(name, state)| (name.clone(), state.view()));
            let given = inputs[at].iter().map(|(name, view)| (name.clone(), *view)).chain(taken).collect();
            let written = own.iter_mut().map(|(name, view)| (name.clone(), view.reborrow())).collect();
            self.calls[at].cpu(&given, written, exec).map_err(|error| of_part(at, error))?;
            let given = |state: &State| Some((state.taken.clone(), own.find(&state.given)?.view()));
            passed =
                self.states.iter().filter_map(given).map(|(name, view)| (name, view.cast(view.spec().dtype))).collect();
        }
        Ok(())
    }

    /// Runs all parts, each on a lane of its device from [`lanes_of_parts`]; buffers must have the specs that were checked.
    pub fn cuda(&self, inputs: &[Named<&Buffer>], outputs: &[Named<Buffer>], lanes: &[Lane]) -> Result<()> {
        let mut before: Option<&Named<Buffer>> = None;
        // Memory that goes would wait for the work on it.
        let mut held = vec![];
        for at in self.order(self.calls.len()) {
            let queue = || self.queue(at, &inputs[at], &outputs[at], before, &lanes[at]);
            held.push(queue().map_err(|error| of_part(at, error))?);
            before = Some(&outputs[at]);
        }
        lanes.iter().try_for_each(Lane::synchronize)
    }

    /// Queues a part after the one with the outputs `before`. Returns its inputs.
    fn queue(
        &self,
        at: usize,
        inputs: &Named<&Buffer>,
        outputs: &Named<Buffer>,
        before: Option<&Named<Buffer>>,
        lane: &Lane,
    ) -> Result<Named<Buffer>> {
        // States are copied on another lane: this one waits for them when it needs them. Kernels that ask late for a state
        // rely on its alignment, so those of the caller are copied too.
        let courier = lane.device().lane()?;
        let is_state = |name: &str| ["initial_", "dlast_"].iter().any(|prefix| name.starts_with(prefix));
        let aligned = |(name, buffer): (&super::Name, &&Buffer)| match is_state(name) {
            true => copied(buffer, lane.device(), &courier).map(|copy| (name.clone(), copy)),
            false => Ok((name.clone(), (*buffer).clone())),
        };
        let mut given: Named<Buffer> = inputs.iter().map(aligned).collect::<Result<_>>()?;
        let mut own = outputs.clone();
        for State { taken, given: from } in &self.states {
            let Some((state, to)) = before.and_then(|before| before.find(from)).zip(own.take(taken)) else { continue };
            copy(state, &to, &courier)?;
            given.push(taken.clone(), to);
        }
        self.calls[at].cuda(&given.as_ref(), &own.as_ref(), lane).map(|()| given)
    }
}

fn copied(buffer: &Buffer, device: &Device, courier: &Lane) -> Result<Buffer> {
    let to = Buffer::new(device, buffer.spec())?;
    copy(buffer, &to, courier)?;
    Ok(to)
}

/// Queues a copy. Whoever needs it waits for this copy only, and not for later ones, which may have to wait long.
fn copy(from: &Buffer, to: &Buffer, courier: &Lane) -> Result<()> {
    courier.copy_from(from, to)?;
    courier.finished(to)
}

/// Lanes for the parts of a sequence on these devices.
pub fn lanes_of_parts<'d>(devices: impl Iterator<Item = &'d Device>) -> Result<Vec<Lane>> {
    devices.map(|device| Ok(device.lane()?.states_first())).collect()
}

/// The error of a part, which it names.
pub fn of_part(at: usize, error: Error) -> Error {
    let argument = format!("{} of part {at}", error.argument);
    Error { argument: argument.into(), ..error }
}
