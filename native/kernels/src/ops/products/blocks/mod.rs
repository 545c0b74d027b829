//! Block formats of weights, ggml's Q8_0 and Q4_0, reproduced bit by bit: quantizers, and products with them.
//!
//! A row is cut into blocks of 32 values that share a scale `d`, stored as f16:
//!
//! ```text
//! Q8_0   34 bytes   d, 32 x i8 q                             value j = d q[j]
//! Q4_0   18 bytes   d, 16 bytes of two nibbles               value j = d (nibble - 8), j in the low nibble of byte j,
//!                                                            j + 16 in the high one
//! quantize Q8_0     d = max|x| / 127     q[j] = round(x[j] (1/d)), halves away from zero
//! quantize Q4_0     d = m / -8           nibble[j] = min(15, trunc(x[j] (1/d) + 8.5)), m = the first x of largest |x|
//! ```
//!
//! All of this is in f32, each operation rounded, with `1/0 = 0`; f16(d) is stored. (ggml's `quantize_row_q8_0_ref` and
//! `quantize_row_q4_0_ref`.) Where `1/d` overflows, q stays within its range. So it does for values that are not
//! finite, which are refused unless the call allows them.
//!
//! ```text
//! matmul_q8_q8, matmul_q8_q4     y[r,o] = sum over blocks of d_x d_w sum_j q_x[j] q_w[j]     x quantized to Q8_0
//! matmul_f32_q8, matmul_f32_q4   y[r,o] = sum over i of x[r,i] w[o,i]
//! ```
//!
//! Sums within a block are exact integers, all others f32. Products refuse no numbers: a value of x that is not finite
//! makes the results of its row not finite.

mod cpu;
mod cuda;
pub mod format;
mod matmul;
mod problem;
mod quantize;
mod reference;

pub use cpu::{Instructions, multiply_by};
pub(crate) use cuda::dequantize;
pub use cuda::{WALK, WalkLayout};
pub use format::Format;
pub use matmul::{MatmulF32Q4, MatmulF32Q8, MatmulQ8Q4, MatmulQ8Q8};
pub use problem::{Factors, Options, Problem};
pub use quantize::{Dequantize, DequantizeOptions, Quantize, QuantizeOptions};

use crate::tensor::DType;

/// The storage types of quantized and multiplied floats.
pub const STORAGE: &[DType] = &[DType::F32, DType::Bf16, DType::F16];
