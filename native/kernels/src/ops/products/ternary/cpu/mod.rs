//! Ternary numbers on the CPU: [`wide`] has the operations that differ between levels, [`cells`] conversions,
//! [`quantize`] the quantizers to ternary numbers and bytes, [`products`] sums of products, [`matmul`] their prologue
//! and epilogue, [`sums`] dot products of rows and sums of columns.

pub mod cells;
pub mod matmul;
mod products;
pub mod quantize;
pub mod sums;
pub mod wide;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
