//! Safetensors files.

use crate::answer::answer;
use crate::tensor::{Output, Tensor, binary, decode_shape, decode_type};
use crate::watch::Call;
use rustler::{Binary, Encoder, Env, ResourceArc, Term};
use sidewinder_files::safetensors::{self, Reader, Writer};
use sidewinder_kernels::difference::difference;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use sidewinder_models::watch::{Stage, in_chunks};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The index of a file: a list of `{name, type name in the file, list of sizes}`.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_index(env: Env, path: String) -> Term {
    answer(env, || {
        let reader = Reader::open(Path::new(&path))?;
        Ok(reader.entries().iter().map(|e| (&e.name, &e.dtype, &e.shape).encode(env)).collect::<Vec<_>>())
    })
}

/// The metadata of a file: `{key, text}` pairs.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_metadata(env: Env, path: String) -> Term {
    answer(env, || Ok(Reader::open(Path::new(&path))?.metadata().clone().into_iter().collect::<Vec<_>>()))
}

/// Reads the tensors of these names.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_read<'a>(env: Env<'a>, path: String, names: Vec<String>, watch: Term<'a>) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let reader = Reader::open(Path::new(&path))?;
        let entry = |name: &String| {
            let entry = reader.entry(name).ok_or_else(|| {
                Error::new(Kind::File, &*path).expected(format_args!("a tensor `{name}`")).got("a file without it")
            })?;
            Ok((entry, reader.spec(entry)?))
        };
        let entries = names.iter().map(entry).collect::<Result<Vec<_>>>()?;
        let bytes = entries.iter().map(|(entry, _)| entry.len).sum();
        in_chunks(&watch, Stage::Read, bytes, |chunks| {
            let term = |(entry, spec)| {
                let mut output = Output::new(spec)?;
                reader.read(entry, output.view_mut()?.bytes(), chunks)?;
                Ok(output.into_term(env))
            };
            entries.into_iter().map(term).collect::<Result<Vec<_>>>()
        })
    })
}

/// Writes `{name, tensor}` pairs and `{key, text}` pairs of metadata to a file, completely or not at all.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_write<'a>(
    env: Env<'a>,
    path: String,
    tensors: Vec<(String, Term<'a>)>,
    told: Vec<(String, String)>,
    watch: Term<'a>,
) -> Term<'a> {
    let told = told.into_iter().collect();
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        with_views(&tensors, |views| {
            let bytes = views.iter().map(|(_, view)| view.spec().bytes()).sum();
            in_chunks(&watch, Stage::Write, bytes, |chunks| {
                safetensors::write_in_chunks(Path::new(&path), views, &told, chunks)
            })
        })
    })
}

fn with_views<T>(tensors: &[(String, Term)], run: impl FnOnce(&[(&str, View)]) -> Result<T>) -> Result<T> {
    let decoded = tensors.iter().map(|(name, term)| Ok((name.as_str(), Tensor::decode(name, *term)?)));
    let decoded: Vec<(&str, Tensor)> = decoded.collect::<Result<_>>()?;
    let views = decoded.iter().map(|(name, tensor)| Ok((*name, tensor.view()?)));
    run(&views.collect::<Result<Vec<_>>>()?)
}

/// A file that is being written until it is finished or discarded.
pub struct HeldWriter(Mutex<Option<Writer>>);

impl rustler::Resource for HeldWriter {}

impl HeldWriter {
    fn with<T>(&self, work: impl FnOnce(&mut Option<Writer>) -> Result<T>) -> Result<T> {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn open(writer: &mut Option<Writer>) -> Result<&mut Writer> {
    writer
        .as_mut()
        .ok_or_else(|| Error::new(Kind::Argument, "file").expected("a file that is being written").got("none"))
}

/// Begins a file of tensors `{name, type, shape}`, with `{key, text}` pairs of metadata.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_create<'a>(
    env: Env<'a>,
    path: String,
    specs: Vec<(String, Term<'a>, Term<'a>)>,
    told: Vec<(String, String)>,
) -> Term<'a> {
    answer(env, || {
        let spec = |(name, dtype, shape): &'_ (String, Term<'a>, Term<'a>)| {
            Ok((name.clone(), Spec::new(decode_type(*dtype)?, &decode_shape(*shape)?)?))
        };
        let specs: Vec<(String, Spec)> = specs.iter().map(spec).collect::<Result<_>>()?;
        let specs: Vec<(&str, Spec)> = specs.iter().map(|(name, spec)| (name.as_str(), *spec)).collect();
        Ok(ResourceArc::new(HeldWriter(Mutex::new(Some(Writer::create(
            Path::new(&path),
            &specs,
            &told.into_iter().collect(),
        )?)))))
    })
}

