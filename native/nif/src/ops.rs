//! Runs ops: one function for all of them, under three schedulers.

use crate::answer::answer;
use crate::held::{Held, Memory};
use crate::tensor::{Output, Tensor, buffer_term, describe};
use crate::watch;
use rustler::{Atom, Encoder, Env, ListIterator, MapIterator, ResourceArc, Term};
use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer, Visitor};
use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{self, About, AnyOp, Call, Configured, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{Spec, View};
use sidewinder_models::watch::{Stage, Watch, in_chunks};
use std::fmt::Display;
use std::sync::MutexGuard;

/// Where and how to run an op.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Target {
    /// A CUDA device; `None` is the CPU.
    pub device: Option<usize>,
    /// A CPU level by name; `None` is the best.
    level: Option<String>,
    /// CPU threads; `None` is the default.
    threads: Option<usize>,
    /// Whether matrix products on CUDA may round f32 to TF32.
    pub allow_tf32: bool,
    /// A call with at least this much work is not run, and its work is returned instead.
    below: Option<u64>,
}

impl Target {
    fn lane(&self, device: &Device) -> Result<Lane> {
        Ok(device.lane()?.allow_tf32(self.allow_tf32))
    }

    /// How to run on the CPU.
    pub fn exec(&self) -> Result<Exec> {
        let default = Exec::default();
        Ok(Exec {
            level: self.level.as_deref().map_or(Ok(default.level), Level::from_name)?,
            threads: self.threads.map_or(Ok(default.threads), sidewinder_kernels::cpu::pool::checked)?,
        })
    }
}

/// For calls far shorter than a millisecond, as the target's `below` ensures; see [`Call::work`](op::Call::work).
#[rustler::nif]
fn run_quick<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

/// For longer work on the CPU.
#[rustler::nif(schedule = "DirtyCpu")]
fn run_cpu<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

/// For work on a GPU, during which the calling thread only waits.
#[rustler::nif(schedule = "DirtyIo")]
fn run_io<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

fn run<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    answer_of(env, op, |op| run_op(env, op, inputs, options, target, None))
}

scheduled! { run_watched_cpu, run_watched_io => run_watched,
[op: Atom] [inputs: Term<'a>] [options: Term<'a>] [target: Term<'a>] [watch: Term<'a>] }

/// Runs an op that quantizes or dequantizes, in chunks that are reported.
fn run_watched<'a>(
    env: Env<'a>,
    op: Atom,
    inputs: Term<'a>,
    options: Term<'a>,
    target: Term<'a>,
    watch: Term<'a>,
) -> Term<'a> {
    answer_of(env, op, |op| {
        let watch = watch::Call::decode(env, watch)?;
        let stage = if op.about().name.starts_with("dequantize") { Stage::Dequantize } else { Stage::Quantize };
        run_op(env, op, inputs, options, target, Some((&watch, stage)))
    })
}

/// What `run` answers for the op of that name, with the op in its errors.
pub fn answer_of<'a>(env: Env<'a>, op: Atom, run: impl FnOnce(&'static dyn AnyOp) -> Result<Term<'a>>) -> Term<'a> {
    answer(env, || {
        let op = find(env, op)?;
        run(op).map_err(|error| error.in_op(op.about().name))
    })
}

/// The op of that name.
pub fn find(env: Env, op: Atom) -> Result<&'static dyn AnyOp> {
    ops::find(&op.to_term(env).atom_to_string().unwrap_or_default())
}

fn run_op<'a>(
    env: Env<'a>,
    op: &'static dyn AnyOp,
    inputs: Term<'a>,
    options: Term<'a>,
    target: Term<'a>,
    watched: Option<(&dyn Watch, Stage)>,
) -> Result<Term<'a>> {
    let configured = with_options(op, options)?;
    let target: Target = decode_map("target", target)?;
    let inputs = decode_inputs(op.about(), inputs)?;
    let on_device = inputs.iter().any(|(_, tensor)| match tensor {
        Tensor::Device(_) => true,
        Tensor::Held(held) => held.device().is_some(),
        _ => false,
    });
    let call = configured(op::specs(&inputs))?;
    if target.below.is_some_and(|limit| call.work() >= limit) {
        return Ok(call.work().encode(env));
    }
    let (inputs, held) = apart(op.about(), inputs)?;
    let held = lock(&held)?;
    let run = |chunks: Chunks| match target.device {
        Some(ordinal) if on_device => {
            on_buffers(env, &call, &inputs, held, &target.lane(&Device::get(ordinal)?)?, chunks)
        }
        _ => on_binaries(env, &call, &inputs, held, &target, chunks),
    };
    match watched {
        Some((watch, stage)) => in_chunks(watch, stage, call.parts(), run),
        None => run(Chunks::WHOLE),
    }
}

