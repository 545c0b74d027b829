//! Calls on the CPU.

use crate::control::Strict;
use crate::frame::{Frame, Target, Tensor};
use crate::{check, unasked};
use sidewinder_kernels::cpu::{Exec, Level, pool};
use sidewinder_kernels::error::{Error, Result};
use sidewinder_kernels::op::{self, About, AnyOp, Named};
use sidewinder_kernels::tensor::{Owned, View, ViewMut};
use std::slice;

/// Small calls run on the thread from which XLA calls, as direct calls do.
fn exec(target: &Target, work: u64) -> Result<Exec> {
    let default = Exec::default();
    let quick = target.level.is_none() && target.threads.is_none() && work < op::QUICK;
    let threads = target.threads.unwrap_or(if quick { 1 } else { default.threads });
    Ok(Exec {
        level: target.level.as_deref().map_or(Ok(default.level), Level::from_name)?,
        threads: pool::checked(threads)?,
    })
}

/// Runs a call of the op on XLA's memory.
pub fn run(op: &dyn AnyOp, frame: &Frame) -> Result<()> {
    let target = frame.target()?;
    let configured = frame.with_options(op)?;
    let (inputs, outputs) = (frame.operands()?, frame.results()?);
    let inputs = named(op.about(), &inputs, |tensor| View::new(tensor.spec, bytes(tensor)))?;
    let mut outputs = named(op.about(), &outputs, |tensor| ViewMut::new(tensor.spec, bytes_mut(tensor)))?;
    let call = configured(op::specs(&inputs))?;
    let results = op::specs(&outputs);
    check(&call, &results)?;
    let unasked = unasked(&call, &results).into_iter().map(|(name, spec)| Ok((name, Owned::try_any(spec)?)));
    let mut unasked = unasked.collect::<Result<Vec<_>>>()?;
    unasked.iter_mut().for_each(|(name, memory)| outputs.push(name.clone(), memory.view_mut()));
    let exec = exec(&target, call.work())?;
    let _strict = Strict::new();
    call.cpu(&inputs, outputs, &exec)
}

fn named<'t, T>(op: &About, tensors: &[Tensor<'t>], view: impl Fn(Tensor<'t>) -> Result<T>) -> Result<Named<T>> {
    let each = tensors.iter().map(|tensor| {
        let view = view(*tensor).map_err(|error| Error { argument: tensor.name.into(), ..error })?;
        Ok((op.name_of(tensor.name), view))
    });
    each.collect()
}

fn bytes(tensor: Tensor<'_>) -> &[u8] {
    match tensor.spec.bytes() {
        0 => &[],
        // SAFETY: XLA's buffers have the bytes of their shapes, and are not written during a call that reads them.
        bytes => unsafe { slice::from_raw_parts(tensor.data, bytes) },
    }
}

fn bytes_mut(tensor: Tensor<'_>) -> &mut [u8] {
    match tensor.spec.bytes() {
        0 => &mut [],
        // SAFETY: as above; each result has memory of its own, which only this call accesses.
        bytes => unsafe { slice::from_raw_parts_mut(tensor.data, bytes) },
    }
}
