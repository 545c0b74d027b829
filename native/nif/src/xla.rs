//! The kernels in XLA programs: registration, and the check whether the kernels support a call.

use crate::answer::answer;
use crate::ops::{find, with_options};
use crate::tensor::{decode_type, describe};
use rustler::{Atom, Env, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{About, Named};
use sidewinder_kernels::tensor::Spec;
use std::path::Path;

/// Registers the handlers with the XLA of a loaded library; returns the platforms that have handlers.
#[rustler::nif(schedule = "DirtyIo")]
fn xla_register<'a>(env: Env<'a>, path: &str) -> Term<'a> {
    answer(env, || sidewinder_xla::register::register(Path::new(path)))
}

/// The target for custom calls of `op` with outputs of these names, types and shapes: on the CPU, or on CUDA with or
/// without TF32. Fails if the kernels do not support them.
#[rustler::nif(schedule = "DirtyIo")]
fn xla_target<'a>(
    env: Env<'a>,
    op: Atom,
    inputs: Term<'a>,
    outputs: Term<'a>,
    options: Term<'a>,
    cuda: Option<bool>,
) -> Term<'a> {
    answer(env, || {
        let op = find(env, op)?;
        let target = || {
            let (inputs, outputs) = (specs(op.about(), inputs)?, specs(op.about(), outputs)?);
            sidewinder_xla::target(&with_options(op, options)?, inputs, &outputs, cuda)
        };
        target().map_err(|error| error.in_op(op.about().name))
    })
}

/// Decodes specs from `{name, type, shape}`.
fn specs(op: &About, tensors: Term) -> Result<Named<Spec>> {
    let malformed =
        |_| Error::new(Kind::Argument, "tensors").expected("{name, type, shape} each").got(describe(tensors));
    let tensors: Vec<(String, Term, Vec<usize>)> = tensors.decode().map_err(malformed)?;
    let specs =
        tensors.into_iter().map(|(name, dtype, dims)| Ok((op.name_of(&name), Spec::new(decode_type(dtype)?, &dims)?)));
    specs.collect()
}
