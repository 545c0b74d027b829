//! Calls on CUDA: queued on XLA's stream, in XLA's memory.

use crate::frame::{Frame, Tensor};
use crate::{check, unasked};
use serde::Deserialize;
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Call, Named, Op};

/// How to run a call.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Target {
    /// For the CPU alone.
    #[serde(rename = "level")]
    _level: Option<String>,
    /// For the CPU alone.
    #[serde(rename = "threads")]
    _threads: Option<usize>,
    /// Whether matrix products may round f32 to TF32.
    allow_tf32: bool,
}

/// Queues a call of `O`.
pub fn run<O: Op>(frame: &Frame) -> Result<()> {
    let target: Target = frame.target()?;
    let options: O::Options = frame.options()?;
    let stream = frame.stream()?;
    // SAFETY: the stream is that of the call, which it outlives.
    let device = unsafe { Device::of_stream(stream)? };
    // SAFETY: as above.
    let lane = unsafe { device.lane_on(stream)? }.allow_tf32(target.allow_tf32);
    let inputs = lent::<O>(&frame.operands()?, &lane);
    let mut outputs = lent::<O>(&frame.results()?, &lane);
    let call = Call::<O>::new(op::specs(&inputs), &options)?;
    let results = op::specs(&outputs);
    check(&call, &results)?;
    for (name, spec) in unasked(&call, &results) {
        outputs.push(name, lane.temporary(spec)?);
    }
    call.cuda(&references(&inputs), &references(&outputs), &lane)
}

fn lent<O: Op>(tensors: &[Tensor], lane: &Lane) -> Named<Buffer> {
    // SAFETY: XLA's buffers have the bytes of their shapes, and work on the call's stream may use them.
    let buffer = |tensor: &Tensor| unsafe { lane.lent(tensor.spec, tensor.data as u64) };
    tensors.iter().map(|tensor| (op::name::<O>(tensor.name), buffer(tensor))).collect()
}

fn references(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.map(|buffer| buffer)
}
