//! Byte products one value at a time, in vectors of one block that the compiler may vectorize.

use super::lanes::{Eight, Lanes, transpose};
use crate::ops::products::blocks::format::{BLOCK, Format, integers};
use half::f16;

/// One block.
#[derive(Clone, Copy)]
pub struct Plain;

type Words = [i32; 8];

#[inline(always)]
unsafe fn block<'a>(format: Format, start: *const u8) -> &'a [u8] {
    // SAFETY: the caller's promise that a whole block lies there.
    unsafe { std::slice::from_raw_parts(start, format.bytes()) }
}

macro_rules! picks {
    ($($name:ident = $($at:literal)*;)*) => {
        $(#[inline(always)]
        fn $name(a: Words, b: Words) -> Words {
            let both = [a, b];
            [$(both[$at / 8][$at % 8]),*]
        })*
    };
}

// Indices from 8 on select words of b.
picks! {
    low32 = 0 8 1 9 4 12 5 13;
    high32 = 2 10 3 11 6 14 7 15;
    low64 = 0 1 8 9 4 5 12 13;
    high64 = 2 3 10 11 6 7 14 15;
    first = 0 1 2 3 8 9 10 11;
    second = 4 5 6 7 12 13 14 15;
}

impl Lanes for Plain {
    type Words = Words;
    type Floats = [f32; 8];
    type Row = Plain;
    const BLOCKS: usize = 1;
    const OFFSETS: [i32; 2] = [0, 0];

    #[inline(always)]
    unsafe fn q8([start, _]: [*const u8; 2]) -> Words {
        // SAFETY: the caller's promise that a whole block lies there.
        bytemuck::cast(integers(Format::Q8, unsafe { block(Format::Q8, start) }))
    }
    #[inline(always)]
    unsafe fn q4([start, _]: [*const u8; 2]) -> Words {
        // SAFETY: the caller's promise that a whole block lies there.
        bytemuck::cast(integers(Format::Q4, unsafe { block(Format::Q4, start) }))
    }
    #[inline(always)]
    unsafe fn words(from: *const u8) -> Words {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Words>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn floats(from: *const f32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f32; 8]>().read() }
    }
    #[inline(always)]
    unsafe fn write(floats: [f32; 8], to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 8]>().write(floats) }
    }
    #[inline(always)]
    fn widen(halves: &[f16; 16]) -> [f32; 8] {
        std::array::from_fn(|lane| halves[lane].to_f32())
    }
    #[inline(always)]
    fn spread(word: i32) -> Words {
        [word; 8]
    }
    #[inline(always)]
    fn spread_float(value: f32) -> [f32; 8] {
        [value; 8]
    }
    #[inline(always)]
    fn dot8(mut sums: Words, weights: Words, x: Words) -> Words {
        let (weights, x): ([i8; BLOCK], [i8; BLOCK]) = (bytemuck::cast(weights), bytemuck::cast(x));
        for (lane, sum) in sums.iter_mut().enumerate() {
            for i in 4 * lane..4 * lane + 4 {
                *sum += i32::from(weights[i]) * i32::from(x[i]);
            }
        }
        sums
    }
    #[inline(always)]
    fn dot4(sums: Words, weights: Words, x: Words) -> Words {
        Self::dot8(sums, weights, x)
    }
    #[inline(always)]
    fn to_floats(sums: Words) -> [f32; 8] {
        sums.map(|sum| sum as f32)
    }
    #[inline(always)]
    fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
    #[inline(always)]
    fn mul_add(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[inline(always)]
    fn transposed(rows: [Words; 8]) -> [Words; 8] {
        transpose!(rows, low32, high32, low64, high64, first, second)
    }
}

impl Eight for Plain {
    #[inline(always)]
    fn first(word: i32) -> Words {
        [word, 0, 0, 0, 0, 0, 0, 0]
    }
    #[inline(always)]
    unsafe fn q4_halves([a, b]: [*const u8; 2]) -> [Words; 2] {
        // SAFETY: the caller's promise.
        let (a, b) = unsafe { (Self::q4([a; 2]), Self::q4([b; 2])) };
        [first(a, b), second(a, b)]
    }
    #[inline(always)]
    fn pick([low, high]: [usize; 2]) -> Words {
        std::array::from_fn(|lane| if lane < 4 { low } else { high } as i32)
    }
    #[inline(always)]
    fn picked(floats: [f32; 8], pick: Words) -> [f32; 8] {
        pick.map(|lane| floats[lane as usize])
    }
    #[inline(always)]
    fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    fn total(floats: [f32; 8]) -> f32 {
        floats.iter().sum()
    }
}
