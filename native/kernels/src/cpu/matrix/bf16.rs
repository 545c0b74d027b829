//! Products of bf16 matrices by [`amx`](crate::cpu::amx).
//!
//! Both factors are seen as lines along the inner dimension: rows of the first matrix, columns of the second. The lines
//! of the factor with fewer of them are packed into tiles in advance, in panels of sixteen. Those of the other factor
//! form strips, each of which is packed by the task that multiplies it with all panels. The task computes two by two
//! tiles of sums at a time, so that each loaded tile serves two products, and blocks the inner dimension so that its
//! strip stays in the caches. With few panels a strip is read in place.
//!
//! Contiguous lines are packed fastest as left tiles; lines that are adjacent in memory, element by element, as right
//! ones. There are more strips than panels, so the strips determine which factor is the left one.
//!
//! A product of tiles takes 5.7 ns on an Emerald Rapids core, and 7 with two by two tiles in the first-level cache.
//! With panels from the second level it takes 12.6; tiles whose rows cross cache lines take a fifth more than packed
//! ones.

// Every `unsafe` here is an intrinsic or a tile, sound where this is called: on CPUs with AMX, which has AVX-512.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::Matrix;
use crate::cpu::aligned::Aligned;
use crate::cpu::amx::{Block, Lines, Order, ROW, SIDE, Source, TILE, first_bits, read, write};
use crate::cpu::pool::{self, Shared};
use crate::cpu::vector::transpose;
use crate::cpu::x86::F32x16;
use crate::cpu::{Level, Vector};
use crate::error::Result;
use half::bf16;
use std::arch::x86_64::*;
use std::ops::Range;

/// Numbers of the inner dimension in a row of a tile.
const STEP: usize = ROW / size_of::<bf16>();

/// Numbers in a tile of sums.
const SUMS: usize = SIDE * SIDE;

/// Lines in a strip, unless there are too few lines for all threads.
pub const STRIP: usize = 2 * SIDE;

/// Steps along the inner dimension for which the tiles of a strip stay in the caches: 48 KiB.
const STEPS: usize = 24;

/// Tasks per thread.
const TURNS: usize = 8;

/// Up to this number of panels a strip is read in place: packing it would take as long as multiplying.
const FEW_PANELS: usize = 2;

/// Consumes finished sums, those of a range of rows and of columns, in row-major order with a row stride of [`STRIP`].
pub trait End: Fn(Range<usize>, Range<usize>, &[f32]) + Send + Sync {}

impl<F: Fn(Range<usize>, Range<usize>, &[f32]) + Send + Sync> End for F {}

/// Computes `a b`, where the CPU has the level [`Amx`](Level::Amx). Panics where the sizes do not match.
pub fn product(a: Matrix<bf16>, b: Matrix<bf16>, threads: usize, end: &impl End) -> Result<()> {
    assert_eq!(a.columns, b.rows, "an inner dimension");
    debug_assert!(Level::available().contains(&Level::Amx));
    let (x, w) = (a, b.transposed());
    let of_columns = w.rows >= x.rows;
    let (strips, panels) = if of_columns { (w, x) } else { (x, w) };
    let order = if strips.strides[1] == 1 { Order::Lines } else { Order::Pairs };
    // At least one step, so that an empty inner dimension gives sums of 0.
    let steps = strips.columns.div_ceil(STEP).max(1);
    let mut packed = Aligned::new(panels.rows.div_ceil(SIDE) * steps * TILE);
    pack_all(&panels, order.other(), steps, &mut packed, threads)?;
    let product = Product { strips, order, panels: &packed, lines: panels.rows, steps, of_columns };
    let strip = if strips.rows < 4 * STRIP * threads { SIDE } else { STRIP };
    let (count, ranges) = (strips.rows.div_ceil(strip), threads * TURNS);
    pool::for_each(threads, ranges.min(count), |range| {
        let ranges = ranges.min(count);
        let mut scratch = Scratch::new(&product);
        for at in range * count / ranges..(range + 1) * count / ranges {
            let strip = at * strip..strips.rows.min((at + 1) * strip);
            // SAFETY: the caller runs this where the CPU has AMX.
            unsafe { product.strip(strip, &mut scratch, end) };
        }
    })
}

