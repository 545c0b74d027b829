//! The x86 levels: AVX2 with FMA and F16C, and AVX-512.
//!
//! Every method is one intrinsic. Each is sound only on a CPU with that instruction, which [`super::level::dispatch`]
//! guarantees by entering through the two functions at the top.

// Every `unsafe` here is an intrinsic, sound for the reason above; repeating it would hide the code.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::level::Work;
use super::math;
use super::vector::{Loops, Vector};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Runs `work` compiled for AVX-512.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn avx512<W: Work<f32>>(work: W) -> W::Output {
    work.run::<F32x16>()
}

/// Runs `work` compiled for AVX2.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn avx2<W: Work<f32>>(work: W) -> W::Output {
    work.run::<F32x8>()
}

/// [`Vector::apart`] for AVX-512.
///
/// # Safety
/// The CPU must have these features.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512_apart(loops: impl Loops) {
    loops.run();
}

/// [`Vector::apart`] for AVX2.
///
/// # Safety
/// The CPU must have these features.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_apart(loops: impl Loops) {
    loops.run();
}

/// What [`round_to_bf16`](super::storage::round_to_bf16) uses, for the intrinsics.
const BELOW_HALF: i32 = super::storage::BELOW_HALF as i32;
const QUIET: i32 = super::storage::QUIET as i32;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// One method per intrinsic with the same signature for both widths.
macro_rules! intrinsics {
    ($lanes:literal, $register:ty, $apart:ident; $($name:ident($($arg:ident),*) = $intrinsic:ident;)*) => {
        const LANES: usize = $lanes;
        type Element = f32;

        #[inline(always)]
        fn apart(loops: impl Loops) {
            unsafe { $apart(loops) }
        }
        $(#[inline(always)]
        fn $name(self, $($arg: Self),*) -> Self {
            unsafe { Self($intrinsic(self.0, $($arg.0),*)) }
        })*

        // These two intrinsics return their second operand when either is NaN.
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            other.max_or_second(self)
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            other.min_or_second(self)
        }
    };
}

/// 16 floats.
#[derive(Clone, Copy)]
pub struct F32x16(pub __m512);

impl F32x16 {
    #[inline(always)]
    fn max_or_second(self, second: Self) -> Self {
        unsafe { Self(_mm512_max_ps(self.0, second.0)) }
    }
    #[inline(always)]
    fn min_or_second(self, second: Self) -> Self {
        unsafe { Self(_mm512_min_ps(self.0, second.0)) }
    }
}

/// The mask of the first `count` lanes, of all if there are fewer.
#[inline(always)]
fn first_lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(F32x16::LANES)) - 1) as __mmask16
}

impl Vector for F32x16 {
    intrinsics! { 16, __m512, avx512_apart;
        add(other) = _mm512_add_ps;
        sub(other) = _mm512_sub_ps;
        mul(other) = _mm512_mul_ps;
        div(other) = _mm512_div_ps;
        mul_add(factor, term) = _mm512_fmadd_ps;
        abs() = _mm512_abs_ps;
        scale(n) = _mm512_scalef_ps;
    }
    const LOWEST: f64 = -160.0;

