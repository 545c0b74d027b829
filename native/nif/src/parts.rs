//! Runs an op over one sequence in parts.

use crate::ops::{Target, answer_of, buffer_on, decode_inputs, decode_map, named_terms, views, with_options};
use crate::tensor::{Output, Tensor, buffer_term, describe};
use rustler::{Atom, Encoder, Env, ListIterator, Term};
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{self, AnyOp, Named, Parts, lanes_of_parts, of_part};
use sidewinder_kernels::tensor::ViewMut;

scheduled! { run_parts_cpu, run_parts_io => run,
[op: Atom] [parts: Term<'a>] [options: Term<'a>] [target: Term<'a>] }

fn run<'a>(env: Env<'a>, op: Atom, parts: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    answer_of(env, op, |op| run_op(env, op, parts, options, target))
}

fn run_op<'a>(
    env: Env<'a>,
    op: &'static dyn AnyOp,
    parts: Term<'a>,
    options: Term<'a>,
    target: Term<'a>,
) -> Result<Term<'a>> {
    Parts::known(op.about())?;
    let malformed = || Error::new(Kind::Argument, "parts").expected("a list of inputs").got(describe(parts));
    let terms: ListIterator = parts.decode().map_err(|_| malformed())?;
    let inputs: Vec<_> = terms.map(|part| decode_inputs(op.about(), part)).collect::<Result<_>>()?;
    let specs: Vec<_> = inputs.iter().map(op::specs).collect();
    let checked = Parts::new(op.about(), &with_options(op, options)?, &specs)?;
    let devices: Vec<_> = inputs.iter().filter_map(device).collect();
    let target = decode_map("target", target)?;
    if devices.is_empty() {
        return on_binaries(env, &checked, &inputs, &target);
    }
    match inputs.iter().position(|part| device(part).is_none()) {
        Some(at) => Err(of_part(
            at,
            Error::new(Kind::Argument, "tensors").expected("on a device, like those of other parts").got("on the host"),
        )),
        None => on_buffers(env, &checked, &inputs, &devices),
    }
}

/// The device of the first tensor that is on one.
fn device(inputs: &Named<Tensor>) -> Option<Device> {
    inputs.iter().find_map(|(_, tensor)| match tensor {
        Tensor::Device(buffer) => Some(buffer.0.device().clone()),
        _ => None,
    })
}

fn on_binaries<'a>(env: Env<'a>, parts: &Parts, inputs: &[Named<Tensor<'a>>], target: &Target) -> Result<Term<'a>> {
    let given: Vec<_> = inputs.iter().map(views).collect::<Result<_>>()?;
    let new = |part: &Named<_>| part.try_map(|spec| Output::new(*spec));
    let mut outputs: Vec<Named<Output>> = parts.outputs()?.iter().map(new).collect::<Result<_>>()?;
    parts.cpu(&given, outputs.iter_mut().map(to_write).collect::<Result<_>>()?, &target.exec()?)?;
    let terms =
        |part: Named<Output>| named_terms(env, part.into_iter().map(|(name, output)| (name, output.into_term(env))));
    Ok(outputs.into_iter().map(terms).collect::<Vec<_>>().encode(env))
}

fn to_write(outputs: &mut Named<Output>) -> Result<Named<ViewMut<'_>>> {
    outputs.iter_mut().map(|(name, output)| Ok((name.clone(), output.view_mut()?))).collect()
}

fn on_buffers<'a>(env: Env<'a>, parts: &Parts, inputs: &[Named<Tensor<'a>>], devices: &[Device]) -> Result<Term<'a>> {
    let of = |at: usize| {
        let buffers = inputs[at].iter().map(|(name, one)| Ok((name.clone(), buffer_on(&devices[at], name, one)?)));
        buffers.collect::<Result<Named<&Buffer>>>().map_err(|error| of_part(at, error))
    };
    let given: Vec<_> = (0..inputs.len()).map(of).collect::<Result<_>>()?;
    let specs = parts.outputs()?;
    let new = |(part, device): (&Named<_>, &Device)| part.try_map(|spec| Buffer::new(device, *spec));
    let outputs: Vec<Named<Buffer>> = specs.iter().zip(devices).map(new).collect::<Result<_>>()?;
    parts.cuda(&given, &outputs, &lanes_of_parts(devices.iter())?)?;
    let terms =
        |part: Named<Buffer>| named_terms(env, part.into_iter().map(|(name, buffer)| (name, buffer_term(env, buffer))));
    Ok(outputs.into_iter().map(terms).collect::<Vec<_>>().encode(env))
}
