//! Products of tiles by AMX, for tensors in bf16. A factor that comes from a tensor is exact in bf16. One that was
//! computed, such as weights, is split into two numbers of bf16, so that 2^-16 of a value is lost at most.
//!
//! With 64 queries, 64 keys and a width of 64, a product takes 32 or 64 products of tiles, 0.2 or 0.4 us. In f32 by
//! vectors it takes 2.9 us. Packing takes about as long as multiplying.

// Every `unsafe` here is an intrinsic or a tile, sound where this is called: on CPUs with AMX, which has AVX-512.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::product::{Computed, Left, Product, Then};
use crate::cpu::aligned::Aligned;
use crate::cpu::amx::{Block, Order, SIDE, Source, TILE, first_bits, write};
use crate::cpu::vector::transpose;
use crate::cpu::x86::F32x16;
use crate::cpu::{Vector, unrolled};
use std::arch::x86_64::*;
use std::cell::RefCell;

/// Numbers of the inner dimension in a row of a tile.
const STEP: usize = 2 * SIDE;

thread_local! {
    /// Both factors in bf16.
    static ROOM: RefCell<[Aligned<u8>; 2]> = RefCell::new([Aligned::new(0), Aligned::new(0)]);
}

/// Computes a product, unless a factor is not finite: the parts of split numbers would not add up then.
pub fn run(product: &mut Product<f32>) -> bool {
    // SAFETY: the caller runs this where the CPU has AMX.
    ROOM.with_borrow_mut(|room| unsafe { multiply(product, room) })
}

/// # Safety
/// The CPU must have AMX.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn multiply(product: &mut Product<f32>, [left, right]: &mut [Aligned<u8>; 2]) -> bool {
    let Product { rows, depth, width, computed, .. } = *product;
    let parts = if computed == Computed::Neither { 1 } else { 2 };
    let steps = parts * depth.div_ceil(STEP);
    let of_rows = Factor { of: product.left, lines: rows, depth, parts, split: computed == Computed::Left };
    // Columns of the right factor are its lines.
    let columns = Left { values: product.right.0, down: 1, along: product.right.1 };
    let of_columns = Factor { of: columns, lines: width, depth, parts, split: computed == Computed::Right };
    if !(unsafe { of_rows.pack(Order::Lines, left) & of_columns.pack(Order::Pairs, right) }) {
        return false;
    }
    if let Then::Scale(factors) = product.then {
        scale(product, factors);
    }
    let panel = |packed: &[u8], at: usize| Source::packed(&packed[(at * steps * TILE).min(packed.len())..]);
    let (stride, of_rows) =
        (product.to.1, |row: usize| [rows - row, (rows - row).saturating_sub(SIDE)].map(|n| n.min(SIDE)));
    let (mut shape, mut tiles) = (of_rows(0), unsafe { Block::tiles(of_rows(0)) });
    for row in (0..rows).step_by(2 * SIDE) {
        if shape != of_rows(row) {
            shape = of_rows(row);
            drop(tiles);
            tiles = unsafe { Block::tiles(shape) };
        }
        for column in (0..width).step_by(2 * SIDE) {
            let start = product.to.0[row * stride + column..].as_mut_ptr();
            let block = Block {
                left: [panel(left, row / SIDE), panel(left, row / SIDE + 1)],
                right: [panel(right, column / SIDE), panel(right, column / SIDE + 1)],
                two: [shape[1] > 0, column + SIDE < width],
                sums: [0, SIDE].map(|a| [0, SIDE].map(|b| start.wrapping_add(a * stride + b))),
                stride,
            };
            unsafe { block.add(&tiles, 0..steps, matches!(product.then, Then::Write)) };
        }
    }
    true
}

/// Multiplies what is there by the factors of its columns.
#[inline(always)]
fn scale(product: &mut Product<f32>, factors: &[f32]) {
    for row in product.to.0.chunks_mut(product.to.1).take(product.rows) {
        for (to, factors) in row.chunks_exact_mut(SIDE).zip(factors.chunks_exact(SIDE)).take(product.width / SIDE) {
            F32x16::load(to).mul(F32x16::load(factors)).store(to);
        }
    }
}

/// A factor as lines of the inner dimension.
struct Factor<'a> {
    of: Left<'a, f32>,
    lines: usize,
    depth: usize,
    /// How often the inner dimension is repeated: twice if either factor is split.
    parts: usize,
    /// Whether the first time has the upper parts of numbers and the second time the lower ones.
    split: bool,
}

