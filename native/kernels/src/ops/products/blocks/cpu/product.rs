//! Integer products of quantized rows with weights in blocks. A single row of x is multiplied by walks along rows of
//! weights, several rows by tiles of weights with one output per lane.

use super::With;
use super::lanes::{Eight, Lanes};
use crate::cpu::aligned::Aligned;
use crate::cpu::{prefetch_near, unrolled};
use crate::ops::products::blocks::format::{BLOCK, Format};
use half::f16;
use std::ops::Range;

/// Blocks per step of a walk: their scales fill a vector of eight.
const GROUP: usize = 8;

/// Prefetch distance along a row of weights, in bytes.
const AHEAD: usize = 2048;

/// Bytes of a group of x: scales, start values of the sums, integers. With Q4_0 two blocks share a vector, a half each.
/// Then sums start from vectors, and the integers are ordered as 16 of one block, 16 of the other, then the rest of
/// both.
const fn group_bytes(q4: bool) -> usize {
    GROUP * (4 + if q4 { 16 } else { 4 } + BLOCK)
}

/// Rows of x in Q8_0, with the scales apart.
pub struct Quantized {
    /// Integers, in row-major order.
    pub q: Vec<i8>,
    /// The scale of each block, rounded as if stored.
    pub d: Vec<f32>,
    /// Rows.
    pub rows: usize,
    /// Blocks of a row.
    pub blocks: usize,
}

/// Rows of x in the order in which the loops read them.
pub struct Prepared {
    bytes: Aligned<u8>,
    rows: usize,
    blocks: usize,
}

/// Words of a cell: a block of a row, the start value of its sum, its scale.
const CELL: usize = BLOCK / 4 + 2;

impl Prepared {
    /// Prepares rows for the instructions of `L` and weights of `format`. The start values of sums cancel the offsets
    /// of the weights.
    pub fn new<L: Lanes>(x: &Quantized, format: Format) -> Prepared {
        let Quantized { rows, blocks, .. } = *x;
        let bytes = match rows {
            1 => blocks.div_ceil(GROUP) * group_bytes(format == Format::Q4),
            _ => rows * blocks * CELL * 4,
        };
        let mut prepared = Prepared { bytes: Aligned::new(bytes), rows, blocks };
        for (at, (q, &d)) in x.q.chunks_exact(BLOCK).zip(&x.d).enumerate() {
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            let start = -sum * L::OFFSETS[usize::from(format == Format::Q4)];
            match rows {
                1 => prepared.set_in_group(format, at, q, d, start),
                _ => prepared.set_cell(at / blocks, at % blocks, q, d, start),
            }
        }
        prepared
    }

    fn set_in_group(&mut self, format: Format, block: usize, q: &[i8], d: f32, start: i32) {
        let (q4, at) = (format == Format::Q4, block % GROUP);
        let group = &mut self.bytes[block / GROUP * group_bytes(q4)..][..group_bytes(q4)];
        let (scales, rest) = group.split_at_mut(4 * GROUP);
        let (starts, integers) = rest.split_at_mut(rest.len() - GROUP * BLOCK);
        let start_at = at * starts.len() / GROUP;
        scales[4 * at..][..4].copy_from_slice(&d.to_ne_bytes());
        starts[start_at..][..4].copy_from_slice(&start.to_ne_bytes());
        let q: &[u8] = bytemuck::cast_slice(q);
        if q4 {
            let pair = at / 2 * 2 * BLOCK + at % 2 * BLOCK / 2;
            integers[pair..][..BLOCK / 2].copy_from_slice(&q[..BLOCK / 2]);
            integers[pair + BLOCK..][..BLOCK / 2].copy_from_slice(&q[BLOCK / 2..]);
        } else {
            integers[BLOCK * at..][..BLOCK].copy_from_slice(q);
        }
    }

