//! Calls on CUDA: queued on XLA's stream, in XLA's memory.

use crate::frame::{Frame, Tensor};
use crate::{check, unasked};
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, About, AnyOp, Call, Named};
use sidewinder_kernels::tensor::Spec;
use std::cell::Cell;

/// Queues a call of the op.
pub fn run(op: &dyn AnyOp, frame: &Frame) -> Result<()> {
    let target = frame.target()?;
    let configured = frame.with_options(op)?;
    let stream = frame.stream()?;
    // SAFETY: the stream is that of the call, and outlives it.
    let device = unsafe { Device::of_stream(stream)? };
    // SAFETY: as above.
    let lane = unsafe { device.lane_on(stream)? }.allow_tf32(target.allow_tf32);
    let inputs = lent(op.about(), &frame.operands()?, &lane);
    let mut outputs = lent(op.about(), &frame.results()?, &lane);
    let call = configured(op::specs(&inputs))?;
    let results = op::specs(&outputs);
    check(&call, &results)?;
    for (name, spec) in unasked(&call, &results) {
        outputs.push(name, lane.temporary(spec)?);
    }
    call.cuda(&references(&inputs), &references(&outputs), &lane)
}

/// Whether a CUDA graph can hold a call with these results, that is, whether it needs no memory on the first device
/// other than theirs. Compiles its kernels.
pub fn fits_graph(call: &Call, inputs: &Named<Spec>, results: &Named<Spec>, allow_tf32: bool) -> Result<bool> {
    let fits = Device::get(0)?.fits_graph(|lane| {
        let lane = lane.allow_tf32(allow_tf32);
        let next = Cell::new(ALIGNMENT);
        let buffer = |spec: &Spec| {
            let address = next.get();
            next.set(address + (spec.bytes() as u64).next_multiple_of(ALIGNMENT));
            // SAFETY: no work is queued that reads or writes there.
            unsafe { lane.lent(*spec, address) }
        };
        let (inputs, outputs) = (inputs.map(buffer), call.outputs().map(buffer));
        call.cuda(&references(&inputs), &references(&outputs), &lane)
    });
    match fits {
        Err(error) if error.kind == Kind::Unavailable => Err(error),
        // Other errors of a trial are reported by the call itself.
        fits => Ok(fits.unwrap_or(false) && unasked(call, results).is_empty()),
    }
}

/// XLA aligns its buffers to this.
const ALIGNMENT: u64 = 256;

fn lent(op: &About, tensors: &[Tensor], lane: &Lane) -> Named<Buffer> {
    // SAFETY: XLA's buffers have the bytes of their shapes, and are valid for work on the call's stream.
    let buffer = |tensor: &Tensor| unsafe { lane.lent(tensor.spec, tensor.data as u64) };
    tensors.iter().map(|tensor| (op.name_of(tensor.name), buffer(tensor))).collect()
}

fn references(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.map(|buffer| buffer)
}