/// Writes one tensor to the file.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_put<'a>(env: Env<'a>, writer: ResourceArc<HeldWriter>, name: String, tensor: Term<'a>) -> Term<'a> {
    answer(env, || {
        let tensor = Tensor::decode(&name, tensor)?;
        writer.with(|writer| open(writer)?.put(&name, tensor.view()?))
    })
}

/// Completes the file and renames it to its final name.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_finish(env: Env, writer: ResourceArc<HeldWriter>) -> Term {
    answer(env, || {
        writer.with(|writer| {
            open(writer)?;
            writer.take().map_or(Ok(()), Writer::finish)
        })
    })
}

/// Discards the file, unless it is finished.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_abandon(env: Env, writer: ResourceArc<HeldWriter>) -> Term {
    answer(env, || {
        writer.with(|writer| {
            *writer = None;
            Ok(())
        })
    })
}

/// The values of a tensor, rounded to another type.
#[rustler::nif(schedule = "DirtyCpu")]
fn tensor_cast<'a>(env: Env<'a>, tensor: Term<'a>, to: Term<'a>) -> Term<'a> {
    answer(env, || {
        let tensor = Tensor::decode("tensor", tensor)?;
        let view = tensor.view()?;
        let dtype = decode_type(to)?;
        whole(dtype, &view)?;
        let mut output = Output::new(Spec { dtype, ..view.spec() })?;
        view.cast_into(output.view_mut()?);
        Ok(output.into_term(env))
    })
}

/// The distance of an f32 tensor from another one of equal shape: the sum of the squared differences, the sum of the
/// other's squares, and the largest difference.
#[rustler::nif(schedule = "DirtyCpu")]
fn tensor_difference<'a>(env: Env<'a>, tensor: Term<'a>, reference: Term<'a>) -> Term<'a> {
    answer(env, || {
        let (tensor, reference) = (Tensor::decode("tensor", tensor)?, Tensor::decode("reference", reference)?);
        let apart = difference(tensor.view()?, reference.view()?)?;
        // Erlang has only finite floats.
        let finite = |number: f64| if number.is_finite() { number } else { f64::MAX };
        Ok((finite(apart.squares), finite(apart.reference), finite(apart.largest)))
    })
}

/// Checks that values are integers in the range of an integer type: rounded to bytes, 0.4 would become false and 300
/// would become 255.
fn whole(dtype: DType, values: &View) -> Result<()> {
    let (least, most) = match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (f64::from(i8::MIN), f64::from(i8::MAX)),
        DType::I16 => (f64::from(i16::MIN), f64::from(i16::MAX)),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        // Beyond these bounds f64 cannot represent every integer.
        DType::I64 => (-9007199254740992.0, 9007199254740992.0),
        _ => return Ok(()),
    };
    match values.find(|v| v.fract() != 0.0 || !(least..=most).contains(&v)) {
        Some(odd) => Err(Error::new(Kind::Argument, "tensor")
            .expected(format_args!("whole numbers from {least} to {most} for {dtype}"))
            .got(odd)),
        None => Ok(()),
    }
}

/// `{name, tensor}` pairs as the bytes of a file.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_encode<'a>(env: Env<'a>, tensors: Vec<(String, Term<'a>)>) -> Term<'a> {
    answer(env, || with_views(&tensors, |views| binary(env, &safetensors::to_bytes(views)?)))
}

/// The tensors of the bytes of a file: `{name, tensor}` pairs.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_decode<'a>(env: Env<'a>, bytes: Binary<'a>) -> Term<'a> {
    answer(env, || {
        let term = |(name, tensor): (String, Owned)| Ok((name, Output::copied(tensor.view())?.into_term(env)));
        safetensors::from_bytes("bytes", &bytes)?.into_iter().map(term).collect::<Result<Vec<_>>>()
    })
}
