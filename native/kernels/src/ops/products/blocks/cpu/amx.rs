//! Integer products of several rows of x by AMX. Weights are the left factor, a block of sixteen outputs per tile.
//! Those of Q8_0 are read in place, those of Q4_0 are unpacked, some blocks at a time. Rows of x are the right factor,
//! packed once, sixteen per tile.
//!
//! Each block has scales of its own. So every product goes from its tile through memory to registers, where it is
//! scaled and added. That takes one and a half cycles for each row of a tile, 24 for a tile, and about 64 loads, 32
//! cycles. The product itself takes 16, concurrently.

// Every `unsafe` here is an intrinsic or a tile, sound where this is called: on CPUs with AMX, which has AVX-512.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::product::{Quantized, Sums};
use crate::cpu::aligned::Aligned;
use crate::cpu::amx::{Lines, ROW, SIDE, Tiles, WHOLE, first_bits, read};
use crate::cpu::vector::transpose;
use crate::cpu::{Vector, prefetch, unrolled};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format, SCALE};
use std::arch::x86_64::*;
use std::ops::Range;

/// From this number of rows on, tiles are faster than vectors.
pub const ROWS: usize = 12;

/// Blocks that are unpacked at a time: their tiles, 8 KiB, stay in the first-level cache.
const BLOCKS: usize = 16;

/// Values of a tile of sums.
const SUMS: usize = SIDE * SIDE;

/// Bytes of a tile of weights: a block of each of sixteen outputs.
const WEIGHTS: usize = SIDE * BLOCK;

/// Rows of x as right factors.
pub struct Prepared {
    /// A tile for every two blocks of each sixteen rows.
    tiles: Aligned<u8>,
    /// The scales of a block of sixteen rows side by side.
    scales: Aligned<f32>,
    rows: usize,
    /// Blocks of a row, rounded up to whole tiles.
    padded: usize,
    blocks: usize,
}

impl Prepared {
    /// Packs the rows of x.
    pub fn new(x: &Quantized, threads: usize) -> Result<Prepared> {
        let Quantized { rows, blocks, .. } = *x;
        let len = blocks * BLOCK;
        let lines = Lines { bytes: bytemuck::cast_slice(&x.q), stride: len, count: rows, len };
        let padded = blocks.next_multiple_of(2);
        let mut scales = Aligned::new(rows.div_ceil(SIDE) * padded * SIDE);
        for (row, d) in x.d.chunks_exact(blocks.max(1)).enumerate() {
            let to = &mut scales[row / SIDE * padded * SIDE + row % SIDE..];
            to.iter_mut().step_by(SIDE).zip(d).for_each(|(to, d)| *to = *d);
        }
        let tiles = unsafe { lines.pack_all(threads)? };
        Ok(Prepared { tiles, scales, rows, padded, blocks })
    }
}

/// The workspace of a task.
struct Scratch {
    /// Tiles of weights of Q4_0.
    unpacked: Aligned<u8>,
    /// The scales of weights, those of an output side by side.
    scales: Aligned<f32>,
    /// Products of blocks: two in progress, two finished.
    products: Aligned<i32>,
    /// Sums of an output and sixteen rows in a row, a tile for each sixteen rows of x.
    sums: Aligned<f32>,
}

