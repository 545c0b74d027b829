//! Safetensors files.

use crate::answer::answer;
use crate::tensor::{Output, Tensor};
use rustler::{Encoder, Env, Term};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::safetensors::{self, Reader};
use sidewinder_kernels::tensor::{DType, Described, Spec, View};
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
    answer(env, || {
        let decoded = tensors.iter().map(|(name, term)| Ok((name.as_str(), Tensor::decode(name, *term)?)));
        let decoded: Vec<(&str, Tensor)> = decoded.collect::<Result<_>>()?;
        let views = decoded.iter().map(|(name, tensor)| Ok((*name, tensor.view()?)));
        let views: Vec<(&str, View)> = views.collect::<Result<_>>()?;
        safetensors::write(Path::new(&path), &views)
    })
}

/// The same values, rounded to another type.
#[rustler::nif(schedule = "DirtyCpu")]
fn tensor_cast<'a>(env: Env<'a>, tensor: Term<'a>, to: Term<'a>) -> Term<'a> {
    answer(env, || {
        let tensor = Tensor::decode("tensor", tensor)?;
        let view = tensor.view()?;
        let dtype = crate::tensor::decode_type(to)?;
        let values = view.to_f64();
        if dtype == DType::U8 {
            fit_bytes(values.iter())?;
        }
        let mut output = Output::new(Spec { dtype, ..view.spec() })?;
        output.view_mut()?.store_f64(&values);
        Ok(output.into_term(env))
    })
}

/// Rounding to bytes would make a 0.4 false and a 300 a 255.
fn fit_bytes<'a>(mut values: impl Iterator<Item = &'a f64>) -> Result<()> {
    match values.find(|&v| v.fract() != 0.0 || !(0.0..=255.0).contains(v)) {
        Some(odd) => Err(Error::new(Kind::Argument, "tensor").expected("whole numbers from 0 to 255 for u8").got(odd)),
        None => Ok(()),
    }
}
