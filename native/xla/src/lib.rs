//! Sidewinder's kernels as custom calls of XLA: one generic handler for the CPU and one for CUDA, by XLA's typed FFI.
//!
//! A call names its op, its operands and results, and the op's options in attributes:
//!
//! ```text
//! op = "selective_scan", inputs = "x,dt,A,B,C", outputs = "y", dt_softplus = true
//! ```
//!
//! Kernels work on XLA's memory where it lies, by the checks that every other call goes through; on CUDA they are queued
//! on XLA's stream. [`register`] makes the handlers known to an XLA that is loaded already, and
//! [`sidewinder_xla_host`] and [`sidewinder_xla_cuda`] are for clients that register handlers themselves.

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
use sidewinder_kernels::for_each_op;
use sidewinder_kernels::op::{Call, Name, Named, Op};
use sidewinder_kernels::tensor::Spec;
use std::collections::HashMap;
use std::sync::LazyLock;

/// The target's name in programs of XLA.
pub const TARGET: &str = "sidewinder_op";

type Run = fn(&Frame) -> Result<()>;

/// How each op runs, by its name.
macro_rules! table {
    ($platform:ident) => {
        LazyLock::new(|| {
            let mut ops: HashMap<&str, Run> = HashMap::new();
            macro_rules! add {
                ($op:ty) => {
                    ops.insert(<$op>::NAME, $platform::run::<$op>)
                };
            }
            for_each_op!(add);
            ops
        })
    };
}

static HOST: LazyLock<HashMap<&str, Run>> = table!(host);
static CUDA: LazyLock<HashMap<&str, Run>> = table!(cuda);

fn run(ops: &HashMap<&str, Run>, frame: &Frame) -> Result<()> {
    let name = frame.text("op")?;
    let unknown = || Error::new(Kind::Argument, "op").expected("the name of an op").got(format_args!("`{name}`"));
    ops.get(name).ok_or_else(unknown)?(frame).map_err(|error| error.in_op(name))
}

/// The handler for the CPU.
///
/// # Safety
/// The frame is one of XLA's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidewinder_xla_host(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    unsafe { report::answer(frame, 0, |frame| run(&HOST, frame)) }
}

/// The handler for CUDA. It takes memory in the order of the stream, which a command buffer can't hold, so it has no trait.
///
/// # Safety
/// The frame is one of XLA's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidewinder_xla_cuda(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    unsafe { report::answer(frame, 0, |frame| run(&CUDA, frame)) }
}

/// Whether a custom call may be given these results: some of what the call gives, in memory of their own.
pub fn check<O: Op>(call: &Call<O>, results: &Named<Spec>) -> Result<()> {
    // A cache that is changed in place would be copied with each call.
    if let Some(name) = O::IN_PLACE.iter().find(|name| results.find(name).is_some()) {
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

/// What the call gives beside these results. Kernels write it, and XLA does not ask for it.
fn unasked<O: Op>(call: &Call<O>, results: &Named<Spec>) -> Vec<(Name, Spec)> {
    let others = call.outputs().iter().filter(|(name, _)| results.find(name).is_none());
    others.map(|(name, spec)| (name.clone(), *spec)).collect()
}
