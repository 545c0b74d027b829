//! Tokenizers.

use crate::answer::answer;
use crate::tensor::text;
use rustler::{Binary, Env, ResourceArc, Term};
use sidewinder_kernels::error::Result;
use sidewinder_models::tokenizer::{Tokenizer, Window};
use std::path::Path;

/// A tokenizer as a resource.
pub struct HeldTokenizer(Tokenizer);

impl rustler::Resource for HeldTokenizer {}

/// The tokenizer of a `tokenizer.json`, of a folder with one, or, if the path is empty, of its bytes.
#[rustler::nif(schedule = "DirtyIo")]
fn tokenizer_open(env: Env, path: String) -> Term {
    answer(env, || {
        let tokenizer = if path.is_empty() { Tokenizer::Bytes } else { Tokenizer::open(Path::new(&path))? };
        let vocabulary = tokenizer.vocabulary();
        Ok((ResourceArc::new(HeldTokenizer(tokenizer)), vocabulary))
    })
}

/// Encodes a text to tokens.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_encode<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, text: Binary<'a>) -> Term<'a> {
    answer(env, || -> Result<Vec<u32>> { tokenizer.0.encode(&text) })
}

/// Decodes tokens to text.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_decode(env: Env, tokenizer: ResourceArc<HeldTokenizer>, tokens: Vec<u32>) -> Term {
    answer(env, || Ok(text(env, &tokenizer.0.decode(&tokens)?)))
}

/// The number of a token, or nil.
#[rustler::nif]
fn tokenizer_token<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, text: Binary<'a>) -> Term<'a> {
    answer(env, || Ok(tokenizer.0.token(&text)))
}

/// The number of a special token, or nil.
#[rustler::nif]
fn tokenizer_special<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, text: Binary<'a>) -> Term<'a> {
    answer(env, || Ok(tokenizer.0.special(&text)))
}

/// The token that ends a text, or nil.
#[rustler::nif]
fn tokenizer_end(env: Env, tokenizer: ResourceArc<HeldTokenizer>) -> Term {
    answer(env, || tokenizer.0.end())
}

/// The tokens that begin a text; with `wanted` nil, as the files say.
#[rustler::nif]
fn tokenizer_beginning(env: Env, tokenizer: ResourceArc<HeldTokenizer>, wanted: Option<bool>) -> Term {
    answer(env, || tokenizer.0.beginning(wanted))
}

/// The state of a stream: its recent tokens, how many of them are old, and the text emitted so far for them.
type Parts<'a> = (Vec<u32>, usize, Binary<'a>);

fn window((tokens, old, said): Parts) -> Window {
    Window { tokens, old, said: String::from_utf8_lossy(&said).into_owned() }
}

fn parts(env: Env, window: Window) -> (Vec<u32>, usize, Term) {
    (window.tokens, window.old, text(env, window.said.as_bytes()))
}

/// The initial state of a stream of text after these tokens.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_start(env: Env, tokenizer: ResourceArc<HeldTokenizer>, tokens: Vec<u32>) -> Term {
    answer(env, || Ok(parts(env, tokenizer.0.start(&tokens)?)))
}

/// The text that a token completes, and the next state.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_next<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, before: Parts<'a>, token: u32) -> Term<'a> {
    answer(env, || {
        let mut window = window(before);
        let piece = tokenizer.0.next(&mut window, token)?;
        Ok((text(env, piece.as_bytes()), parts(env, window)))
    })
}

/// The text that the stream holds back as incomplete.
#[rustler::nif(schedule = "DirtyCpu")]
fn tokenizer_rest<'a>(env: Env<'a>, tokenizer: ResourceArc<HeldTokenizer>, before: Parts<'a>) -> Term<'a> {
    answer(env, || Ok(text(env, tokenizer.0.rest(&window(before))?.as_bytes())))
}
