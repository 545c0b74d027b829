//! Byte products on ARM: NEON, with and without the dot product instruction. A block fills two registers.

// Every `unsafe` here is an intrinsic or an instruction, sound where its type is used: on CPUs that support it.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::With;
use super::lanes::{Eight, Lanes, transpose};
use crate::ops::products::blocks::format::SCALE;
use half::f16;
use std::arch::aarch64::*;

/// NEON with the dot product.
#[derive(Clone, Copy)]
pub struct NeonDot;

/// NEON.
#[derive(Clone, Copy)]
pub struct Neon;

type Words = [int32x4_t; 2];
type Floats = [float32x4_t; 2];

#[inline(always)]
fn dot(sums: int32x4_t, weights: int32x4_t, x: int32x4_t) -> int32x4_t {
    let mut sums = sums;
    // Inline assembly, because the intrinsic is not stable yet.
    unsafe {
        std::arch::asm!(
            ".arch_extension dotprod",
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums, in(vreg) weights, in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

#[inline(always)]
fn by_pairs(sums: int32x4_t, weights: int32x4_t, x: int32x4_t) -> int32x4_t {
    unsafe {
        let (weights, x) = (vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(x));
        // Four products of -128 and -127 would overflow 16 bits; two of them fit.
        let low = vpaddlq_s16(vmull_s8(vget_low_s8(weights), vget_low_s8(x)));
        let high = vpaddlq_s16(vmull_high_s8(weights, x));
        vaddq_s32(sums, vpaddq_s32(low, high))
    }
}

macro_rules! of_two_registers {
    ($dot:ident) => {
        type Words = Words;
        type Floats = Floats;
        type Row = Self;
        const BLOCKS: usize = 1;
        const OFFSETS: [i32; 2] = [0, 0];

        #[inline(always)]
        unsafe fn q8([block, _]: [*const u8; 2]) -> Words {
            unsafe { Self::words(block.add(SCALE)) }
        }
        #[inline(always)]
        unsafe fn q4([block, _]: [*const u8; 2]) -> Words {
            unsafe {
                let (both, eight) = (vld1q_u8(block.add(SCALE)), vdupq_n_s8(8));
                let low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
                [vreinterpretq_s32_s8(vsubq_s8(low, eight)), vreinterpretq_s32_s8(vsubq_s8(high, eight))]
            }
        }
        #[inline(always)]
        unsafe fn words(from: *const u8) -> Words {
            unsafe { [vreinterpretq_s32_u8(vld1q_u8(from)), vreinterpretq_s32_u8(vld1q_u8(from.add(16)))] }
        }
        #[inline(always)]
        unsafe fn floats(from: *const f32) -> Floats {
            unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
        }
        #[inline(always)]
        unsafe fn write(floats: Floats, to: *mut f32) {
            unsafe {
                vst1q_f32(to, floats[0]);
                vst1q_f32(to.add(4), floats[1]);
            }
        }
        #[inline(always)]
        fn widen(halves: &[f16; 16]) -> Floats {
            let mut wide = [0.0f32; 8];
            for (wide, half) in wide.iter_mut().zip(halves) {
                *wide = half.to_f32();
            }
            unsafe { Self::floats(wide.as_ptr()) }
        }
        #[inline(always)]
        fn spread(word: i32) -> Words {
            unsafe { [vdupq_n_s32(word), vdupq_n_s32(word)] }
        }
        #[inline(always)]
        fn spread_float(value: f32) -> Floats {
            unsafe { [vdupq_n_f32(value), vdupq_n_f32(value)] }
        }
        #[inline(always)]
        fn dot8(sums: Words, weights: Words, x: Words) -> Words {
            [$dot(sums[0], weights[0], x[0]), $dot(sums[1], weights[1], x[1])]
        }
        #[inline(always)]
        fn dot4(sums: Words, weights: Words, x: Words) -> Words {
            Self::dot8(sums, weights, x)
        }
        #[inline(always)]
        fn to_floats(sums: Words) -> Floats {
            unsafe { [vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(sums[1])] }
        }
        #[inline(always)]
        fn mul(a: Floats, b: Floats) -> Floats {
            unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul_add(a: Floats, b: Floats, c: Floats) -> Floats {
            unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
        }
        #[inline(always)]
        fn transposed(rows: [Words; 8]) -> [Words; 8] {
            transpose!(rows, low32, high32, low64, high64, first, second)
        }
    };
}

macro_rules! eight {
    ($($type:ty)*) => {
        $(impl Eight for $type {
            #[inline(always)]
            fn first(word: i32) -> Words {
                unsafe { [vsetq_lane_s32::<0>(word, vdupq_n_s32(0)), vdupq_n_s32(0)] }
            }
            #[inline(always)]
            unsafe fn q4_halves([a, b]: [*const u8; 2]) -> [Words; 2] {
                let (a, b) = unsafe { (Self::q4([a; 2]), Self::q4([b; 2])) };
                [first(a, b), second(a, b)]
            }
            #[inline(always)]
            fn pick([low, high]: [usize; 2]) -> Words {
                unsafe { [vdupq_n_s32(low as i32), vdupq_n_s32(high as i32)] }
            }
            #[inline(always)]
            fn picked(floats: Floats, pick: Words) -> Floats {
                let all: [f32; 8] = unsafe { std::mem::transmute(floats) };
                pick.map(|half| unsafe { vdupq_n_f32(all[vgetq_lane_s32::<0>(half) as usize]) })
            }
            #[inline(always)]
            fn add(a: Floats, b: Floats) -> Floats {
                unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
            }
            #[inline(always)]
            fn total(floats: Floats) -> f32 {
                unsafe { vaddvq_f32(vaddq_f32(floats[0], floats[1])) }
            }
        })*
    };
}

eight!(Neon NeonDot);

macro_rules! of_both {
    ($($name:ident = $intrinsic:ident;)*) => {
        $(#[inline(always)]
        fn $name(a: Words, b: Words) -> Words {
            unsafe { [$intrinsic(a[0], b[0]), $intrinsic(a[1], b[1])] }
        })*
    };
}

of_both! {
    low32 = vzip1q_s32;
    high32 = vzip2q_s32;
    low64 = first_pairs;
    high64 = second_pairs;
}

#[inline(always)]
unsafe fn first_pairs(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

#[inline(always)]
unsafe fn second_pairs(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

#[inline(always)]
fn first(a: Words, b: Words) -> Words {
    [a[0], b[0]]
}

#[inline(always)]
fn second(a: Words, b: Words) -> Words {
    [a[1], b[1]]
}

impl Lanes for NeonDot {
    of_two_registers!(dot);
}

impl Lanes for Neon {
    of_two_registers!(by_pairs);
}

/// Does work compiled for NEON with the dot product.
///
/// # Safety
/// The CPU must have it.
#[target_feature(enable = "neon,dotprod")]
pub unsafe fn neon_dot<W: With>(work: W) {
    work.with::<NeonDot>();
}