    fn set_cell(&mut self, row: usize, block: usize, q: &[i8], d: f32, start: i32) {
        let cell = &mut self.bytes[(block * self.rows + row) * CELL * 4..][..CELL * 4];
        cell[..BLOCK].copy_from_slice(bytemuck::cast_slice(q));
        cell[BLOCK..BLOCK + 4].copy_from_slice(&start.to_ne_bytes());
        cell[BLOCK + 4..].copy_from_slice(&d.to_ne_bytes());
    }

    fn start(&self) -> *const u8 {
        self.bytes.as_ptr()
    }
}

/// The sums of all rows of x for a range of outputs, in row-major order.
pub struct Sums<'a, X> {
    /// The rows of x, prepared for these instructions and this format.
    pub x: &'a X,
    /// The weights of all outputs.
    pub weights: &'a [u8],
    /// Their format.
    pub format: Format,
    /// The outputs.
    pub outputs: Range<usize>,
    /// The sums are written here.
    pub to: &'a mut [f32],
}

impl With for Sums<'_, Prepared> {
    #[inline(always)]
    fn with<L: Lanes>(self) {
        match self.format {
            Format::Q8 => self.run::<L, false>(),
            Format::Q4 => self.run::<L, true>(),
        }
    }
}

impl Sums<'_, Prepared> {
    #[inline(always)]
    fn run<L: Lanes, const Q4: bool>(self) {
        assert_eq!(self.to.len(), self.x.rows * self.outputs.len(), "room for all sums");
        match self.x.rows {
            1 => self.one_row::<L, Q4>(),
            _ => self.many_rows::<L, Q4>(),
        }
    }

    /// The weights of an output.
    #[inline(always)]
    fn row(&self, o: usize) -> &[u8] {
        let bytes = self.x.blocks * self.format.bytes();
        &self.weights[o * bytes..][..bytes]
    }

    /// Pairs each output of the first half with one of the second. x is read once for both, and each half is an
    /// unbroken stream through memory. Pairs of adjacent outputs would break both streams at the end of each row.
    #[inline(always)]
    fn one_row<L: Lanes, const Q4: bool>(self) {
        let (start, half) = (self.outputs.start, self.outputs.len() / 2);
        for at in 0..half {
            let rows = [self.row(start + at), self.row(start + half + at)];
            [self.to[at], self.to[half + at]] = walk::<L::Row, Q4, 2>(self.x, rows);
        }
        if self.outputs.len() % 2 == 1 {
            [self.to[2 * half]] = walk::<L::Row, Q4, 1>(self.x, [self.row(start + 2 * half)]);
        }
    }

    #[inline(always)]
    fn many_rows<L: Lanes, const Q4: bool>(self) {
        let (rows, count) = (self.x.rows, self.outputs.len());
        let mut tile = vec![0.0f32; rows * L::LANES];
        for at in (0..count).step_by(L::LANES) {
            let width = L::LANES.min(count - at);
            let mut weights = [&[][..]; 16];
            for (lane, weights) in weights[..L::LANES].iter_mut().enumerate() {
                // Lanes past the last output repeat it, and are dropped.
                *weights = self.row(self.outputs.start + at + lane.min(width - 1));
            }
            tile.fill(0.0);
            add_tile::<L, Q4>(self.x, &weights, &mut tile);
            for row in 0..rows {
                self.to[row * count + at..][..width].copy_from_slice(&tile[row * L::LANES..][..width]);
            }
        }
    }
}

/// The weights of blocks as `L` multiplies them.
#[inline(always)]
unsafe fn unpacked<L: Lanes, const Q4: bool>(blocks: [*const u8; 2]) -> L::Words {
    // SAFETY: the caller's promise.
    unsafe { if Q4 { L::q4(blocks) } else { L::q8(blocks) } }
}

#[inline(always)]
fn dot<L: Lanes, const Q4: bool>(sums: L::Words, weights: L::Words, x: L::Words) -> L::Words {
    if Q4 { L::dot4(sums, weights, x) } else { L::dot8(sums, weights, x) }
}

#[inline(always)]
pub(super) const fn block_bytes(q4: bool) -> usize {
    if q4 { Format::Q4.bytes() } else { Format::Q8.bytes() }
}

