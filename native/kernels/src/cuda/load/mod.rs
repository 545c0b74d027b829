//! The libraries of CUDA, found and loaded at run time: the driver, the compiler NVRTC, and cuBLASLt.

pub(super) mod blas;
pub(super) mod cache;
pub(super) mod compiler;
pub(super) mod driver;
mod find;
