//! Runs an op from host memory to host memory.

use super::{Call, Named};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::tensor::{Described, View, ViewMut};

/// Runs a call on a lane with inputs and outputs on the host. Returns when the outputs are written.
pub fn run_host(call: &Call, inputs: &Named<View>, outputs: Named<ViewMut>, lane: &Lane) -> Result<()> {
    let device = lane.device();
    let sources = inputs.try_map(|view| Buffer::new(device, view.spec()))?;
    let results = outputs.try_map(|view| Buffer::new(device, view.spec()))?;
    let held = call.op().held(inputs, &outputs);
    let held: Vec<_> = held.map(|(name, output)| Ok((output.view(), results.get(name)?))).collect::<Result<_>>()?;
    let given = inputs.iter().zip(sources.iter()).map(|((_, view), (_, to))| (view.bytes(), to));
    let copies: Vec<_> = given.chain(held.iter().map(|(view, to)| (view.bytes(), *to))).collect();
    lane.upload_all(&copies)?;
    call.cuda(&sources.as_ref(), &results.as_ref(), lane)?;
    let mut copies: Vec<_> =
        outputs.into_iter().zip(results.iter()).map(|((_, view), (_, from))| (from, view.bytes())).collect();
    lane.download_all(&mut copies)
}
