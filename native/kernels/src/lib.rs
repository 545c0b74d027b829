//! Fast sequence-model kernels for CPUs (AVX-512, AVX2, NEON, scalar) and NVIDIA GPUs.
//!
//! Read in this order: [`tensor`] and [`error`] (what goes in and out), [`op`] (what an op is), [`cpu`] and [`cuda`] (what
//! kernels are written with), then [`ops`], one folder each. [`place`] is for ops that are made of other ops, and
//! [`mamba`] is a model made of them.

pub mod base;
pub mod cpu;
pub mod cuda;
pub mod op;
pub mod ops;
pub mod place;

mod file;
pub mod gguf;
mod json;
pub mod mamba;
mod recognise;
pub mod safetensors;
pub mod tokenizer;

pub use base::{difference, error, tensor};