/// The sums of one row of x for `OUTPUTS` outputs.
#[inline(always)]
fn walk<L: Eight, const Q4: bool, const OUTPUTS: usize>(x: &Prepared, weights: [&[u8]; OUTPUTS]) -> [f32; OUTPUTS] {
    let (bytes, of_x) = (GROUP * block_bytes(Q4), group_bytes(Q4));
    assert!(weights.iter().all(|weights| weights.len() == x.blocks * block_bytes(Q4)), "rows of as many blocks");
    assert!(x.bytes.len() >= x.blocks.div_ceil(GROUP) * of_x, "a row of x");
    let picks = picks::<L, Q4>();
    let (mut sums, mut group_of_x) = ([[L::spread_float(0.0); 2]; OUTPUTS], x.start());
    let mut groups = [std::ptr::null(); OUTPUTS];
    unrolled!(o < OUTPUTS, {
        groups[o] = weights[o].as_ptr();
    });
    for _ in 0..x.blocks / GROUP {
        // SAFETY: `x.blocks / GROUP` whole groups are in bounds.
        unsafe {
            add_group::<L, Q4, OUTPUTS>(groups, group_of_x, &picks, &mut sums);
            unrolled!(o < OUTPUTS, {
                for line in (0..bytes).step_by(64) {
                    prefetch_near(groups[o], AHEAD + line);
                }
                groups[o] = groups[o].add(bytes);
            });
            group_of_x = group_of_x.add(of_x);
        }
    }
    let rest = x.blocks % GROUP * block_bytes(Q4);
    if rest > 0 {
        // Padding with blocks of zeros, like those of x, adds nothing.
        let mut last = [[0; GROUP * block_bytes(false)]; OUTPUTS];
        for (last, weights) in last.iter_mut().zip(weights) {
            last[..rest].copy_from_slice(&weights[weights.len() - rest..]);
        }
        let groups = std::array::from_fn(|at| last[at].as_ptr());
        // SAFETY: x has a last group, and `last` has room for a group of either format.
        unsafe { add_group::<L, Q4, OUTPUTS>(groups, group_of_x, &picks, &mut sums) };
    }
    let mut totals = [0.0; OUTPUTS];
    unrolled!(o < OUTPUTS, {
        totals[o] = L::total(L::add(sums[o][0], sums[o][1]));
    });
    totals
}

/// The selectors of the scales of each block of a group, or of each pair of blocks.
#[inline(always)]
fn picks<L: Eight, const Q4: bool>() -> [L::Words; 8] {
    let mut picks = [L::spread(0); 8];
    unrolled!(at < 8, {
        picks[at] = L::pick(if Q4 { [at / 2 * 2, at / 2 * 2 + 1] } else { [at, at] });
    });
    picks
}

/// Adds a group of blocks for each output. Each output alternates between two sums, because with one every block would
/// wait for the one before.
///
/// # Safety
/// A group of weights for each output, and one of x, are readable at these addresses.
#[inline(always)]
unsafe fn add_group<L: Eight, const Q4: bool, const OUTPUTS: usize>(
    weights: [*const u8; OUTPUTS],
    x: *const u8,
    picks: &[L::Words; 8],
    sums: &mut [[L::Floats; 2]; OUTPUTS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut scales = [L::floats(x.cast()); OUTPUTS];
        unrolled!(o < OUTPUTS, {
            scales[o] = L::mul(L::scales::<Q4>(weights[o]), scales[o]);
        });
        let (starts, integers) = (x.add(4 * GROUP), x.add(group_bytes(Q4) - GROUP * BLOCK));
        unrolled!(at < 8, {
            let q = integers.add(at * BLOCK);
            if !Q4 {
                let (start, x) = (L::first(starts.cast::<i32>().add(at).read()), L::words(q));
                unrolled!(o < OUTPUTS, {
                    let products = L::dot8(start, L::q8([weights[o].add(at * block_bytes(false)); 2]), x);
                    add_scaled::<L>(products, scales[o], picks[at], &mut sums[o][at % 2]);
                });
            } else if at & 1 == 0 {
                let (start, x) = (L::words(starts.add(16 * at)), [L::words(q), L::words(q.add(BLOCK))]);
                unrolled!(o < OUTPUTS, {
                    let block = weights[o].add(at * block_bytes(true));
                    let [first, second] = L::q4_halves([block, block.add(block_bytes(true))]);
                    let products = L::dot4(L::dot4(start, first, x[0]), second, x[1]);
                    add_scaled::<L>(products, scales[o], picks[at], &mut sums[o][at / 2 % 2]);
                });
            }
        });
    }
}

