//! The NIF: decode, check, call, encode; nothing else. What it calls lives in `kernels`.
//!
//! Every function answers `{:ok, value}` or `{:error, map}` with the fields of
//! [`sidewinder_kernels::error::Error`]; a panic becomes such an error too. Nothing prints.

mod answer;
mod files;
mod gguf;
mod held;
mod info;
mod mamba;
mod ops;
mod tensor;
mod tokenizer;

use rustler::{Env, Term};

fn load(env: Env, _info: Term) -> bool {
    answer::keep_panics_quiet();
    let held = [
        env.register::<tensor::DeviceBuffer>(),
        env.register::<held::Held>(),
        env.register::<files::HeldWriter>(),
        env.register::<mamba::HeldModel>(),
        env.register::<mamba::HeldSession>(),
        env.register::<mamba::HeldTrainer>(),
        env.register::<tokenizer::HeldTokenizer>(),
    ];
    held.iter().all(Result::is_ok)
}

rustler::init!("Elixir.Sidewinder.Native", load = load);