/// The inputs to read, and those to be changed in place.
type Apart<'a> = (Named<Tensor<'a>>, Vec<(op::Name, ResourceArc<Held>)>);

fn apart<'a>(op: &About, inputs: Named<Tensor<'a>>) -> Result<Apart<'a>> {
    let (mut others, mut held) = (Named::default(), Vec::new());
    for (name, tensor) in inputs {
        match tensor {
            Tensor::Held(memory) if op.in_place.contains(&name.as_ref()) => held.push((name, memory)),
            other => others.push(name, other),
        }
    }
    Ok((others, held))
}

/// Locks the memories, always in one order, so that calls cannot deadlock.
fn lock<'h>(held: &'h [(op::Name, ResourceArc<Held>)]) -> Result<Vec<(op::Name, MutexGuard<'h, Memory>)>> {
    let address = |held: &ResourceArc<Held>| &raw const **held as usize;
    let mut sorted: Vec<_> = held.iter().collect();
    sorted.sort_by_key(|(_, held)| address(held));
    if let Some(pair) = sorted.windows(2).find(|pair| address(&pair[0].1) == address(&pair[1].1)) {
        return Err(Error::new(Kind::Argument, &*pair[1].0)
            .expected("memory of its own")
            .got("that of another input")
            .hint("Give each input a cache of its own"));
    }
    Ok(sorted.into_iter().map(|(name, held)| (name.clone(), held.lock())).collect())
}

/// Names and specs of the outputs that have no memory yet.
fn missing(call: &Call, held: &[(op::Name, MutexGuard<Memory>)]) -> impl Iterator<Item = (op::Name, Spec)> {
    let is_held = |name: &op::Name| held.iter().any(|(held, _)| held == name);
    call.outputs().iter().filter(move |(name, _)| !is_held(name)).map(|(name, spec)| (name.clone(), *spec))
}

/// A plain map with atoms as keys, to be decoded into a struct. rustler's own decoder expects Elixir structs, and does
/// not accept atoms as field names.
struct PlainMap<'a>(Term<'a>);

impl<'de, 'a: 'de> serde::Deserializer<'de> for PlainMap<'a> {
    type Error = rustler::serde::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, Self::Error> {
        let pairs = MapIterator::new(self.0).ok_or(Self::Error::ExpectedMap)?;
        let key = |term: Term| term.atom_to_string().unwrap_or_else(|_| describe(term));
        visitor.visit_map(MapDeserializer::new(pairs.map(|(k, v)| (key(k), Value(v)))))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Value<'a>(Term<'a>);

impl<'de, 'a: 'de> IntoDeserializer<'de, rustler::serde::Error> for Value<'a> {
    type Deserializer = rustler::serde::Deserializer<'a>;

    fn into_deserializer(self) -> Self::Deserializer {
        self.0.into()
    }
}

/// Decodes a map of options; fails for unknown keys and wrong values.
pub fn decode_map<T: DeserializeOwned>(what: &str, term: Term) -> Result<T> {
    T::deserialize(PlainMap(term)).map_err(|e| wrong_map(what, term, e))
}

/// The op with the options of a map.
pub fn with_options(op: &dyn AnyOp, options: Term) -> Result<Configured> {
    let mut map = <dyn erased_serde::Deserializer>::erase(PlainMap(options));
    op.with(&mut map).map_err(|e| wrong_map("options", options, e))
}

fn wrong_map(what: &str, term: Term, why: impl Display) -> Error {
    Error::new(Kind::Option, what)
        .expected("known keys and values of their types")
        .got(format_args!("{} ({why})", describe(term)))
}

