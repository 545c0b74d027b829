//! Ternary code with AVX-512, with and without VNNI and VPOPCNTDQ.
//!
//! Each method is sound only on a CPU with its instructions, which the caller of [`run`] promises.

// Every `unsafe` here is an intrinsic, sound for the reason above; repeating it would hide the code.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::wide::{Extensions, Planes, Task, WORD, Wide};
use std::arch::x86_64::*;

/// Runs `task` with AVX-512 and these extensions.
///
/// # Safety
/// The CPU must support the level and the extensions.
pub unsafe fn run<T: Task>(extensions: Extensions, task: T) -> T::Output {
    match extensions {
        Extensions::DotAndCount => unsafe { with_both(task) },
        Extensions::Dot => unsafe { with_dot(task) },
        Extensions::None => unsafe { plain(task) },
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vpopcntdq,avx2,fma,f16c,popcnt,bmi2")]
unsafe fn with_both<T: Task>(task: T) -> T::Output {
    task.run::<Bytes64<true, true>>()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,popcnt")]
unsafe fn with_dot<T: Task>(task: T) -> T::Output {
    task.run::<Bytes64<true, false>>()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
unsafe fn plain<T: Task>(task: T) -> T::Output {
    task.run::<Bytes64<false, false>>()
}

/// 64 bytes.
#[derive(Clone, Copy)]
pub struct Bytes64<const DOT: bool, const COUNT: bool>(__m512i);

impl<const DOT: bool, const COUNT: bool> Wide for Bytes64<DOT, COUNT> {
    const BYTES: usize = 64;
    const TILE: usize = 8;
    type Sums = __m512i;
    type Counts = __m512i;
    type Floats = [__m512; 4];

    #[inline(always)]
    fn load(from: &[u8]) -> Self {
        let from = &from[..64];
        Self(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) })
    }
    #[inline(always)]
    fn splat(byte: u8) -> Self {
        Self(unsafe { _mm512_set1_epi8(byte as i8) })
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self(unsafe { _mm512_and_si512(self.0, other.0) })
    }
    #[inline(always)]
    fn and_not(self, other: Self) -> Self {
        Self(unsafe { _mm512_andnot_si512(other.0, self.0) })
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(unsafe { _mm512_or_si512(self.0, other.0) })
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(unsafe { _mm512_xor_si512(self.0, other.0) })
    }
    #[inline(always)]
    fn right<const N: u32>(self) -> Self {
        Self(unsafe { _mm512_srli_epi16::<N>(self.0) })
    }
    #[inline(always)]
    fn left(self) -> Self {
        Self(unsafe { _mm512_slli_epi16::<1>(self.0) })
    }

    #[inline(always)]
    fn no_sums() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn add_products(mut sums: __m512i, codes: &[Self; 8], x: &[i8]) -> __m512i {
        let x = &x[..8 * 64];
        unsafe {
            let x = |i: usize| _mm512_loadu_si512(x.as_ptr().add(64 * i).cast());
            if DOT {
                for (i, code) in codes.iter().enumerate() {
                    sums = _mm512_dpbusd_epi32(sums, code.0, x(i));
                }
                return sums;
            }
            // With codes up to 2, sums of eight pairs fit into 16 bits.
            let mut pairs = _mm512_maddubs_epi16(codes[0].0, x(0));
            for (i, code) in codes.iter().enumerate().skip(1) {
                pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(code.0, x(i)));
            }
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    fn sum(sums: __m512i) -> i32 {
        unsafe { _mm512_reduce_add_epi32(sums) }
    }

    #[inline(always)]
    fn add_pairs(sums: &mut [__m512i; 4], [even, odd]: [Self; 2], x: &[i8]) {
        if !DOT {
            sums[0] = Self::add_products(sums[0], &Self::codes([even, odd]), x);
            return;
        }
        let x = &x[..8 * 64];
        // Codes stay at their place in the byte, so `sums[i]` is 4^i times too large.
        for (i, sum) in sums.iter_mut().enumerate() {
            let mask = Self::splat(3 << (2 * i));
            unsafe {
                let x = |i: usize| _mm512_loadu_si512(x.as_ptr().add(64 * i).cast());
                *sum = _mm512_dpbusd_epi32(*sum, even.and(mask).0, x(2 * i));
                *sum = _mm512_dpbusd_epi32(*sum, odd.and(mask).0, x(2 * i + 1));
            }
        }
    }
    #[inline(always)]
    fn sum_of_pairs([a, b, c, d]: [__m512i; 4]) -> i32 {
        if !DOT {
            return Self::sum(a);
        }
        unsafe {
            let (b, c, d) = (_mm512_srai_epi32::<2>(b), _mm512_srai_epi32::<4>(c), _mm512_srai_epi32::<6>(d));
            Self::sum(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)))
        }
    }

    #[inline(always)]
    fn no_counts() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn add_count(counts: __m512i, of: Self) -> __m512i {
        unsafe {
            if COUNT {
                return _mm512_add_epi64(counts, _mm512_popcnt_epi64(of.0));
            }
            let nibbles = _mm512_set1_epi8(15);
            let table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
            let low = _mm512_shuffle_epi8(table, _mm512_and_si512(of.0, nibbles));
            let high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(of.0), nibbles));
            _mm512_add_epi64(counts, _mm512_sad_epu8(_mm512_add_epi8(low, high), _mm512_setzero_si512()))
        }
    }
    #[inline(always)]
    fn count(a: __m512i, b: __m512i) -> i64 {
        unsafe { _mm512_reduce_add_epi64(_mm512_sub_epi64(a, _mm512_add_epi64(b, b))) }
    }

    #[inline(always)]
    fn no_floats() -> [__m512; 4] {
        unsafe { [_mm512_setzero_ps(); 4] }
    }
    #[inline(always)]
    fn add_floats(mut sums: [__m512; 4], planes: Planes, x: &[f32]) -> [__m512; 4] {
        let x = &x[..WORD];
        for (i, sum) in sums.iter_mut().enumerate() {
            unsafe {
                let x = _mm512_loadu_ps(x.as_ptr().add(16 * i));
                *sum = _mm512_mask_add_ps(*sum, (planes[0] >> (16 * i)) as u16, *sum, x);
                *sum = _mm512_mask_sub_ps(*sum, (planes[1] >> (16 * i)) as u16, *sum, x);
            }
        }
        sums
    }
    #[inline(always)]
    fn sum_floats(sums: [__m512; 4]) -> f32 {
        unsafe { _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]))) }
    }

    #[inline(always)]
    fn compress(values: &[u8; WORD]) -> Planes {
        unsafe {
            let values = _mm512_loadu_si512(values.as_ptr().cast());
            let p0 = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8(1));
            let p1 = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8(-1));
            let none = _mm512_test_epi8_mask(values, values) & !(p0 | p1);
            [p0 | none, p1 | none]
        }
    }
    #[inline(always)]
    fn expand(planes: Planes) -> [u8; WORD] {
        let mut values = [0; WORD];
        unsafe {
            let ones = _mm512_maskz_set1_epi8(planes[0], 1);
            let all = _mm512_mask_set1_epi8(ones, planes[1], -1);
            _mm512_storeu_si512(values.as_mut_ptr().cast(), all);
        }
        values
    }
}