    #[inline(always)]
    fn where_equal(self, a: Self, b: Self) -> Self {
        unsafe { Self(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_EQ_UQ>(a.0, b.0), self.0)) }
    }

    #[inline(always)]
    fn where_less(self, a: Self, b: Self, other: Self) -> Self {
        unsafe { Self(_mm512_mask_mov_ps(other.0, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0), self.0)) }
    }
    #[inline(always)]
    fn zip(self, other: Self) -> (Self, Self) {
        unsafe {
            let lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let upper = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            let (a, b) = (self.0, other.0);
            (Self(_mm512_permutex2var_ps(a, lower, b)), Self(_mm512_permutex2var_ps(a, upper, b)))
        }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self {
        unsafe { Self(_mm512_set1_ps(value)) }
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm512_loadu_ps(values.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        let values = &mut values[..Self::LANES];
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn load_partial(values: &[f32]) -> Self {
        unsafe { Self(_mm512_maskz_loadu_ps(first_lanes(values.len()), values.as_ptr())) }
    }
    #[inline(always)]
    fn store_partial(self, values: &mut [f32]) {
        unsafe { _mm512_mask_storeu_ps(values.as_mut_ptr(), first_lanes(values.len()), self.0) }
    }
    #[inline(always)]
    fn stream(self, values: &mut [f32]) {
        let values = &mut values[..Self::LANES];
        debug_assert!(values.as_ptr().addr().is_multiple_of(64));
        unsafe { _mm512_stream_ps(values.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn round(self) -> Self {
        unsafe { Self(_mm512_roundscale_ps::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    fn split(self) -> (Self, Self) {
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let over = _mm512_sub_epi32(bits, _mm512_set1_epi32(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32));
            let n = _mm512_srai_epi32::<23>(over);
            let m = _mm512_sub_epi32(bits, _mm512_slli_epi32::<23>(n));
            (Self(_mm512_castsi512_ps(m)), Self(_mm512_cvtepi32_ps(n)))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    fn fold([a, b, c, d]: [Self; 4]) -> Self {
        unsafe {
            let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a.0, b.0), _mm512_unpackhi_ps(a.0, b.0)));
            let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c.0, d.0), _mm512_unpackhi_ps(c.0, d.0)));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            Self(_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high)))
        }
    }
    #[inline(always)]
    fn fours(self) -> [f32; 4] {
        unsafe { F32x8(_mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))).fours() }
    }
    #[inline(always)]
    fn load_u8(values: &[u8]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(values.as_ptr().cast())))) }
    }
    #[inline(always)]
    fn load_f16(values: &[f16]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(values.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store_f16(self, values: &mut [f16]) {
        let values = &mut values[..Self::LANES];
        unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        let values = &values[..Self::LANES];
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(values.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    // Not the instruction of AVX512_BF16, which takes subnormal numbers for 0.
    #[inline(always)]
    fn store_bf16(self, values: &mut [bf16]) {
        let values = &mut values[..Self::LANES];
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(BELOW_HALF)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(QUIET));
            _mm256_storeu_si256(values.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(kept)));
        }
    }
    // `reduce` is `p - round(p)` in one step, and 0 for infinities, so no bounds are needed.
    #[inline(always)]
    fn exp2(self) -> Self {
        let fraction = unsafe { Self(_mm512_reduce_ps::<0>(self.0)) };
        math::exp2_fraction(fraction).scale(self.round())
    }
    #[inline(always)]
    fn exp2_near(self) -> Self {
        self.exp2()
    }
}

/// 8 floats.
#[derive(Clone, Copy)]
pub struct F32x8(__m256);

impl F32x8 {
    #[inline(always)]
    fn max_or_second(self, second: Self) -> Self {
        unsafe { Self(_mm256_max_ps(self.0, second.0)) }
    }
    #[inline(always)]
    fn min_or_second(self, second: Self) -> Self {
        unsafe { Self(_mm256_min_ps(self.0, second.0)) }
    }
}

