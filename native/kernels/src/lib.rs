//! Fast sequence-model kernels for CPUs (AVX-512, AVX2, NEON, scalar) and NVIDIA GPUs.
//!
//! Read in this order: [`tensor`] and [`error`] (what goes in and out), [`op`] (what an op is),
//! [`cpu`] and [`cuda`] (what kernels are written with), then the ops, one folder each. [`place`] is for
//! ops that are made of other ops, and [`mamba`] is a model made of them.

pub mod cpu;
pub mod cuda;
pub mod difference;
pub mod error;
mod file;
pub mod gguf;
mod json;
pub mod matrices;
pub mod op;
pub mod ops;
pub mod place;
mod recognise;
pub mod safetensors;
pub mod tensor;
pub mod tokenizer;

pub mod activations;
pub mod attention;
pub mod block_recurrence;
pub mod blocks;
pub mod causal_conv1d;
pub mod cumulative;
pub mod hds;
pub mod linear;
pub mod linear_scan;
pub mod mamba;
pub mod mamba_block;
pub mod matmul;
pub mod mdi;
pub mod memory;
pub mod mha;
pub mod mmrec_block;
pub mod multi_memory_attention;
pub mod norm;
pub mod rope;
pub mod selective_scan;
pub mod selective_state_update;
pub mod sinusoidal_positions;
pub mod swiglu_mlp;
pub mod ternary;
pub mod transformer_block;
