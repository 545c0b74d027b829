//! GGUF files.

use crate::answer::answer;
use crate::tensor::{Output, text};
use crate::watch::Call;
use rustler::{Atom, Encoder, Env, Term};
use sidewinder_files::gguf::{Reader, Value};
use sidewinder_models::watch::{Stage, in_chunks};
use std::path::Path;

mod atoms {
    rustler::atoms! { nan, infinity, neg_infinity }
}

/// The index of a file: a list of `{name, type name in the file, list of sizes, bytes}`.
#[rustler::nif(schedule = "DirtyIo")]
fn gguf_index(env: Env, path: String) -> Term {
    answer(env, || {
        let reader = Reader::open(Path::new(&path))?;
        let entries = reader.entries().iter();
        Ok(entries.map(|e| (&e.name, e.kind.to_string(), &e.shape, e.len).encode(env)).collect::<Vec<_>>())
    })
}

/// The metadata of a file: `{key, value}` pairs.
#[rustler::nif(schedule = "DirtyIo")]
fn gguf_metadata(env: Env, path: String) -> Term {
    answer(env, || {
        let reader = Reader::open(Path::new(&path))?;
        Ok(reader.metadata().map(|(name, value)| (name, term(env, value)).encode(env)).collect::<Vec<_>>())
    })
}

fn term<'a>(env: Env<'a>, value: Value) -> Term<'a> {
    match value {
        Value::Unsigned(number) => number.encode(env),
        Value::Signed(number) => number.encode(env),
        Value::Float(number) => float(env, number),
        Value::Bool(truth) => truth.encode(env),
        Value::Text(bytes) => text(env, bytes),
        Value::Array(array) => array.iter().map(|value| term(env, value)).collect::<Vec<_>>().encode(env),
    }
}

/// A float, or an atom for numbers that are not finite: Erlang has only finite floats.
fn float(env: Env, number: f64) -> Term {
    let atom: Atom = match number {
        _ if number.is_finite() => return number.encode(env),
        f64::INFINITY => atoms::infinity(),
        f64::NEG_INFINITY => atoms::neg_infinity(),
        _ => atoms::nan(),
    };
    atom.encode(env)
}

/// Reads one tensor of a file: `{type name in the file, list of sizes, tensor}`; for block formats the tensor holds
/// bytes.
#[rustler::nif(schedule = "DirtyIo")]
fn gguf_read<'a>(env: Env<'a>, path: String, name: String, watch: Term<'a>) -> Term<'a> {
    answer(env, || {
        let watch = Call::decode(env, watch)?;
        let reader = Reader::open(Path::new(&path))?;
        let entry = reader.entry(&name)?;
        let mut output = Output::new(reader.spec(entry)?)?;
        in_chunks(&watch, Stage::Read, entry.len, |chunks| reader.read(entry, output.view_mut()?.bytes(), chunks))?;
        Ok((entry.kind.name, &entry.shape, output.into_term(env)).encode(env))
    })
}
