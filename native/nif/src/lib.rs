//! The NIF: it decodes, checks, calls and encodes, and does nothing else. The computations are in the other crates.
//!
//! Every function returns `{:ok, value}` or `{:error, map}` with the fields of [`sidewinder_kernels::error::Error`]; a
//! panic becomes such an error too. Nothing is printed.

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
mod watch;
mod xla;