impl Factor<'_> {
    /// Packs all lines, sixteen at a time. Returns whether all numbers are finite.
    ///
    /// # Safety
    /// The CPU must have AVX-512, and all lines must be there.
    #[inline(always)]
    unsafe fn pack(&self, order: Order, to: &mut Aligned<u8>) -> bool {
        let bytes = self.lines.div_ceil(SIDE) * self.parts * self.depth.div_ceil(STEP) * TILE;
        if to.len() < bytes {
            *to = Aligned::new(bytes);
        }
        let to = &mut to[..bytes];
        unsafe {
            match (self.of.along == 1, order) {
                (true, Order::Lines) => self.pack_from::<true, false>(to),
                (true, Order::Pairs) => self.pack_from::<true, true>(to),
                (false, Order::Lines) => self.pack_from::<false, true>(to),
                (false, Order::Pairs) => self.pack_from::<false, false>(to),
            }
        }
    }

    /// Packs lines that are contiguous, or neighbours. Tiles that are not in the wanted order are turned.
    #[inline(always)]
    unsafe fn pack_from<const CONTIGUOUS: bool, const TURN: bool>(&self, to: &mut [u8]) -> bool {
        let once = self.depth.div_ceil(STEP) * TILE;
        let mut largest = unsafe { _mm512_setzero_si512() };
        for (at, to) in to.chunks_exact_mut((self.parts * once).max(1)).enumerate() {
            for step in 0..self.depth.div_ceil(STEP) {
                let (line, k) = (at * SIDE, step * STEP);
                let to = &mut to[step * TILE..];
                let whole = self.lines - line >= SIDE && self.depth - k >= STEP;
                unsafe {
                    match whole {
                        true => self.tile::<CONTIGUOUS, TURN, true>([line, k], once, to, &mut largest),
                        false => self.tile::<CONTIGUOUS, TURN, false>([line, k], once, to, &mut largest),
                    }
                }
            }
        }
        const INFINITE: u32 = f32::INFINITY.to_bits() << 1;
        unsafe { _mm512_reduce_max_epu32(largest) < INFINITE }
    }

    /// Writes a step of sixteen lines, and once more, or its lower parts, `once` bytes later. `largest` gets the largest
    /// magnitudes, as bits without the sign.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn tile<const CONTIGUOUS: bool, const TURN: bool, const WHOLE: bool>(
        &self,
        at: [usize; 2],
        once: usize,
        to: &mut [u8],
        largest: &mut __m512i,
    ) {
        let mut tile = [F32x16::zero(); SIDE];
        let mut bits = *largest;
        let Left { values, down, along } = self.of;
        let start = values.as_ptr().wrapping_add(at[0] * down + at[1] * along);
        let stride = if CONTIGUOUS { down } else { 2 * along };
        unrolled!(row < SIDE, {
            let couple = unsafe { self.couple::<CONTIGUOUS, WHOLE>(start.wrapping_add(row * stride), at, row) };
            for half in couple {
                let of_half = _mm512_castps_si512(half.0);
                bits = _mm512_max_epu32(bits, _mm512_add_epi32(of_half, of_half));
            }
            tile[row] = unsafe { if CONTIGUOUS { joined(couple) } else { interleaved(couple) } };
        });
        *largest = bits;
        if TURN {
            transpose(&mut tile);
        }
        write(&tile, &mut to[..TILE]);
        if self.parts == 1 {
            return;
        }
        if self.split {
            unrolled!(row < SIDE, {
                let [a, b] = unsafe { self.couple::<CONTIGUOUS, WHOLE>(start.wrapping_add(row * stride), at, row) };
                let lower = unsafe { [a.sub(upper(a)), b.sub(upper(b))] };
                tile[row] = unsafe { if CONTIGUOUS { joined(lower) } else { interleaved(lower) } };
            });
            if TURN {
                transpose(&mut tile);
            }
        }
        write(&tile, &mut to[once..][..TILE]);
    }

    /// What makes a row of a tile: two halves of a line, or two numbers of all lines. What is not there is 0.
    #[inline(always)]
    unsafe fn couple<const CONTIGUOUS: bool, const WHOLE: bool>(
        &self,
        from: *const f32,
        [first, at]: [usize; 2],
        row: usize,
    ) -> [F32x16; 2] {
        let second = from.wrapping_add(if CONTIGUOUS { SIDE } else { self.of.along });
        if WHOLE {
            return unsafe { [F32x16(_mm512_loadu_ps(from)), F32x16(_mm512_loadu_ps(second))] };
        }
        let masks = match CONTIGUOUS {
            true if first + row >= self.lines => [0, 0],
            true => [first_bits(self.depth - at), first_bits((self.depth - at).saturating_sub(SIDE))],
            false => [0, 1].map(|k| if at + 2 * row + k < self.depth { first_bits(self.lines - first) } else { 0 }),
        };
        let masks = masks.map(|mask| mask as u16);
        unsafe { [F32x16(_mm512_maskz_loadu_ps(masks[0], from)), F32x16(_mm512_maskz_loadu_ps(masks[1], second))] }
    }
}

const UPPER: i32 = 0xffff_0000_u32 as i32;

/// Numbers rounded to bf16, towards 0.
#[inline(always)]
unsafe fn upper(of: F32x16) -> F32x16 {
    unsafe { F32x16(_mm512_and_ps(of.0, _mm512_castsi512_ps(_mm512_set1_epi32(UPPER)))) }
}

/// The upper halves of two vectors, one after the other.
#[inline(always)]
unsafe fn joined([first, second]: [F32x16; 2]) -> F32x16 {
    const ODD: [u16; 32] = {
        let mut odd = [0; 32];
        let mut i = 0;
        while i < 32 {
            odd[i] = 2 * i as u16 + 1;
            i += 1;
        }
        odd
    };
    unsafe {
        let odd = _mm512_loadu_si512(ODD.as_ptr().cast());
        let [first, second] = [_mm512_castps_si512(first.0), _mm512_castps_si512(second.0)];
        F32x16(_mm512_castsi512_ps(_mm512_permutex2var_epi16(first, odd, second)))
    }
}

/// The upper halves of two vectors, side by side in each word.
#[inline(always)]
unsafe fn interleaved([low, high]: [F32x16; 2]) -> F32x16 {
    unsafe {
        let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low.0));
        let high = _mm512_and_si512(_mm512_castps_si512(high.0), _mm512_set1_epi32(UPPER));
        F32x16(_mm512_castsi512_ps(_mm512_or_si512(low, high)))
    }
}
