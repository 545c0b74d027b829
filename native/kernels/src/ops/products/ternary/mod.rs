//! Ternary numbers: cells of -1, 0 and +1 in two bits, `value = bit0 - bit1`. A cell with both bits set is not a value:
//! a *sentinel*. Arithmetic treats it as 0 and never fails for it. [`stats`] counts sentinels, and conversions refuse
//! them unless told otherwise.
//!
//! Weights are kept in two *planes* of bits, U8 `(out, ceil(in / 8))`. Cell `i` is in byte `i / 8` at bit `i mod 8`,
//! the least significant first, and each row starts on a byte. Bits past the end of a row are written as 0 and ignored
//! when read. [`layouts`] describes the other forms that files use.
//!
//! [`rules`] quantizes floats to ternary numbers (BitNet b1.58's absmean, Ternary Weight Networks, a threshold), and
//! activations to 8 bits. [`products`] multiplies, [`linear`] and [`net`] are layers made of these, and [`sums`]
//! verifies results by column sums. `reference` implements all of it cell by cell.

mod cpu;
mod cuda;
pub mod dequantize;
mod grid;
pub mod layouts;
pub mod linear;
pub mod net;
pub mod problem;
pub mod products;
mod reference;
pub mod rules;
pub mod stats;
pub mod sums;

pub use cpu::wide::{Extensions, allow};

use crate::tensor::DType;

/// The storage types of floats in ops with ternary numbers. All arithmetic is in f32.
pub const STORAGE: &[DType] = &[DType::F32, DType::Bf16, DType::F16];
