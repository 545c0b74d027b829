//! Byte products on x86: AVX-512 with VNNI, AVX2 with VNNI, AVX2.
//!
//! `vpdpbusd` multiplies unsigned bytes with signed ones. So weights of Q8_0 are made unsigned by adding 128, which is
//! exact for -128 too. Without it, `vpmaddubsw` adds pairs in 16 bits and saturates, which pairs of such weights would
//! reach. There the sign of each weight moves to its factor: 2 x 128 x 127 still fits.

// Every `unsafe` here is an intrinsic, sound where its type is used: on CPUs that support the instructions.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::With;
use super::lanes::{Eight, Lanes, transpose};
use super::product::block_bytes;
use crate::ops::products::blocks::format::SCALE;
use half::f16;
use std::arch::asm;
use std::arch::x86_64::*;

/// AVX-512 with VNNI: two blocks.
#[derive(Clone, Copy)]
pub struct Avx512Vnni;

/// The lower half of its vectors: one block.
#[derive(Clone, Copy)]
pub struct HalfAvx512Vnni;

/// AVX2 with VNNI: one block.
#[derive(Clone, Copy)]
pub struct AvxVnni;

/// AVX2: one block.
#[derive(Clone, Copy)]
pub struct Avx2;

#[inline(always)]
unsafe fn nibbles(block: *const u8) -> __m256i {
    unsafe {
        let both = _mm_loadu_si128(block.add(SCALE).cast());
        let apart = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(both), _mm_srli_epi16::<4>(both));
        _mm256_and_si256(apart, _mm256_set1_epi8(15))
    }
}

#[inline(always)]
unsafe fn first_of_each_half(a: __m512i, b: __m512i) -> __m512i {
    unsafe { _mm512_permutex2var_epi64(a, _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), b) }
}

#[inline(always)]
unsafe fn second_of_each_half(a: __m512i, b: __m512i) -> __m512i {
    unsafe { _mm512_permutex2var_epi64(a, _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2), b) }
}

impl Lanes for Avx512Vnni {
    type Words = __m512i;
    type Floats = __m512;
    type Row = HalfAvx512Vnni;
    const BLOCKS: usize = 2;
    const OFFSETS: [i32; 2] = [128, 8];

    #[inline(always)]
    unsafe fn q8([a, b]: [*const u8; 2]) -> __m512i {
        unsafe {
            let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.add(SCALE).cast()));
            let both = _mm512_inserti64x4::<1>(a, _mm256_loadu_si256(b.add(SCALE).cast()));
            _mm512_xor_si512(both, _mm512_set1_epi8(-128))
        }
    }
    #[inline(always)]
    unsafe fn q4([a, b]: [*const u8; 2]) -> __m512i {
        unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(nibbles(a)), nibbles(b)) }
    }
    #[inline(always)]
    unsafe fn words(from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn floats(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn write(floats: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, floats) }
    }
    #[inline(always)]
    fn widen(halves: &[f16; 16]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast())) }
    }
    #[inline(always)]
    fn spread(word: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(word) }
    }
    #[inline(always)]
    fn spread_float(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    fn dot8(sums: __m512i, weights: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, weights, x) }
    }
    #[inline(always)]
    fn dot4(sums: __m512i, weights: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, weights, x) }
    }
    #[inline(always)]
    fn to_floats(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn transposed(rows: [__m512i; 8]) -> [__m512i; 8] {
        unsafe {
            transpose!(
                rows,
                _mm512_unpacklo_epi32,
                _mm512_unpackhi_epi32,
                _mm512_unpacklo_epi64,
                _mm512_unpackhi_epi64,
                first_of_each_half,
                second_of_each_half
            )
        }
    }
}

/// The common part of both sets of 256-bit instructions.
macro_rules! of_256_bits {
    () => {
        type Words = __m256i;
        type Floats = __m256;
        type Row = Self;
        const BLOCKS: usize = 1;

        #[inline(always)]
        unsafe fn q4([block, _]: [*const u8; 2]) -> __m256i {
            unsafe { nibbles(block) }
        }
        #[inline(always)]
        unsafe fn words(from: *const u8) -> __m256i {
            unsafe { _mm256_loadu_si256(from.cast()) }
        }
        #[inline(always)]
        unsafe fn floats(from: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn write(floats: __m256, to: *mut f32) {
            unsafe { _mm256_storeu_ps(to, floats) }
        }
        #[inline(always)]
        fn widen(halves: &[f16; 16]) -> __m256 {
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
        }
        #[inline(always)]
        fn spread(word: i32) -> __m256i {
            unsafe { _mm256_set1_epi32(word) }
        }
        #[inline(always)]
        fn spread_float(value: f32) -> __m256 {
            unsafe { _mm256_set1_ps(value) }
        }
        #[inline(always)]
        fn to_floats(sums: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(sums) }
        }
        #[inline(always)]
        fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn transposed(rows: [__m256i; 8]) -> [__m256i; 8] {
            unsafe {
                transpose!(
                    rows,
                    _mm256_unpacklo_epi32,
                    _mm256_unpackhi_epi32,
                    _mm256_unpacklo_epi64,
                    _mm256_unpackhi_epi64,
                    _mm256_permute2x128_si256::<0x20>,
                    _mm256_permute2x128_si256::<0x31>
                )
            }
        }
    };
}