impl Sums<'_, Prepared> {
    /// Computes the sums.
    pub fn run(mut self) {
        let mut scratch = Scratch {
            unpacked: Aligned::new(if self.format == Format::Q4 { BLOCKS * WEIGHTS } else { 0 }),
            scales: Aligned::new(SIDE * BLOCKS),
            products: Aligned::new(4 * SUMS),
            sums: Aligned::new(self.x.rows.div_ceil(SIDE) * SUMS),
        };
        for at in (0..self.outputs.len()).step_by(SIDE) {
            let width = SIDE.min(self.outputs.len() - at);
            unsafe { self.strip(at, width, &mut scratch) };
        }
    }

    /// The sums of at most sixteen outputs.
    ///
    /// # Safety
    /// The CPU must have AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn strip(&mut self, at: usize, width: usize, scratch: &mut Scratch) {
        let bytes = self.x.blocks * self.format.bytes();
        let weights = &self.weights[(self.outputs.start + at) * bytes..][..width * bytes];
        let shape = [width, BLOCK];
        let (of_x, of_sums) = ([BLOCK / 4, ROW], [width, ROW]);
        // Tiles 0 and 1 are products, 2 and 3 weights, 4 and 5 rows of x.
        let tiles = unsafe { Tiles::new([of_sums, of_sums, shape, shape, of_x, of_x, WHOLE, WHOLE]) };
        scratch.sums.fill(0.0);
        for first in (0..self.x.blocks).step_by(BLOCKS) {
            let blocks = first..self.x.blocks.min(first + BLOCKS);
            unsafe {
                scales(self.format, weights, bytes, blocks.clone(), &mut scratch.scales);
                let of = match self.format {
                    Format::Q8 => Weights {
                        start: weights[first * self.format.bytes() + SCALE..].as_ptr(),
                        row: bytes,
                        block: self.format.bytes(),
                    },
                    Format::Q4 => unpack(weights, bytes, blocks.clone(), &mut scratch.unpacked),
                };
                let sixteens = self.x.rows.div_ceil(SIDE);
                let (next, pairs) = (blocks.end * self.format.bytes(), blocks.len().div_ceil(2));
                // After the end of these rows come the next sixteen.
                let start = if next < bytes { next } else { weights.len() };
                let ahead =
                    Ahead { weights, row: bytes, start, bytes: BLOCKS * self.format.bytes(), turns: sixteens * pairs };
                for sixteen in 0..sixteens {
                    self.add(&tiles, of, sixteen, blocks.clone(), &ahead, scratch);
                }
            }
        }
        drop(tiles);
        for (sixteen, sums) in scratch.sums.chunks_exact(SUMS).enumerate() {
            self.turn(sums, sixteen * SIDE, at, width);
        }
    }

    /// Adds the products of some blocks with sixteen rows of x.
    #[inline(always)]
    unsafe fn add(
        &self,
        tiles: &Tiles,
        of: Weights,
        sixteen: usize,
        blocks: Range<usize>,
        ahead: &Ahead,
        scratch: &mut Scratch,
    ) {
        let (first, count) = (sixteen * self.x.padded + blocks.start, blocks.len());
        let x = self.x.tiles[first * WEIGHTS..].as_ptr();
        let of_x = self.x.scales[first * SIDE..].as_ptr();
        let (of_w, products) = (scratch.scales.as_ptr(), scratch.products.as_mut_ptr());
        let sums = scratch.sums[sixteen * SUMS..][..SUMS].as_mut_ptr();
        unsafe {
            let mut totals = [_mm512_setzero_ps(); SIDE];
            unrolled!(o < SIDE, {
                totals[o] = _mm512_load_ps(sums.add(o * SIDE));
            });
            // A pair of blocks is multiplied while the previous one is added: products have a long latency.
            for pair in 0..=count.div_ceil(2) {
                if 2 * pair < count {
                    let to = products.add(pair % 2 * 2 * SUMS);
                    // Past the last block it is read again, with scales of 0.
                    let second = (2 * pair + 1).min(count - 1);
                    multiply::<0, 2, 4>(tiles, of.block(2 * pair), x.add(2 * pair * WEIGHTS), of.row, to);
                    multiply::<1, 3, 5>(tiles, of.block(second), x.add(second * WEIGHTS), of.row, to.add(SUMS));
                    ahead.turn(sixteen * count.div_ceil(2) + pair);
                }
                if pair > 0 {
                    let from = products.add((pair - 1) % 2 * 2 * SUMS);
                    let at = 2 * (pair - 1);
                    add_scaled(from, of_x.add(at * SIDE), of_w.add(at), &mut totals);
                    add_scaled(from.add(SUMS), of_x.add((at + 1) * SIDE), of_w.add(at + 1), &mut totals);
                }
            }
            unrolled!(o < SIDE, {
                _mm512_store_ps(sums.add(o * SIDE), totals[o]);
            });
        }
    }

    /// Writes a tile of sums as rows.
    #[inline(always)]
    fn turn(&mut self, sums: &[f32], first: usize, at: usize, width: usize) {
        let mut square = read(sums);
        transpose(&mut square);
        let count = self.outputs.len();
        for (row, to) in square.iter().zip(self.to[first * count..].chunks_exact_mut(count)) {
            row.store_partial(&mut to[at..][..width]);
        }
    }
}

/// Prefetches the weights that come next, a few lines at a time: many at once would hold up all other loads.
struct Ahead<'a> {
    weights: &'a [u8],
    row: usize,
    /// Where the next blocks of the first row start, and their bytes in each row.
    start: usize,
    bytes: usize,
    /// Remaining turns before they are needed.
    turns: usize,
}

