//! Matrix products: of floats, of quantized blocks, and of ternary numbers.

pub mod blocks;
mod cuda;
pub mod linear;
pub mod matmul;
pub mod matrices;
pub mod ternary;

crate::shared_options! {
    activation {
        /// activation of the output; none by default
        activation: Option<crate::base::activation::Activation> = None;
    }
}

/// Calls `$body` with the Rust type of `$dtype` as `$type`, for the types with f32 arithmetic.
macro_rules! with_type_in_f32 {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::Bf16 => {
                type $type = half::bf16;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $type = half::f16;
                $body
            }
            _ => {
                type $type = f32;
                $body
            }
        }
    };
}
use with_type_in_f32;

/// Outputs per task if `threads` threads share `outputs`: a multiple of `unit`, for about eight tasks per thread.
/// Larger tasks read longer contiguous pieces of memory.
fn outputs_per_task(outputs: usize, threads: usize, unit: usize) -> usize {
    const TURNS: usize = 8;
    (outputs / (threads * TURNS)).next_multiple_of(unit).max(unit)
}