/// Adds products times the scale that `pick` selects.
#[inline(always)]
fn add_scaled<L: Eight>(products: L::Words, scales: L::Floats, pick: L::Words, to: &mut L::Floats) {
    *to = L::mul_add(L::to_floats(products), L::picked(scales, pick), *to);
}

/// Adds the products of all blocks of these outputs to the sums of a tile, `L::LANES` for each row of x.
#[inline(always)]
fn add_tile<L: Lanes, const Q4: bool>(x: &Prepared, weights: &[&[u8]; 16], tile: &mut [f32]) {
    let bytes = block_bytes(Q4);
    let (blocks, rows) = (x.blocks, x.rows);
    assert!(weights[..L::LANES].iter().all(|weights| weights.len() == blocks * bytes), "rows of as many blocks");
    assert!(x.bytes.len() >= rows * blocks * CELL * 4 && tile.len() == rows * L::LANES, "as many rows");
    for block in 0..blocks {
        // SAFETY: block `block` of each row of weights exists, as do the cells of all rows and their sums.
        unsafe {
            let (w, d) = transposed::<L, Q4>(weights, block * bytes);
            let mut cell = x.start().cast::<i32>().add(block * rows * CELL);
            let mut to = tile.as_mut_ptr();
            for _ in 0..rows {
                let mut products = L::spread(cell.add(BLOCK / 4).read());
                products = dot::<L, Q4>(products, w[0], L::spread(cell.read()));
                products = dot::<L, Q4>(products, w[1], L::spread(cell.add(1).read()));
                products = dot::<L, Q4>(products, w[2], L::spread(cell.add(2).read()));
                products = dot::<L, Q4>(products, w[3], L::spread(cell.add(3).read()));
                products = dot::<L, Q4>(products, w[4], L::spread(cell.add(4).read()));
                products = dot::<L, Q4>(products, w[5], L::spread(cell.add(5).read()));
                products = dot::<L, Q4>(products, w[6], L::spread(cell.add(6).read()));
                products = dot::<L, Q4>(products, w[7], L::spread(cell.add(7).read()));
                let scales = L::mul(d, L::spread_float(cell.add(BLOCK / 4 + 1).cast::<f32>().read()));
                L::write(L::mul_add(L::to_floats(products), scales, L::floats(to)), to);
                (cell, to) = (cell.add(CELL), to.add(L::LANES));
            }
        }
    }
}

/// One block of each output, transposed: each vector has the same four bytes of all outputs. Then the scales.
///
/// # Safety
/// A whole block is readable at `at` in each row.
#[inline(always)]
unsafe fn transposed<L: Lanes, const Q4: bool>(weights: &[&[u8]; 16], at: usize) -> ([L::Words; 8], L::Floats) {
    let mut rows = [L::spread(0); 8];
    let mut scales = [f16::ZERO; 16];
    for (lane, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let first = weights[lane].as_ptr().add(at);
            scales[lane] = first.cast::<f16>().read_unaligned();
            let mut second = first;
            if L::BLOCKS == 2 {
                second = weights[lane + 8].as_ptr().add(at);
                scales[lane + 8] = second.cast::<f16>().read_unaligned();
            }
            *row = unpacked::<L, Q4>([first, second]);
        }
    }
    (L::transposed(rows), L::widen(&scales))
}
