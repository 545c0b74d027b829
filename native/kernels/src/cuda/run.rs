//! An op from host memory to host memory.

use super::{Buffer, Device};
use crate::error::Result;
use crate::op::{self, Named, Op};
use crate::tensor::{Described, View, ViewMut};

/// Runs `O` on a device with inputs and outputs on the host; returns when the outputs are written.
pub fn run_host<O: Op>(
    device: &Device,
    options: &O::Options,
    inputs: &Named<View>,
    outputs: Named<ViewMut>,
) -> Result<()> {
    let call = op::Call::<O>::new(op::specs_of_call::<O, _, _>(inputs, &outputs), options)?;
    let lane = device.lane()?;
    let sources = inputs.try_map(|view| Buffer::new(device, view.spec()))?;
    let results = outputs.try_map(|view| Buffer::new(device, view.spec()))?;
    let held = op::held::<O, _, _>(inputs, &outputs);
    let held: Vec<_> = held.map(|(name, output)| Ok((output.view(), results.get(name)?))).collect::<Result<_>>()?;
    let given = inputs.iter().zip(sources.iter()).map(|((_, view), (_, to))| (view.bytes(), to));
    let copies: Vec<_> = given.chain(held.iter().map(|(view, to)| (view.bytes(), *to))).collect();
    lane.upload_all(&copies)?;
    call.cuda(&sources.map(|b| b), &results.map(|b| b), &lane)?;
    let mut copies: Vec<_> =
        outputs.into_iter().zip(results.iter()).map(|((_, view), (_, from))| (from, view.bytes())).collect();
    lane.download_all(&mut copies)
}
