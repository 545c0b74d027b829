//! Tensors, errors, and types shared by ops, the CPU and CUDA.

pub mod activation;
pub mod chunks;
pub mod difference;
pub mod dtype;
pub mod elementwise;
pub mod error;
pub mod heads;
pub mod scratch;
pub mod tensor;
