//! Running ops: one function for all of them, under three schedulers.

use crate::answer::answer;
use crate::tensor::{Output, Tensor, buffer_term, describe};
use rustler::{Atom, Encoder, Env, ListIterator, MapIterator, Term};
use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer, Visitor};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{self, Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::for_each_op;
use sidewinder_kernels::op::{self, Named, Op};

/// Where and how to run.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Target {
    /// A CUDA device; `None` is the CPU.
    device: Option<usize>,
    /// A CPU level by name; `None` is the best.
    level: Option<String>,
    /// CPU threads; `None` is the default.
    threads: Option<usize>,
}

impl Target {
    fn exec(&self) -> Result<Exec> {
        let default = Exec::default();
        Ok(Exec {
            level: self.level.as_deref().map_or(Ok(default.level), Level::from_name)?,
            threads: self.threads.map_or(Ok(default.threads), sidewinder_kernels::cpu::pool::checked)?,
        })
    }
}

/// For work far under a millisecond.
#[rustler::nif]
fn run_quick<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

/// For longer work on the CPU.
#[rustler::nif(schedule = "DirtyCpu")]
fn run_cpu<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

/// For work on a GPU, which is waiting as seen from here.
#[rustler::nif(schedule = "DirtyIo")]
fn run_io<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    run(env, op, inputs, options, target)
}

fn run<'a>(env: Env<'a>, op: Atom, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Term<'a> {
    answer(env, || {
        let name = op.to_term(env).atom_to_string().unwrap_or_default();
        macro_rules! run_if_named {
            ($op:ty) => {
                if name == <$op>::NAME {
                    return run_op::<$op>(env, inputs, options, target).map_err(|e| e.in_op(<$op>::NAME));
                }
            };
        }
        for_each_op!(run_if_named);
        Err(Error::new(Kind::Argument, "op").expected("the name of an op").got(format_args!("`{name}`")))
    })
}

fn run_op<'a, O: Op>(env: Env<'a>, inputs: Term<'a>, options: Term<'a>, target: Term<'a>) -> Result<Term<'a>> {
    let options: O::Options = decode_map("options", options)?;
    let target: Target = decode_map("target", target)?;
    let inputs = decode_inputs::<O>(inputs)?;
    let on_device = inputs.iter().any(|(_, tensor)| matches!(tensor, Tensor::Device(_)));
    match target.device {
        Some(ordinal) if on_device => on_buffers::<O>(env, &inputs, &options, &Device::get(ordinal)?),
        device => on_binaries::<O>(env, &inputs, &options, device, &target),
    }
}

/// A plain map with atoms as keys, to be decoded into a struct. For structs, rustler's own decoder
/// asks for Elixir structs, and for field names it takes no atoms.
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

fn decode_map<T: DeserializeOwned>(what: &str, term: Term) -> Result<T> {
    T::deserialize(PlainMap(term)).map_err(|e| {
        Error::new(Kind::Option, what)
            .expected("known keys and values of their types")
            .got(format_args!("{} ({e})", describe(term)))
    })
}

fn decode_inputs<O: Op>(term: Term) -> Result<Named<Tensor>> {
    let malformed = || Error::new(Kind::Argument, "inputs").expected("a list of {name, tensor}").got(describe(term));
    let pairs: ListIterator = term.decode().map_err(|_| malformed())?;
    pairs
        .map(|pair| {
            let (name, tensor) = pair.decode::<(&str, Term)>().map_err(|_| malformed())?;
            Ok((op::name::<O>(name), Tensor::decode(name, tensor)?))
        })
        .collect()
}

fn on_binaries<'a, O: Op>(
    env: Env<'a>,
    inputs: &Named<Tensor<'a>>,
    options: &O::Options,
    device: Option<usize>,
    target: &Target,
) -> Result<Term<'a>> {
    let views: Named<_> = inputs
        .iter()
        .map(|(name, tensor)| {
            Ok((name.clone(), tensor.view().map_err(|e| Error { argument: name.as_ref().into(), ..e })?))
        })
        .collect::<Result<_>>()?;
    let call = op::Call::<O>::new(op::specs(&views), options)?;
    let mut outputs = Vec::new();
    for (name, spec) in call.outputs().iter() {
        outputs.push((name.clone(), Output::new(*spec)?));
    }
    let to = outputs.iter_mut().map(|(name, output)| Ok((name.clone(), output.view_mut()?))).collect::<Result<_>>()?;
    match device {
        None => call.cpu(&views, to, &target.exec()?)?,
        Some(ordinal) => cuda::run_host::<O>(&Device::get(ordinal)?, options, &views, to)?,
    }
    Ok(named_terms(env, outputs.into_iter().map(|(name, output)| (name, output.into_term(env)))))
}

fn on_buffers<'a, O: Op>(
    env: Env<'a>,
    inputs: &Named<Tensor<'a>>,
    options: &O::Options,
    device: &Device,
) -> Result<Term<'a>> {
    let buffers = inputs.iter().map(|(name, tensor)| Ok((name.clone(), buffer_on(device, name, tensor)?)));
    let buffers: Named<&Buffer> = buffers.collect::<Result<_>>()?;
    let call = op::Call::<O>::new(op::specs(&buffers), options)?;
    let mut outputs: Vec<(op::Name, Buffer)> = Vec::new();
    for (name, spec) in call.outputs().iter() {
        outputs.push((name.clone(), Buffer::new(device, *spec)?));
    }
    let lane = device.lane()?;
    let to: Named<&Buffer> = outputs.iter().map(|(name, buffer)| (name.clone(), buffer)).collect();
    call.cuda(&buffers, &to, &lane)?;
    lane.synchronize()?;
    Ok(named_terms(env, outputs.into_iter().map(|(name, buffer)| (name, buffer_term(env, buffer)))))
}

fn buffer_on<'t>(device: &Device, name: &str, tensor: &'t Tensor) -> Result<&'t Buffer> {
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

fn named_terms<'a>(env: Env<'a>, terms: impl Iterator<Item = (op::Name, Term<'a>)>) -> Term<'a> {
    let pairs: Vec<(Term, Term)> = terms.map(|(name, term)| (name.as_ref().encode(env), term)).collect();
    Term::map_from_pairs(env, &pairs).expect("distinct names")
}
