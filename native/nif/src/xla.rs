//! The kernels in programs of XLA: registration, and the check before a call whether the kernels support it.

use crate::answer::answer;
use crate::ops::{find, with_options};
use crate::tensor::{decode_type, describe};
use rustler::{Atom, Env, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{About, Named};
use sidewinder_kernels::tensor::Spec;
use std::path::Path;

/// Registers the handlers with the XLA of a library that is loaded; answers the platforms that have one.
#[rustler::nif(schedule = "DirtyIo")]
fn xla_register<'a>(env: Env<'a>, path: &str) -> Term<'a> {
    answer(env, || sidewinder_xla::register::register(Path::new(path)))
}

/// The target of custom calls of `op` that compute outputs of these names, types and shapes: on the CPU, or on CUDA with
/// or without TF32. Fails where the kernels don't take them.
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

/// Tensors as `{name, type, shape}`.
fn specs(op: &About, tensors: Term) -> Result<Named<Spec>> {
    let malformed =
        |_| Error::new(Kind::Argument, "tensors").expected("{name, type, shape} each").got(describe(tensors));
    let tensors: Vec<(String, Term, Vec<usize>)> = tensors.decode().map_err(malformed)?;
    let specs =
        tensors.into_iter().map(|(name, dtype, dims)| Ok((op.name_of(&name), Spec::new(decode_type(dtype)?, &dims)?)));
    specs.collect()
}