impl Ahead<'_> {
    #[inline(always)]
    fn turn(&self, at: usize) {
        for row in at * SIDE / self.turns..(at + 1) * SIDE / self.turns {
            let start = self.start + row * self.row;
            for at in (start..start + self.bytes).step_by(ROW) {
                prefetch(self.weights.as_ptr(), at);
            }
        }
    }
}

/// The layout of tiles of weights: the first block, and the strides in bytes between outputs and between blocks.
#[derive(Clone, Copy)]
struct Weights {
    start: *const u8,
    row: usize,
    block: usize,
}

impl Weights {
    #[inline(always)]
    fn block(&self, at: usize) -> *const u8 {
        self.start.wrapping_add(at * self.block)
    }
}

/// The products of a block.
///
/// # Safety
/// The tiles must be configured for these factors, and the factors must be readable.
#[inline(always)]
unsafe fn multiply<const C: usize, const A: usize, const B: usize>(
    tiles: &Tiles,
    weights: *const u8,
    x: *const u8,
    row: usize,
    to: *mut i32,
) {
    unsafe {
        tiles.zero::<C>();
        tiles.load::<A>(weights, row);
        tiles.load::<B>(x, ROW);
        tiles.add_bytes::<C, A, B>();
        tiles.store::<C>(to.cast(), ROW);
    }
}

/// Adds the products of a block times both scales.
///
/// # Safety
/// A tile of products, sixteen scales of x and a scale for each output must be readable.
#[inline(always)]
unsafe fn add_scaled(products: *const i32, of_x: *const f32, of_w: *const f32, totals: &mut [__m512; SIDE]) {
    unsafe {
        let of_x = _mm512_load_ps(of_x);
        unrolled!(o < SIDE, {
            let products = _mm512_cvtepi32_ps(_mm512_load_si512(products.add(o * SIDE).cast()));
            let scale = _mm512_mul_ps(_mm512_set1_ps(*of_w.add(o * BLOCKS)), of_x);
            totals[o] = _mm512_fmadd_ps(products, scale, totals[o]);
        });
    }
}

/// Writes the scales of some blocks of each output; those of padding blocks are 0.
///
/// # Safety
/// The CPU must have AVX-512.
#[inline(always)]
unsafe fn scales(format: Format, weights: &[u8], row: usize, blocks: Range<usize>, to: &mut [f32]) {
    let step = format.bytes() as i32;
    unsafe {
        let offsets = _mm512_mullo_epi32(
            _mm512_set1_epi32(step),
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        );
        for (weights, to) in weights.chunks_exact(row).zip(to.chunks_exact_mut(BLOCKS)) {
            for (at, to) in to.chunks_exact_mut(SIDE).enumerate() {
                let first = blocks.start + at * SIDE;
                let mask = first_bits(blocks.end.saturating_sub(first)) as u16;
                let from = weights.as_ptr().wrapping_add(first * format.bytes());
                // The two bytes after a scale belong to its block, so the words are readable.
                let words = _mm512_mask_i32gather_epi32::<1>(_mm512_setzero_si512(), mask, offsets, from.cast());
                _mm512_store_ps(to.as_mut_ptr(), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
            }
        }
    }
}

/// Unpacks some blocks of each output to tiles of bytes.
///
/// # Safety
/// The CPU must have AVX-512.
#[inline(always)]
unsafe fn unpack(weights: &[u8], row: usize, blocks: Range<usize>, to: &mut [u8]) -> Weights {
    let bytes = Format::Q4.bytes();
    for (o, weights) in weights.chunks_exact(row).enumerate() {
        let weights = &weights[blocks.start * bytes..blocks.end * bytes];
        for (block, to) in weights.chunks_exact(bytes).zip(to.chunks_exact_mut(WEIGHTS)) {
            let to = &mut to[o * BLOCK..][..BLOCK];
            unsafe {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(block[SCALE..].as_ptr().cast()));
                let apart = _mm256_srlv_epi64(both, _mm256_set_epi64x(4, 4, 0, 0));
                let nibbles = _mm256_and_si256(apart, _mm256_set1_epi8(15));
                _mm256_store_si256(to.as_mut_ptr().cast(), _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8)));
            }
        }
    }
    Weights { start: to.as_ptr(), row: BLOCK, block: WEIGHTS }
}
