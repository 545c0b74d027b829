//! What everything stands on: tensors and errors, and the words that ops, the CPU and CUDA have in common.

pub mod activation;
pub mod difference;
pub mod dtype;
pub mod elementwise;
pub mod error;
pub mod heads;
pub mod tensor;
