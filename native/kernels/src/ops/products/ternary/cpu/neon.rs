//! Ternary code with NEON, with and without its dot product.
//!
//! Each method is sound only on a CPU with its instructions, which the caller of [`run`] promises.

// Every `unsafe` here is an intrinsic, sound for the reason above; repeating it would hide the code.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::portable;
use super::wide::{Extensions, Planes, Task, WORD, Wide};
use std::arch::aarch64::*;
use std::arch::asm;

/// Runs `task` with NEON and these extensions.
///
/// # Safety
/// The CPU must have the extensions.
pub unsafe fn run<T: Task>(extensions: Extensions, task: T) -> T::Output {
    match extensions {
        Extensions::None => unsafe { plain(task) },
        _ => unsafe { with_dot(task) },
    }
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn with_dot<T: Task>(task: T) -> T::Output {
    task.run::<Bytes16<true>>()
}

#[target_feature(enable = "neon")]
unsafe fn plain<T: Task>(task: T) -> T::Output {
    task.run::<Bytes16<false>>()
}

/// 16 bytes.
#[derive(Clone, Copy)]
pub struct Bytes16<const DOT: bool>(uint8x16_t);

impl<const DOT: bool> Wide for Bytes16<DOT> {
    const BYTES: usize = 16;
    const TILE: usize = 4;
    type Sums = int32x4_t;
    type Counts = uint64x2_t;
    type Floats = [f32; 8];

    #[inline(always)]
    fn load(from: &[u8]) -> Self {
        let from = &from[..16];
        Self(unsafe { vld1q_u8(from.as_ptr()) })
    }
    #[inline(always)]
    fn splat(byte: u8) -> Self {
        Self(unsafe { vdupq_n_u8(byte) })
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self(unsafe { vandq_u8(self.0, other.0) })
    }
    #[inline(always)]
    fn and_not(self, other: Self) -> Self {
        Self(unsafe { vbicq_u8(self.0, other.0) })
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(unsafe { vorrq_u8(self.0, other.0) })
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(unsafe { veorq_u8(self.0, other.0) })
    }
    #[inline(always)]
    fn right<const N: u32>(self) -> Self {
        // Callers use only the low bits of each byte.
        Self(unsafe { vshlq_u8(self.0, vdupq_n_s8(-(N as i8))) })
    }
    #[inline(always)]
    fn left(self) -> Self {
        Self(unsafe { vshlq_n_u8::<1>(self.0) })
    }

    #[inline(always)]
    fn no_sums() -> int32x4_t {
        unsafe { vdupq_n_s32(0) }
    }
    #[inline(always)]
    fn add_products(mut sums: int32x4_t, codes: &[Self; 8], x: &[i8]) -> int32x4_t {
        let x = &x[..8 * 16];
        for (i, code) in codes.iter().enumerate() {
            unsafe {
                let (code, x) = (vreinterpretq_s8_u8(code.0), vld1q_s8(x.as_ptr().add(16 * i)));
                if DOT {
                    // Inline assembly, because the intrinsic is not stable yet.
                    asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) code, in(vreg) x,
                         options(pure, nomem, nostack, preserves_flags));
                } else {
                    sums = vpadalq_s16(sums, vmull_s8(vget_low_s8(code), vget_low_s8(x)));
                    sums = vpadalq_s16(sums, vmull_high_s8(code, x));
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn sum(sums: int32x4_t) -> i32 {
        unsafe { vaddvq_s32(sums) }
    }

    #[inline(always)]
    fn no_counts() -> uint64x2_t {
        unsafe { vdupq_n_u64(0) }
    }
    #[inline(always)]
    fn add_count(counts: uint64x2_t, of: Self) -> uint64x2_t {
        unsafe { vpadalq_u32(counts, vpaddlq_u16(vpaddlq_u8(vcntq_u8(of.0)))) }
    }
    #[inline(always)]
    fn count(a: uint64x2_t, b: uint64x2_t) -> i64 {
        unsafe { vaddvq_u64(a) as i64 - 2 * vaddvq_u64(b) as i64 }
    }

    #[inline(always)]
    fn no_floats() -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    fn add_floats(sums: [f32; 8], planes: Planes, x: &[f32]) -> [f32; 8] {
        portable::add_floats(sums, planes, x)
    }
    #[inline(always)]
    fn sum_floats(sums: [f32; 8]) -> f32 {
        sums.iter().sum()
    }

    #[inline(always)]
    fn compress(values: &[u8; WORD]) -> Planes {
        portable::compress(values)
    }
    #[inline(always)]
    fn expand(planes: Planes) -> [u8; WORD] {
        portable::expand(planes)
    }
}
