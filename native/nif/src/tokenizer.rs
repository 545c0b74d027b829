//! Tokenizers.

use crate::answer::answer;
use crate::mamba::binary;
use rustler::{Binary, Env, ResourceArc, Term};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tokenizer::Tokenizer;
use std::path::Path;

/// A tokenizer that Elixir holds on to.
pub struct HeldTokenizer(Tokenizer);

impl rustler::Resource for HeldTokenizer {}

/// That of a `tokenizer.json`, of a folder with one, or with an empty path that of bytes.
#[rustler::nif(schedule = "DirtyIo")]
fn tokenizer_open(env: Env, path: String) -> Term {
    answer(env, || {
        let tokenizer = if path.is_empty() { Tokenizer::Bytes } else { Tokenizer::open(Path::new(&path))? };
        let vocabulary = tokenizer.vocabulary();
        Ok((ResourceArc::new(HeldTokenizer(tokenizer)), vocabulary))
    })
}

/// The tokens of a text.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_encode<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, text: Binary<'a>) -> Term<'a> {
    answer(env, || -> Result<Vec<u32>> { tokenizer.0.encode(&text) })
}

/// The text of tokens.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_decode(env: Env, tokenizer: ResourceArc<HeldTokenizer>, tokens: Vec<u32>) -> Term {
    answer(env, || Ok(binary(env, &tokenizer.0.decode(&tokens)?)))
}

/// The number of a token, or nil.
#[rustler::nif]
fn tokenizer_token<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, text: Binary<'a>) -> Term<'a> {
    answer(env, || Ok(tokenizer.0.token(&text)))
}
