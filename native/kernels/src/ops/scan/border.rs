//! The states that sequences start from and end with, for calls whose lane gives states first
//! ([`Lane::states_first`](crate::cuda::Lane)): other devices wait for the last ones, while the first ones come late.

use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::Named;

/// The states at both ends of sequences; against the direction of time, their cotangents.
#[derive(Clone, Copy)]
pub struct Border<'a> {
    first: Option<&'a Buffer>,
    last: Option<&'a Buffer>,
}

impl<'a> Border<'a> {
    /// Those of a call, or with `reverse` of a gradient.
    pub fn new(inputs: &Named<&'a Buffer>, outputs: &Named<&'a Buffer>, reverse: bool) -> Border<'a> {
        let [first, last] = if reverse { ["dlast_state", "dinitial_state"] } else { ["initial_state", "last_state"] };
        Border { first: inputs.find(first).copied(), last: outputs.find(last).copied() }
    }

    /// The address of the first states, or 0: what is queued next waits for them.
    pub fn first(&self, lane: &Lane) -> Result<u64> {
        self.first.map_or(Ok(0), |buffer| lane.address(buffer))
    }

    /// The address of the last states, or 0.
    pub fn last(&self, lane: &Lane) -> Result<u64> {
        self.last.map_or(Ok(0), |buffer| lane.address(buffer))
    }

    /// Tells that what was queued so far writes the last states.
    pub fn written(&self, lane: &Lane) -> Result<()> {
        self.last.map_or(Ok(()), |buffer| lane.finished(buffer))
    }
}