/// Packs all lines, panel by panel and step by step.
fn pack_all(of: &Matrix<bf16>, order: Order, steps: usize, to: &mut [u8], threads: usize) -> Result<()> {
    let (panel, to) = (steps * TILE, Shared::new(to));
    pool::for_each(threads, of.rows.div_ceil(SIDE), |at| {
        // SAFETY: panels share no byte.
        let to = unsafe { to.part(at * panel, panel) };
        unsafe { pack(of, at * SIDE, order, to) };
    })
}

/// Packs sixteen lines from `first` on, a tile for each step. Padding is 0.
///
/// # Safety
/// The CPU must have these features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack(of: &Matrix<bf16>, first: usize, order: Order, to: &mut [u8]) {
    const SIZE: usize = size_of::<bf16>();
    let Matrix { values, rows: count, columns, strides: [down, along] } = *of;
    let lines = Lines { bytes: bytemuck::cast_slice(values), stride: down * SIZE, count, len: columns * SIZE };
    for (step, to) in to.chunks_exact_mut(TILE).enumerate() {
        let mut rows = match along {
            1 => unsafe { lines.load(first, step * ROW) },
            _ => by_pairs(of, first, step * STEP),
        };
        if (along == 1) == (order == Order::Pairs) {
            transpose(&mut rows);
        }
        write(&rows, to);
    }
}

/// A step of sixteen adjacent lines: a row of the tile holds a pair of numbers of each line.
#[inline(always)]
fn by_pairs(of: &Matrix<bf16>, first: usize, at: usize) -> [F32x16; SIDE] {
    let mut rows = [F32x16::zero(); SIDE];
    for (pair, row) in rows.iter_mut().enumerate() {
        let [low, high] = [across(of, first, at + 2 * pair), across(of, first, at + 2 * pair + 1)];
        *row = F32x16(unsafe { _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high))) });
    }
    rows
}

/// Number `k` of sixteen adjacent lines, in the lower half of each word.
#[inline(always)]
fn across(of: &Matrix<bf16>, first: usize, k: usize) -> __m512i {
    if k >= of.columns {
        return unsafe { _mm512_setzero_si512() };
    }
    let from = of.values[k * of.strides[1] + first..].as_ptr();
    let mask = first_bits(of.rows - first) as u16;
    unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast())) }
}

/// A product, with the panels packed.
struct Product<'a> {
    strips: Matrix<'a, bf16>,
    /// The order of the strips' tiles: [`Order::Lines`] makes them left tiles.
    order: Order,
    panels: &'a [u8],
    /// Lines of all panels.
    lines: usize,
    /// Steps along the inner dimension.
    steps: usize,
    /// Whether strips are columns of the result.
    of_columns: bool,
}

/// The workspace of a task.
struct Scratch {
    /// Tiles of sums: four for every two panels.
    tiles: Aligned<f32>,
    /// Finished sums of two panels.
    block: Aligned<f32>,
    /// The strip, if it has to be packed.
    strip: Aligned<u8>,
}

impl Scratch {
    fn new(of: &Product) -> Scratch {
        let strip = if of.must_be_packed() { 2 * of.steps * TILE } else { 0 };
        let sums = of.lines.next_multiple_of(STRIP) * STRIP;
        Scratch { tiles: Aligned::new(sums), block: Aligned::new(STRIP * STRIP), strip: Aligned::new(strip) }
    }
}

