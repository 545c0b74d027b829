//! Ternary code with AVX2.
//!
//! Each method is sound only on a CPU with its instructions, which the caller of [`run`] promises.

// Every `unsafe` here is an intrinsic, sound for the reason above; repeating it would hide the code.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::wide::{Planes, Task, WORD, Wide};
use std::arch::x86_64::*;

/// Runs `task` with AVX2.
///
/// # Safety
/// The CPU must have the level.
#[target_feature(enable = "avx2,fma,f16c,popcnt")]
pub unsafe fn run<T: Task>(task: T) -> T::Output {
    task.run::<Bytes32>()
}

/// 32 bytes.
#[derive(Clone, Copy)]
pub struct Bytes32(__m256i);

/// The sum of four 64-bit lanes.
#[inline(always)]
unsafe fn sum64(lanes: __m256i) -> i64 {
    let mut values = [0i64; 4];
    unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), lanes) };
    values.iter().sum()
}

/// Keeps the floats of eight whose bits are set; the others become 0.
#[inline(always)]
unsafe fn kept(bits: u64, x: __m256) -> __m256 {
    unsafe {
        let own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let there = _mm256_and_si256(_mm256_set1_epi32(bits as i32), own);
        _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(there, own)))
    }
}

/// Sets all bits of those of 32 bytes whose bits are set.
#[inline(always)]
unsafe fn bytes_of(bits: u32) -> __m256i {
    unsafe {
        let places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        let own = _mm256_set1_epi64x(0x8040201008040201u64 as i64);
        let there = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), places);
        _mm256_cmpeq_epi8(_mm256_and_si256(there, own), own)
    }
}

impl Wide for Bytes32 {
    const BYTES: usize = 32;
    const TILE: usize = 4;
    type Sums = __m256i;
    type Counts = __m256i;
    type Floats = [__m256; 4];

    #[inline(always)]
    fn load(from: &[u8]) -> Self {
        let from = &from[..32];
        Self(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) })
    }
    #[inline(always)]
    fn splat(byte: u8) -> Self {
        Self(unsafe { _mm256_set1_epi8(byte as i8) })
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self(unsafe { _mm256_and_si256(self.0, other.0) })
    }
    #[inline(always)]
    fn and_not(self, other: Self) -> Self {
        Self(unsafe { _mm256_andnot_si256(other.0, self.0) })
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(unsafe { _mm256_or_si256(self.0, other.0) })
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(unsafe { _mm256_xor_si256(self.0, other.0) })
    }
    #[inline(always)]
    fn right<const N: u32>(self) -> Self {
        Self(unsafe { _mm256_srl_epi16(self.0, _mm_cvtsi32_si128(N as i32)) })
    }
    #[inline(always)]
    fn left(self) -> Self {
        Self(unsafe { _mm256_slli_epi16::<1>(self.0) })
    }

    #[inline(always)]
    fn no_sums() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    fn add_products(sums: __m256i, codes: &[Self; 8], x: &[i8]) -> __m256i {
        let x = &x[..8 * 32];
        unsafe {
            let x = |i: usize| _mm256_loadu_si256(x.as_ptr().add(32 * i).cast());
            // With codes up to 2, sums of eight pairs fit into 16 bits.
            let mut pairs = _mm256_maddubs_epi16(codes[0].0, x(0));
            for (i, code) in codes.iter().enumerate().skip(1) {
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code.0, x(i)));
            }
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    fn sum(sums: __m256i) -> i32 {
        let mut values = [0i32; 8];
        unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), sums) };
        values.iter().fold(0, |sum: i32, &value| sum.wrapping_add(value))
    }

    #[inline(always)]
    fn no_counts() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    fn add_count(counts: __m256i, of: Self) -> __m256i {
        unsafe {
            let nibbles = _mm256_set1_epi8(15);
            let table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
            let low = _mm256_shuffle_epi8(table, _mm256_and_si256(of.0, nibbles));
            let high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(of.0), nibbles));
            _mm256_add_epi64(counts, _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256()))
        }
    }
    #[inline(always)]
    fn count(a: __m256i, b: __m256i) -> i64 {
        unsafe { sum64(_mm256_sub_epi64(a, _mm256_add_epi64(b, b))) }
    }

    #[inline(always)]
    fn no_floats() -> [__m256; 4] {
        unsafe { [_mm256_setzero_ps(); 4] }
    }
    #[inline(always)]
    fn add_floats(mut sums: [__m256; 4], planes: Planes, x: &[f32]) -> [__m256; 4] {
        let x = &x[..WORD];
        for i in 0..8 {
            unsafe {
                let x = _mm256_loadu_ps(x.as_ptr().add(8 * i));
                let sum = _mm256_add_ps(sums[i % 4], kept(planes[0] >> (8 * i) & 0xff, x));
                sums[i % 4] = _mm256_sub_ps(sum, kept(planes[1] >> (8 * i) & 0xff, x));
            }
        }
        sums
    }
    #[inline(always)]
    fn sum_floats(sums: [__m256; 4]) -> f32 {
        let mut values = [0.0f32; 8];
        unsafe {
            let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
            _mm256_storeu_ps(values.as_mut_ptr(), sum);
        }
        values.iter().sum()
    }

    #[inline(always)]
    fn compress(values: &[u8; WORD]) -> Planes {
        let mut planes = [0; 2];
        for half in 0..2 {
            unsafe {
                let values = _mm256_loadu_si256(values.as_ptr().add(32 * half).cast());
                let equal = |value| _mm256_movemask_epi8(_mm256_cmpeq_epi8(values, _mm256_set1_epi8(value))) as u32;
                let [p0, p1, zero] = [equal(1), equal(-1), equal(0)];
                let none = !(p0 | p1 | zero);
                planes[0] |= u64::from(p0 | none) << (32 * half);
                planes[1] |= u64::from(p1 | none) << (32 * half);
            }
        }
        planes
    }
    #[inline(always)]
    fn expand(planes: Planes) -> [u8; WORD] {
        let mut values = [0; WORD];
        for half in 0..2 {
            unsafe {
                let ones = _mm256_abs_epi8(bytes_of((planes[0] >> (32 * half)) as u32));
                let all = _mm256_or_si256(ones, bytes_of((planes[1] >> (32 * half)) as u32));
                _mm256_storeu_si256(values.as_mut_ptr().add(32 * half).cast(), all);
            }
        }
        values
    }
}
