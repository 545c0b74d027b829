//! Safetensors files.

use crate::answer::answer;
use crate::tensor::{Output, Tensor};
use rustler::{Binary, Encoder, Env, OwnedBinary, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::safetensors::{self, Reader};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};
use std::path::Path;

/// What is in a file: a list of `{name, type as the file calls it, list of sizes}`.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_index(env: Env, path: String) -> Term {
    answer(env, || {
        let reader = Reader::open(Path::new(&path))?;
        Ok(reader.entries().iter().map(|e| (&e.name, &e.dtype, &e.shape).encode(env)).collect::<Vec<_>>())
    })
}

/// One tensor of a file.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_read(env: Env, path: String, name: String) -> Term {
    answer(env, || {
        let reader = Reader::open(Path::new(&path))?;
        let entry = reader.entry(&name).ok_or_else(|| {
            Error::new(Kind::File, &*path).expected(format_args!("a tensor `{name}`")).got("a file without it")
        })?;
        let mut output = Output::new(reader.spec(entry)?)?;
        reader.read(entry, output.view_mut()?.bytes())?;
        Ok(output.into_term(env))
    })
}

/// Writes `{name, tensor}` pairs to a file, whole or not at all.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_write<'a>(env: Env<'a>, path: String, tensors: Vec<(String, Term<'a>)>) -> Term<'a> {
    answer(env, || with_views(&tensors, |views| safetensors::write(Path::new(&path), views)))
}

fn with_views<T>(tensors: &[(String, Term)], run: impl FnOnce(&[(&str, View)]) -> Result<T>) -> Result<T> {
    let decoded = tensors.iter().map(|(name, term)| Ok((name.as_str(), Tensor::decode(name, *term)?)));
    let decoded: Vec<(&str, Tensor)> = decoded.collect::<Result<_>>()?;
    let views = decoded.iter().map(|(name, tensor)| Ok((*name, tensor.view()?)));
    run(&views.collect::<Result<Vec<_>>>()?)
}

/// The same values, rounded to another type.
#[rustler::nif(schedule = "DirtyCpu")]
fn tensor_cast<'a>(env: Env<'a>, tensor: Term<'a>, to: Term<'a>) -> Term<'a> {
    answer(env, || {
        let tensor = Tensor::decode("tensor", tensor)?;
        let view = tensor.view()?;
        let dtype = crate::tensor::decode_type(to)?;
        let values = view.to_f64();
        whole(dtype, values.iter())?;
        let mut output = Output::new(Spec { dtype, ..view.spec() })?;
        output.view_mut()?.store_f64(&values);
        Ok(output.into_term(env))
    })
}

/// Rounding to bytes would make a 0.4 false and a 300 a 255, and to other integers likewise.
fn whole<'a>(dtype: DType, mut values: impl Iterator<Item = &'a f64>) -> Result<()> {
    let (least, most) = match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (f64::from(i8::MIN), f64::from(i8::MAX)),
        DType::I16 => (f64::from(i16::MIN), f64::from(i16::MAX)),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        // Beyond these f64 has not all of them.
        DType::I64 => (-9007199254740992.0, 9007199254740992.0),
        _ => return Ok(()),
    };
    match values.find(|&v| v.fract() != 0.0 || !(least..=most).contains(v)) {
        Some(odd) => Err(Error::new(Kind::Argument, "tensor")
            .expected(format_args!("whole numbers from {least} to {most} for {dtype}"))
            .got(odd)),
        None => Ok(()),
    }
}

/// `{name, tensor}` pairs as the bytes of a file.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_encode<'a>(env: Env<'a>, tensors: Vec<(String, Term<'a>)>) -> Term<'a> {
    answer(env, || {
        with_views(&tensors, |views| {
            let bytes = safetensors::to_bytes(views)?;
            let mut binary = OwnedBinary::new(0);
            if !binary.realloc(bytes.len()) {
                let expected = format_args!("{} bytes of memory", bytes.len()).to_string();
                return Err(Error::new(Kind::Memory, "tensors").expected(expected).got("none"));
            }
            binary.as_mut_slice().copy_from_slice(&bytes);
            Ok(binary.release(env))
        })
    })
}

/// The tensors of the bytes of a file: `{name, tensor}` pairs.
#[rustler::nif(schedule = "DirtyIo")]
fn safetensors_decode<'a>(env: Env<'a>, bytes: Binary<'a>) -> Term<'a> {
    answer(env, || {
        let term = |(name, tensor): (String, Owned)| {
            let mut output = Output::new(tensor.spec())?;
            output.view_mut()?.bytes().copy_from_slice(tensor.view().bytes());
            Ok((name, output.into_term(env)))
        };
        safetensors::from_bytes("bytes", &bytes)?.into_iter().map(term).collect::<Result<Vec<_>>>()
    })
}
