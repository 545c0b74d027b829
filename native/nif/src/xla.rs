//! The kernels in programs of XLA: registration, and the check before a call whether the kernels support it.

use crate::answer::answer;
use crate::ops::decode_map;
use crate::tensor::{decode_type, describe};
use rustler::{Atom, Env, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::for_each_op;
use sidewinder_kernels::op::{self, Named, Op};
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
        let name = op.to_term(env).atom_to_string().unwrap_or_default();
        macro_rules! target_if_named {
            ($op:ty) => {
                if name == <$op>::NAME {
                    return target::<$op>(inputs, outputs, options, cuda).map_err(|e| e.in_op(<$op>::NAME));
                }
            };
        }
        for_each_op!(target_if_named);
        Err(Error::new(Kind::Argument, "op").expected("the name of an op").got(format_args!("`{name}`")))
    })
}

fn target<O: Op>(inputs: Term, outputs: Term, options: Term, cuda: Option<bool>) -> Result<&'static str> {
    let options = decode_map::<O::Options>("options", options)?;
    sidewinder_xla::target::<O>(specs::<O>(inputs)?, &specs::<O>(outputs)?, &options, cuda)
}

/// Tensors as `{name, type, shape}`.
fn specs<O: Op>(tensors: Term) -> Result<Named<Spec>> {
    let malformed =
        |_| Error::new(Kind::Argument, "tensors").expected("{name, type, shape} each").got(describe(tensors));
    let tensors: Vec<(String, Term, Vec<usize>)> = tensors.decode().map_err(malformed)?;
    let specs = tensors
        .into_iter()
        .map(|(name, dtype, dims)| Ok((op::name::<O>(&name), Spec::new(decode_type(dtype)?, &dims)?)));
    specs.collect()
}
