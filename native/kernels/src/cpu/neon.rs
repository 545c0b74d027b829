//! The NEON level, on 64-bit ARM.

// NEON is part of the base of every 64-bit ARM CPU.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::storage::{BELOW_HALF, QUIET};
use super::vector::Vector;
use half::{bf16, f16};
use std::arch::aarch64::*;

/// 4 floats.
#[derive(Clone, Copy)]
pub struct F32x4(float32x4_t);

impl Vector for F32x4 {
    type Element = f32;
    const LANES: usize = 4;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        unsafe { Self(vdupq_n_f32(value)) }
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(vld1q_f32(values.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        let values = &mut values[..Self::LANES];
        unsafe { vst1q_f32(values.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { Self(vaddq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        unsafe { Self(vsubq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        unsafe { Self(vmulq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        unsafe { Self(vdivq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        unsafe { Self(vfmaq_f32(term.0, self.0, factor.0)) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        unsafe { Self(vmaxq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        unsafe { Self(vminq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe { Self(vabsq_f32(self.0)) }
    }
    #[inline(always)]
    fn where_equal(self, a: Self, b: Self) -> Self {
        unsafe {
            let apart = vorrq_u32(vcltq_f32(a.0, b.0), vcgtq_f32(a.0, b.0));
            Self(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(self.0), apart)))
        }
    }
    #[inline(always)]
    fn where_less(self, a: Self, b: Self, other: Self) -> Self {
        unsafe { Self(vbslq_f32(vcltq_f32(a.0, b.0), self.0, other.0)) }
    }
    #[inline(always)]
    fn zip(self, other: Self) -> (Self, Self) {
        unsafe { (Self(vzip1q_f32(self.0, other.0)), Self(vzip2q_f32(self.0, other.0))) }
    }
    #[inline(always)]
    fn round(self) -> Self {
        unsafe { Self(vrndnq_f32(self.0)) }
    }
    // Multiplies by 2 and by 2^(n-1), as 2^128 is not an f32. At n = -126 the second factor has zero bits, and so gives
    // 0.
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        unsafe {
            let biased = vaddq_s32(vcvtq_s32_f32(n.0), vdupq_n_s32(126));
            let half_power = vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased));
            Self(vmulq_f32(vaddq_f32(self.0, self.0), half_power))
        }
    }
    #[inline(always)]
    fn split(self) -> (Self, Self) {
        unsafe {
            let bits = vreinterpretq_s32_f32(self.0);
            let over = vsubq_s32(bits, vdupq_n_s32(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32));
            let n = vshrq_n_s32::<23>(over);
            let m = vsubq_s32(bits, vshlq_n_s32::<23>(n));
            (Self(vreinterpretq_f32_s32(m)), Self(vcvtq_f32_s32(n)))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { vaddvq_f32(self.0) }
    }
    #[inline(always)]
    fn fold([a, b, c, d]: [Self; 4]) -> Self {
        unsafe { Self(vpaddq_f32(vpaddq_f32(a.0, b.0), vpaddq_f32(c.0, d.0))) }
    }
    #[inline(always)]
    fn load_u8(values: &[u8]) -> Self {
        Self::load(&[values[0], values[1], values[2], values[3]].map(f32::from))
    }
    // The conversion instructions have no stable intrinsics yet.
    #[inline(always)]
    fn load_f16(values: &[f16]) -> Self {
        Self::load(&[values[0], values[1], values[2], values[3]].map(f16::to_f32))
    }
    #[inline(always)]
    fn store_f16(self, values: &mut [f16]) {
        let mut lanes = [0.0; Self::LANES];
        self.store(&mut lanes);
        values[..Self::LANES].copy_from_slice(&lanes.map(f16::from_f32));
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(values.as_ptr().cast())))) }
    }
    #[inline(always)]
    fn store_bf16(self, values: &mut [bf16]) {
        let values = &mut values[..Self::LANES];
        unsafe {
            let bits = vreinterpretq_u32_f32(self.0);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(BELOW_HALF)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(QUIET));
            let kept = vbslq_u32(vceqq_f32(self.0, self.0), rounded, quiet);
            vst1_u16(values.as_mut_ptr().cast(), vshrn_n_u32::<16>(kept));
        }
    }
}
