//! Fast sequence-model kernels for CPUs (AVX-512, AVX2, NEON, scalar) and NVIDIA GPUs.
//!
//! Read in this order: [`tensor`] and [`error`], [`op`] (the trait of ops), [`cpu`] and [`cuda`] (the building blocks
//! of kernels), then [`ops`], one folder each. [`place`] is for ops that are made of other ops.

pub mod base;
pub mod cpu;
pub mod cuda;
pub mod op;
pub mod ops;
pub mod place;

pub use base::{chunks, difference, error, tensor};