/// Decodes a list of tensors with their names.
pub fn decode_inputs<'a>(op: &About, term: Term<'a>) -> Result<Named<Tensor<'a>>> {
    let malformed = || Error::new(Kind::Argument, "inputs").expected("a list of {name, tensor}").got(describe(term));
    let pairs: ListIterator = term.decode().map_err(|_| malformed())?;
    pairs
        .map(|pair| {
            let (name, tensor) = pair.decode::<(&str, Term)>().map_err(|_| malformed())?;
            Ok((op.name_of(name), Tensor::decode(name, tensor)?))
        })
        .collect()
}

/// Views of tensors on the host.
pub fn views<'t>(inputs: &'t Named<Tensor>) -> Result<Named<View<'t>>> {
    let view = |(name, tensor): (&op::Name, &'t Tensor)| {
        Ok((name.clone(), tensor.view().map_err(|e| Error { argument: name.as_ref().into(), ..e })?))
    };
    inputs.iter().map(view).collect()
}

fn on_binaries<'a>(
    env: Env<'a>,
    call: &Call,
    inputs: &Named<Tensor<'a>>,
    mut held: Vec<(op::Name, MutexGuard<Memory>)>,
    target: &Target,
    chunks: Chunks,
) -> Result<Term<'a>> {
    let views = views(inputs)?;
    let mut outputs =
        missing(call, &held).map(|(name, spec)| Ok((name, Output::new(spec)?))).collect::<Result<Vec<_>>>()?;
    let new = outputs.iter_mut().map(|(name, output)| Ok((name.clone(), output.view_mut()?)));
    let changed = held.iter_mut().map(|(name, memory)| Ok((name.clone(), memory.on_host(name)?.view_mut()?)));
    let to = new.chain(changed).collect::<Result<_>>()?;
    match target.device {
        None => call.cpu_in_chunks(&views, to, &target.exec()?, chunks)?,
        Some(ordinal) => {
            op::run_host(call, &views, to, &target.lane(&Device::get(ordinal)?)?)?;
            (chunks.done)(call.parts())?;
        }
    }
    Ok(named_terms(env, outputs.into_iter().map(|(name, output)| (name, output.into_term(env)))))
}

fn on_buffers<'a>(
    env: Env<'a>,
    call: &Call,
    inputs: &Named<Tensor<'a>>,
    held: Vec<(op::Name, MutexGuard<Memory>)>,
    lane: &Lane,
    chunks: Chunks,
) -> Result<Term<'a>> {
    let device = lane.device();
    let buffers = inputs.iter().map(|(name, tensor)| Ok((name.clone(), buffer_on(device, name, tensor)?)));
    let buffers: Named<&Buffer> = buffers.collect::<Result<_>>()?;
    let outputs =
        missing(call, &held).map(|(name, spec)| Ok((name, Buffer::new(device, spec)?))).collect::<Result<Vec<_>>>()?;
    let new = outputs.iter().map(|(name, buffer)| Ok((name.clone(), buffer)));
    let changed = held.iter().map(|(name, memory)| Ok((name.clone(), memory.on_device(name, device)?)));
    let to: Named<&Buffer> = new.chain(changed).collect::<Result<_>>()?;
    call.cuda(&buffers, &to, lane)?;
    lane.synchronize()?;
    (chunks.done)(call.parts())?;
    Ok(named_terms(env, outputs.into_iter().map(|(name, buffer)| (name, buffer_term(env, buffer)))))
}

/// The memory of a tensor that must be on this device.
pub fn buffer_on<'t>(device: &Device, name: &str, tensor: &'t Tensor) -> Result<&'t Buffer> {
    let wrong = |got: String| {
        Error::new(Kind::Argument, name)
            .expected(format_args!("a tensor on {device}, like the others"))
            .got(got)
            .hint("Copy it with Sidewinder.Tensor.to_device/2")
    };
    match tensor {
        Tensor::Device(buffer) if buffer.0.device() == device => Ok(&buffer.0),
        Tensor::Device(buffer) => Err(wrong(buffer.0.device().to_string())),
        _ => Err(wrong("one on the host".to_string())),
    }
}

/// A map of tensors by name.
pub fn named_terms<'a>(env: Env<'a>, terms: impl Iterator<Item = (op::Name, Term<'a>)>) -> Term<'a> {
    let pairs: Vec<(Term, Term)> = terms.map(|(name, term)| (name.as_ref().encode(env), term)).collect();
    Term::map_from_pairs(env, &pairs).expect("distinct names")
}
