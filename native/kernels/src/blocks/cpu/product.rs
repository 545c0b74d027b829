//! Integer products of quantized rows with weights in blocks: for one row of x by walks along rows of weights, for more
//! by tiles of weights in which each lane has an output.

use super::With;
use super::lanes::Lanes;
use crate::blocks::format::{BLOCK, Format};
use crate::cpu::prefetch_near;
use half::f16;
use std::ops::Range;

/// So many bytes ahead weights are asked for.
const AHEAD: usize = 2048;

/// What 32 zeros look like in either format.
const ZEROS: [u8; 34] = [0; 34];

/// Rows of x in Q8_0, scales apart.
pub struct Quantized {
    /// Integers, row after row.
    pub q: Vec<i8>,
    /// The scale of each block, as it would be stored.
    pub d: Vec<f32>,
    /// Rows.
    pub rows: usize,
    /// Blocks of a row.
    pub blocks: usize,
}

/// Rows of x as the loops read them.
pub struct Prepared {
    lines: Vec<Line>,
    rows: usize,
    blocks: usize,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: bytes, and nothing between them.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Line {}

/// (Inlined, as all that loops call here is: a call would put their vectors aside.) Bytes of a group: a vector of bytes, one of what sums start from, one of scales.
#[inline(always)]
const fn group<L: Lanes>() -> usize {
    3 * BLOCK * L::BLOCKS
}

/// Words of a cell: a block of a row, what its sum starts from, its scale.
const CELL: usize = BLOCK / 4 + 2;

impl Prepared {
    /// Rows for the instructions of `L` and weights of that format, which are offset: sums start from what is too much.
    pub fn new<L: Lanes>(x: &Quantized, format: Format) -> Prepared {
        let Quantized { rows, blocks, .. } = *x;
        let bytes = match rows {
            1 => blocks.div_ceil(L::BLOCKS) * group::<L>(),
            _ => rows * blocks * CELL * 4,
        };
        let mut prepared = Prepared { lines: vec![Line([0; 64]); bytes.div_ceil(64)], rows, blocks };
        let offset = L::OFFSETS[usize::from(format == Format::Q4)];
        for (at, (q, &d)) in x.q.chunks_exact(BLOCK).zip(&x.d).enumerate() {
            let (row, block) = (at / blocks, at % blocks);
            match rows {
                1 => prepared.set_group::<L>(block, q, d, offset),
                _ => prepared.set_cell(row, block, q, d, offset),
            }
        }
        prepared
    }

    fn set_group<L: Lanes>(&mut self, block: usize, q: &[i8], d: f32, offset: i32) {
        let start = block / L::BLOCKS * group::<L>();
        let (part, vector) = (block % L::BLOCKS * BLOCK, L::BLOCKS * BLOCK);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        let group = &mut bytes[start..][..3 * vector];
        group[part..][..BLOCK].copy_from_slice(bytemuck::cast_slice(q));
        for (lane, q) in q.chunks_exact(4).enumerate() {
            let too_much = offset * q.iter().map(|&q| i32::from(q)).sum::<i32>();
            group[vector + part + 4 * lane..][..4].copy_from_slice(&(-too_much).to_ne_bytes());
            group[2 * vector + part + 4 * lane..][..4].copy_from_slice(&d.to_ne_bytes());
        }
    }

    fn set_cell(&mut self, row: usize, block: usize, q: &[i8], d: f32, offset: i32) {
        let start = (block * self.rows + row) * CELL * 4;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        let cell = &mut bytes[start..][..CELL * 4];
        let too_much = offset * q.iter().map(|&q| i32::from(q)).sum::<i32>();
        cell[..BLOCK].copy_from_slice(bytemuck::cast_slice(q));
        cell[BLOCK..BLOCK + 4].copy_from_slice(&(-too_much).to_ne_bytes());
        cell[BLOCK + 4..].copy_from_slice(&d.to_ne_bytes());
    }

    fn start(&self) -> *const u8 {
        self.lines.as_ptr().cast()
    }
}

/// The sums of all rows of x for some outputs, row after row.
pub struct Sums<'a> {
    /// The rows of x, for these instructions and this format.
    pub x: &'a Prepared,
    /// The weights of all outputs.
    pub weights: &'a [u8],
    /// Their format.
    pub format: Format,
    /// The outputs.
    pub outputs: Range<usize>,
    /// Where the sums go.
    pub to: &'a mut [f32],
}

impl With for Sums<'_> {
    #[inline(always)]
    fn with<L: Lanes>(self) {
        match self.format {
            Format::Q8 => self.run::<L, false>(),
            Format::Q4 => self.run::<L, true>(),
        }
    }
}

impl Sums<'_> {
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

    #[inline(always)]
    fn one_row<L: Lanes, const Q4: bool>(self) {
        for at in 0..self.outputs.len() {
            self.to[at] = walk::<L, Q4>(self.x, self.row(self.outputs.start + at));
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
                // Lanes beyond the last output repeat it, and are dropped.
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

/// Bytes of weights, and what is to be made of them.
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
const fn block_bytes(q4: bool) -> usize {
    if q4 { Format::Q4.bytes() } else { Format::Q8.bytes() }
}

/// The sum of one row of x for an output. One row of weights after the other makes one stream through memory, which is
/// read faster than two side by side.
#[inline(always)]
fn walk<L: Lanes, const Q4: bool>(x: &Prepared, weights: &[u8]) -> f32 {
    let bytes = block_bytes(Q4);
    let (whole, groups) = (x.blocks / L::BLOCKS, x.blocks.div_ceil(L::BLOCKS));
    assert!(weights.len() == x.blocks * bytes, "a row of as many blocks");
    assert!(size_of_val(&x.lines[..]) >= groups * group::<L>(), "a row of x");
    let mut sum = L::spread_float(0.0);
    for at in 0..groups {
        // SAFETY: group `at` begins within the row, and where its second block does not, that is zeros.
        unsafe {
            let first = weights.as_ptr().add(at * L::BLOCKS * bytes);
            let second = if at < whole { first.wrapping_add(bytes) } else { ZEROS.as_ptr() };
            prefetch_near(first, AHEAD);
            let x = x.start().add(at * group::<L>());
            let products = L::words(x.add(BLOCK * L::BLOCKS));
            let products = dot::<L, Q4>(products, unpacked::<L, Q4>([first, second]), L::words(x));
            let scales = L::mul(L::scales([first, second]), L::floats(x.add(2 * BLOCK * L::BLOCKS).cast()));
            sum = L::mul_add(L::to_floats(products), scales, sum);
        }
    }
    L::total(sum)
}

/// Adds to the sums of a tile, `L::LANES` for each row of x, what all blocks of these outputs give.
#[inline(always)]
fn add_tile<L: Lanes, const Q4: bool>(x: &Prepared, weights: &[&[u8]; 16], tile: &mut [f32]) {
    let bytes = block_bytes(Q4);
    let (blocks, rows) = (x.blocks, x.rows);
    assert!(weights[..L::LANES].iter().all(|weights| weights.len() == blocks * bytes), "rows of as many blocks");
    assert!(size_of_val(&x.lines[..]) >= rows * blocks * CELL * 4 && tile.len() == rows * L::LANES, "as many rows");
    for block in 0..blocks {
        // SAFETY: block `block` of each row of weights is there, as are the cells of all rows, and their sums.
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

/// One block of each output, whose rows these are: vectors of the same four bytes of all outputs, and the scales.
///
/// # Safety
/// A whole block lies there in each row.
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
