//! Matrix products: of floats, of quantized blocks, and of ternary numbers.

pub mod blocks;
pub mod linear;
pub mod matmul;
pub mod matrices;
pub mod ternary;
