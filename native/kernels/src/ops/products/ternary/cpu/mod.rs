//! Ternary numbers on the CPU: [`wide`] holds what differs between levels, [`cells`] conversions, [`quantize`] the
//! quantizers to ternary numbers and bytes, [`products`] sums of products.

pub mod cells;
pub mod products;
pub mod quantize;
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
