//! Ternary numbers on the CPU: [`wide`] is what the levels differ in, [`cells`] conversions, [`quantize`] floats to
//! ternary numbers and to bytes, [`products`] sums of products.

pub mod cells;
pub mod products;
pub mod quantize;
pub mod wide;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