/// Implements the byte products with `vpdpbusd`, which has two encodings.
macro_rules! vnni_of_256_bits {
    ($($type:ty: $dot:ident;)*) => {
        $(impl Lanes for $type {
            const OFFSETS: [i32; 2] = [128, 8];
            of_256_bits!();

            #[inline(always)]
            unsafe fn q8([block, _]: [*const u8; 2]) -> __m256i {
                unsafe { _mm256_xor_si256(_mm256_loadu_si256(block.add(SCALE).cast()), _mm256_set1_epi8(-128)) }
            }
            #[inline(always)]
            fn dot8(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
                unsafe { $dot(sums, weights, x) }
            }
            #[inline(always)]
            fn dot4(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
                unsafe { $dot(sums, weights, x) }
            }
        })*
    };
}

vnni_of_256_bits! {
    AvxVnni: _mm256_dpbusd_avx_epi32;
    HalfAvx512Vnni: _mm256_dpbusd_epi32;
}

impl Lanes for Avx2 {
    const OFFSETS: [i32; 2] = [0, 8];
    of_256_bits!();

    #[inline(always)]
    unsafe fn q8([block, _]: [*const u8; 2]) -> __m256i {
        unsafe { _mm256_loadu_si256(block.add(SCALE).cast()) }
    }
    #[inline(always)]
    fn dot8(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
        unsafe { Self::dot4(sums, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)) }
    }
    #[inline(always)]
    fn dot4(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
        unsafe {
            let pairs = _mm256_maddubs_epi16(weights, x);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

/// Four scales of contiguous blocks, from the first literal on. The compiler alone would insert each into a vector, on
/// the execution units that also multiply.
macro_rules! four_scales {
    ($blocks:ident, $bytes:expr, $($at:literal)*) => {{
        let mut four = 0u64;
        $(
            let scale: u64;
            asm!(
                "movzx {:e}, word ptr [{} + {}]",
                out(reg) scale,
                in(reg) $blocks,
                const $at * $bytes,
                options(pure, readonly, nostack, preserves_flags)
            );
            four |= scale << ($at % 4 * 16);
        )*
        four as i64
    }};
}

static LANES: [i32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

macro_rules! eight {
    ($($type:ty)*) => {
        $(impl Eight for $type {
            #[inline(always)]
            unsafe fn scales<const Q4: bool>(blocks: *const u8) -> __m256 {
                unsafe {
                    let first = four_scales!(blocks, block_bytes(Q4), 0 1 2 3);
                    let second = four_scales!(blocks, block_bytes(Q4), 4 5 6 7);
                    _mm256_cvtph_ps(_mm_set_epi64x(second, first))
                }
            }
            #[inline(always)]
            fn first(word: i32) -> __m256i {
                unsafe { _mm256_zextsi128_si256(_mm_cvtsi32_si128(word)) }
            }
            #[inline(always)]
            unsafe fn q4_halves([a, b]: [*const u8; 2]) -> [__m256i; 2] {
                unsafe {
                    let a = _mm256_castsi128_si256(_mm_loadu_si128(a.add(SCALE).cast()));
                    let both = _mm256_inserti128_si256::<1>(a, _mm_loadu_si128(b.add(SCALE).cast()));
                    let nibble = _mm256_set1_epi8(15);
                    [_mm256_and_si256(both, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble)]
                }
            }
            #[inline(always)]
            fn pick(halves: [usize; 2]) -> __m256i {
                unsafe {
                    // A volatile read, because for constants the compiler makes two shuffles.
                    let of = |lane: usize| _mm_set1_epi32((&raw const LANES[lane]).read_volatile());
                    _mm256_set_m128i(of(halves[1]), of(halves[0]))
                }
            }
            #[inline(always)]
            fn picked(floats: __m256, pick: __m256i) -> __m256 {
                unsafe { _mm256_permutevar8x32_ps(floats, pick) }
            }
            #[inline(always)]
            fn add(a: __m256, b: __m256) -> __m256 {
                unsafe { _mm256_add_ps(a, b) }
            }
            #[inline(always)]
            fn total(floats: __m256) -> f32 {
                unsafe {
                    let four = _mm_add_ps(_mm256_castps256_ps128(floats), _mm256_extractf128_ps::<1>(floats));
                    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
                }
            }
        })*
    };
}

eight!(HalfAvx512Vnni AvxVnni Avx2);

/// Does work compiled for AVX-512 with VNNI.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn avx512_vnni<W: With>(work: W) {
    work.with::<Avx512Vnni>();
}

/// Does work compiled for AVX2 with VNNI.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
pub unsafe fn avx_vnni<W: With>(work: W) {
    work.with::<AvxVnni>();
}

/// Does work compiled for AVX2.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn avx2<W: With>(work: W) {
    work.with::<Avx2>();
}