impl Product<'_> {
    /// Whether strips must be packed: their tiles cannot be loaded in place, or are loaded often enough to pay for
    /// packing.
    fn must_be_packed(&self) -> bool {
        let direct = self.order == Order::Lines && self.strips.columns == self.steps * STEP;
        !direct || self.lines > FEW_PANELS * SIDE
    }

    /// The tiles of a strip.
    #[inline(always)]
    fn strip_tiles(&self, strip: &Range<usize>, packed: &mut [u8]) -> [Source; 2] {
        if self.must_be_packed() {
            for (at, to) in packed.chunks_exact_mut(self.steps * TILE).enumerate().take(strip.len().div_ceil(SIDE)) {
                unsafe { pack(&self.strips, strip.start + at * SIDE, self.order, to) };
            }
            return [0, 1].map(|at| Source::packed(&packed[at * self.steps * TILE..]));
        }
        let row = self.strips.strides[0];
        [0, 1].map(|at| Source {
            start: self.strips.values.as_ptr().wrapping_add((strip.start + at * SIDE) * row).cast(),
            row: row * size_of::<bf16>(),
            step: ROW,
        })
    }

    /// The tiles of a panel. Past the last panel the address is out of bounds, and is never read.
    #[inline(always)]
    fn panel_tiles(&self, at: usize) -> Source {
        Source { start: self.panels.as_ptr().wrapping_add(at * self.steps * TILE), row: ROW, step: TILE }
    }

    /// Orders the values of strips and panels as those of the left tiles, then of the right tiles.
    #[inline(always)]
    fn sides<T>(&self, of_strip: T, of_panels: T) -> [T; 2] {
        match self.order {
            Order::Lines => [of_strip, of_panels],
            Order::Pairs => [of_panels, of_strip],
        }
    }

    /// The products of a strip with all panels.
    ///
    /// # Safety
    /// The CPU must have AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn strip(&self, strip: Range<usize>, scratch: &mut Scratch, end: &impl End) {
        let of_strip = self.strip_tiles(&strip, &mut scratch.strip);
        let [rows, _] = self.sides([strip.len().min(SIDE), strip.len().saturating_sub(SIDE)], [SIDE; 2]);
        let tiles = unsafe { Block::tiles(rows) };
        for from in (0..self.steps).step_by(STEPS) {
            let steps = from..self.steps.min(from + STEPS);
            for panel in (0..self.lines.div_ceil(SIDE)).step_by(2) {
                let of_panels = [panel, panel + 1].map(|panel| self.panel_tiles(panel));
                let [left, right] = self.sides(of_strip, of_panels);
                let two = self.sides(strip.len() > SIDE, (panel + 1) * SIDE < self.lines);
                let sums = scratch.tiles[panel * STRIP * SIDE..][..4 * SUMS].as_mut_ptr();
                let sums = [[0, 1], [2, 3]].map(|row| row.map(|at| sums.wrapping_add(at * SUMS)));
                unsafe { Block { left, right, two, sums, stride: SIDE }.add(&tiles, steps.clone(), from == 0) };
                if steps.end == self.steps {
                    self.finish(strip.clone(), panel, scratch, end);
                }
            }
        }
    }

    /// Passes the sums of a strip and two panels to `end`.
    #[inline(always)]
    fn finish(&self, strip: Range<usize>, panel: usize, scratch: &mut Scratch, end: &impl End) {
        let lines = panel * SIDE..self.lines.min((panel + 2) * SIDE);
        // Whether the left tiles are columns of the result, so that the sums must be transposed.
        let turned = self.of_columns == (self.order == Order::Lines);
        for (at, tile) in scratch.tiles[panel * STRIP * SIDE..][..4 * SUMS].chunks_exact(SUMS).enumerate() {
            let mut square = read(tile);
            let (mut row, mut column) = (at / 2 * SIDE, at % 2 * SIDE);
            if turned {
                transpose(&mut square);
                (row, column) = (column, row);
            }
            for (i, values) in square.iter().enumerate() {
                values.store(&mut scratch.block[(row + i) * STRIP + column..]);
            }
        }
        let [rows, columns] = if self.of_columns { [lines, strip] } else { [strip, lines] };
        end(rows, columns, &scratch.block);
    }
}
