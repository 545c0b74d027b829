//! The NIF: decode, check, call, encode; nothing else. What it calls lives in `kernels`.
//!
//! Every function answers `{:ok, value}` or `{:error, map}` with the fields of
//! [`sidewinder_kernels::error::Error`]; a panic becomes such an error too. Nothing prints.

mod answer;
mod files;
mod gguf;
mod held;
mod info;
mod load;
mod mamba;
mod ops;
mod tensor;
mod tokenizer;
mod xla;