impl Vector for F32x8 {
    intrinsics! { 8, __m256, avx2_apart;
        add(other) = _mm256_add_ps;
        sub(other) = _mm256_sub_ps;
        mul(other) = _mm256_mul_ps;
        div(other) = _mm256_div_ps;
        mul_add(factor, term) = _mm256_fmadd_ps;
    }

    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the lowest bits, from which it moves straight into
    // the exponent.
    #[inline(always)]
    fn exp2_near(self) -> Self {
        let shift = Self::splat(12582912.0);
        let shifted = self.add(shift);
        let power = math::exp2_fraction(self.sub(shifted.sub(shift)));
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted.0));
            Self(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(power.0), exponent)))
        }
    }
    #[inline(always)]
    fn where_equal(self, a: Self, b: Self) -> Self {
        unsafe { Self(_mm256_and_ps(_mm256_cmp_ps::<_CMP_EQ_UQ>(a.0, b.0), self.0)) }
    }
    #[inline(always)]
    fn where_less(self, a: Self, b: Self, other: Self) -> Self {
        unsafe { Self(_mm256_blendv_ps(other.0, self.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0))) }
    }
    #[inline(always)]
    fn zip(self, other: Self) -> (Self, Self) {
        unsafe {
            let (even, odd) = (_mm256_unpacklo_ps(self.0, other.0), _mm256_unpackhi_ps(self.0, other.0));
            (Self(_mm256_permute2f128_ps::<0x20>(even, odd)), Self(_mm256_permute2f128_ps::<0x31>(even, odd)))
        }
    }
    #[inline(always)]
    fn splat(value: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(value)) }
    }
    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm256_loadu_ps(values.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        let values = &mut values[..Self::LANES];
        unsafe { _mm256_storeu_ps(values.as_mut_ptr(), self.0) }
    }
    // Masked stores are slow on some processors.
    #[inline(always)]
    fn load_partial(values: &[f32]) -> Self {
        const MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        let mask = &MASKS[8 - values.len().min(8)..][..8];
        unsafe { Self(_mm256_maskload_ps(values.as_ptr(), _mm256_loadu_si256(mask.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn stream(self, values: &mut [f32]) {
        let values = &mut values[..Self::LANES];
        debug_assert!(values.as_ptr().addr().is_multiple_of(32));
        unsafe { _mm256_stream_ps(values.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe { Self(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)) }
    }
    #[inline(always)]
    fn round(self) -> Self {
        unsafe { Self(_mm256_round_ps::<NEAREST>(self.0)) }
    }
    // Multiplies by 2 and by 2^(n-1), as 2^128 is not an f32. At n = -126 the second factor has zero bits, and so gives
    // 0.
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), _mm256_set1_epi32(126));
            let half_power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased));
            Self(_mm256_mul_ps(_mm256_add_ps(self.0, self.0), half_power))
        }
    }
    #[inline(always)]
    fn split(self) -> (Self, Self) {
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let over = _mm256_sub_epi32(bits, _mm256_set1_epi32(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32));
            let n = _mm256_srai_epi32::<23>(over);
            let m = _mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(n));
            (Self(_mm256_castsi256_ps(m)), Self(_mm256_cvtepi32_ps(n)))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn fold([a, b, c, d]: [Self; 4]) -> Self {
        unsafe { Self(_mm256_hadd_ps(_mm256_hadd_ps(a.0, b.0), _mm256_hadd_ps(c.0, d.0))) }
    }
    #[inline(always)]
    fn fours(self) -> [f32; 4] {
        let mut sums = [0.0; 4];
        unsafe {
            let sum = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            _mm_storeu_ps(sums.as_mut_ptr(), sum);
        }
        sums
    }
    #[inline(always)]
    fn load_u8(values: &[u8]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(values.as_ptr().cast())))) }
    }
    #[inline(always)]
    fn load_f16(values: &[f16]) -> Self {
        let values = &values[..Self::LANES];
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(values.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store_f16(self, values: &mut [f16]) {
        let values = &mut values[..Self::LANES];
        unsafe { _mm_storeu_si128(values.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    fn load_bf16(values: &[bf16]) -> Self {
        let values = &values[..Self::LANES];
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(values.as_ptr().cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    fn store_bf16(self, values: &mut [bf16]) {
        let values = &mut values[..Self::LANES];
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(BELOW_HALF)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(QUIET));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            let kept = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let narrow = _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256::<1>(kept));
            _mm_storeu_si128(values.as_mut_ptr().cast(), narrow);
        }
    }
}
