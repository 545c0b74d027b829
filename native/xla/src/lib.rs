//! Sidewinder's kernels as custom calls of XLA: one generic handler for the CPU and one for CUDA, by XLA's typed FFI.
//!
//! A call names its op, its operands and results, and the op's options in attributes:
//!
//! ```text
//! op = "selective_scan", inputs = "x,dt,A,B,C", outputs = "y", dt_softplus = true
//! ```
//!
//! Kernels work on XLA's memory in place, after the checks that every other call goes through; on CUDA they are queued
//! on XLA's stream. [`register`] registers the handlers with an XLA that is loaded already, and [`sidewinder_xla_host`]
//! and [`sidewinder_xla_cuda`] are for clients that register handlers themselves.

pub mod abi;
mod control;
mod cuda;
pub mod frame;
mod host;
pub mod register;
mod report;
mod value;

use abi::CallFrame;
use frame::Frame;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{AnyOp, Call, Configured, Name, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::Spec;

/// The name of the target in XLA programs.
pub const TARGET: &str = "sidewinder_op";
/// The name for calls that XLA may put into a command buffer: on CUDA those for which [`target`] returns it, on the CPU
/// any.
pub const GRAPH_TARGET: &str = "sidewinder_op_graph";

/// The trait of handlers whose work can be part of a command buffer.
const COMMAND_BUFFER_COMPATIBLE: u32 = 1;

/// Runs a call, or answers a request that XLA makes in place of one.
///
/// # Safety
/// The frame is one of XLA's.
unsafe fn answer(frame: *mut CallFrame, traits: u32, run: fn(&dyn AnyOp, &Frame) -> Result<()>) -> *mut abi::Error {
    let work = |frame: &Frame| {
        let op = ops::find(frame.text("op")?)?;
        run(op, frame).map_err(|error| error.in_op(op.about().name))
    };
    // SAFETY: the caller's promise.
    unsafe { report::answer(frame, traits, work) }
}

/// The handler for the CPU.
///
/// # Safety
/// The frame is one of XLA's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidewinder_xla_host(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    unsafe { answer(frame, 0, host::run) }
}

/// The CUDA handler for any call. It may allocate memory in stream order, which a command buffer cannot hold.
///
/// # Safety
/// The frame is one of XLA's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidewinder_xla_cuda(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    unsafe { answer(frame, 0, cuda::run) }
}

/// The CUDA handler for calls that a command buffer can hold. A call that needs memory of its own is an error.
///
/// # Safety
/// The frame is one of XLA's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidewinder_xla_cuda_graph(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    unsafe { answer(frame, COMMAND_BUFFER_COMPATIBLE, cuda::run) }
}

/// The target for calls of an op with these inputs and results: on the CPU, or on CUDA with or without TF32. Fails if
/// the kernels do not support them.
pub fn target(op: &Configured, inputs: Named<Spec>, results: &Named<Spec>, cuda: Option<bool>) -> Result<&'static str> {
    let call = op(inputs.clone())?;
    check(&call, results)?;
    match cuda {
        Some(allow_tf32) if cuda::fits_graph(&call, &inputs, results, allow_tf32)? => Ok(GRAPH_TARGET),
        _ => Ok(TARGET),
    }
}

/// Checks that a custom call may have these results: some of the call's outputs, none of them changed in place.
fn check(call: &Call, results: &Named<Spec>) -> Result<()> {
    // XLA would copy a cache that is changed in place for each call.
    if let Some(name) = call.op().in_place.iter().find(|name| results.find(name).is_some()) {
        return Err(Error::new(Kind::Argument, *name).expected("no input that is changed in place").got("one"));
    }
    let fits = |(name, spec): (&Name, &Spec)| call.outputs().find(name) == Some(spec);
    match results.iter().all(fits) {
        true => Ok(()),
        false => Err(Error::new(Kind::Argument, "results").expected(shown(call.outputs())).got(shown(results))),
    }
}

fn shown(tensors: &Named<Spec>) -> String {
    tensors.iter().map(|(name, spec)| format!("{name}: {spec}")).collect::<Vec<_>>().join(", ")
}

/// Outputs that kernels write although XLA does not request them.
fn unasked(call: &Call, results: &Named<Spec>) -> Vec<(Name, Spec)> {
    let others = call.outputs().iter().filter(|(name, _)| results.find(name).is_none());
    others.map(|(name, spec)| (name.clone(), *spec)).collect()
}
