//! Layers, which are made of other ops.

pub mod mamba_block;
pub mod mha;
pub mod swiglu_mlp;
pub mod transformer_block;
