//! Products of tiles by AMX, for tensors in bf16. A factor that comes from a tensor is exact in bf16. A computed one,
//! such as weights, is split into the sum of two bf16 numbers, so that at most 2^-16 of a value is lost.
//!
//! With 64 queries, 64 keys and a width of 64, a product takes 32 or 64 products of tiles, 0.2 or 0.4 us. In f32 by
//! vectors it takes 2.9 us. Packing takes about as long as multiplying. So keys and values of the forward pass are
//! packed once for all queries, and queries once for all keys.

// Every `unsafe` here is an intrinsic or a tile, sound where this is called: on CPUs with AMX, which has AVX-512.
#![allow(clippy::undocumented_unsafe_blocks)]

use super::product::{Computed, Left, Product, Then};
use super::tile::Dense;
use super::{Given, KEYS, each_range};
use crate::cpu::aligned::Aligned;
use crate::cpu::amx::{Block, Order, SIDE, Source, TILE, first_bits, write};
use crate::cpu::pool::Shared;
use crate::cpu::vector::transpose;
use crate::cpu::x86::F32x16;
use crate::cpu::{Level, Real, Storage, Vector, unrolled};
use crate::error::Result;
use crate::ops::attention::Problem;
use crate::tensor::DType;
use std::arch::x86_64::*;
use std::cell::RefCell;

/// Numbers of the inner dimension in a row of a tile.
const STEP: usize = 2 * SIDE;

/// A packed factor: groups of sixteen lines, step by step along the inner dimension. A split factor has the upper parts
/// of all steps of a group first, then the lower parts.
pub struct Packed {
    tiles: Aligned<u8>,
    steps: usize,
    parts: usize,
    is_finite: bool,
}

thread_local! {
    /// Workspace for both factors of a product.
    static ROOM: RefCell<[Packed; 2]> = const { RefCell::new([Packed::new(), Packed::new()]) };
}

/// Computes a product and returns true, unless a factor is not finite: the parts of split numbers would not add up
/// then.
pub fn run(product: &mut Product<f32>) -> bool {
    let Product { rows, depth, width, computed, packed: [of_left, of_right], .. } = *product;
    ROOM.with_borrow_mut(|[left, right]| {
        if of_left.is_none() {
            left.fill(product.left, [rows, depth], computed == Computed::Left, Order::Lines);
        }
        if of_right.is_none() {
            let columns = Left { values: product.right.0, down: 1, along: product.right.1 };
            right.fill(columns, [width, depth], computed == Computed::Right, Order::Pairs);
        }
        let (left, right) = (of_left.unwrap_or(left), of_right.unwrap_or(right));
        let are_finite = left.is_finite && right.is_finite;
        if are_finite {
            // SAFETY: the caller runs this where the CPU has AMX.
            unsafe { multiply(product, left, right) };
        }
        are_finite
    })
}

/// # Safety
/// The CPU must have AMX.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn multiply(product: &mut Product<f32>, left: &Packed, right: &Packed) {
    let Product { rows, depth, width, .. } = *product;
    if let Then::Scale(factors) = product.then {
        scale(product, factors);
    }
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
            for part in 0..left.parts.max(right.parts) {
                let block = Block {
                    left: [left.panel(row / SIDE, part), left.panel(row / SIDE + 1, part)],
                    right: [right.panel(column / SIDE, part), right.panel(column / SIDE + 1, part)],
                    two: [shape[1] > 0, column + SIDE < width],
                    sums: [0, SIDE].map(|a| [0, SIDE].map(|b| start.wrapping_add(a * stride + b))),
                    stride,
                };
                let fresh = part == 0 && matches!(product.then, Then::Write);
                unsafe { block.add(&tiles, 0..depth.div_ceil(STEP), fresh) };
            }
        }
    }
}

/// Multiplies the product's columns by their factors.
#[inline(always)]
fn scale(product: &mut Product<f32>, factors: &[f32]) {
    for row in product.to.0.chunks_mut(product.to.1).take(product.rows) {
        for (to, factors) in row.chunks_exact_mut(SIDE).zip(factors.chunks_exact(SIDE)).take(product.width / SIDE) {
            F32x16::load(to).mul(F32x16::load(factors)).store(to);
        }
    }
}

/// Keys, and columns of values, of all heads as packed left factors of [`KEYS`] keys each; `None` where products are
/// not by AMX.
pub fn pack_all<S: Storage>(given: &Given<S>) -> Result<Option<[Vec<Packed>; 2]>> {
    let Problem { width, value_width, .. } = *given.problem;
    if given.exec.level != Level::Amx || S::DTYPE != DType::Bf16 {
        return Ok(None);
    }
    let pack = |[k, v]: &[Dense<S::Wide>; 2]| {
        let keys = pack_heads(given, |head, first| k.tile(head, first), |count| [count, width])?;
        let values = pack_heads(given, |head, first| v.tile(head, first).transposed(), |count| [value_width, count])?;
        Ok([keys, values])
    };
    given.dense.as_ref().map(pack).transpose()
}

/// Packs the left factors of all heads.
fn pack_heads<'a, S: Storage>(
    given: &Given<S>,
    of: impl Fn(usize, usize) -> Left<'a, S::Wide> + Send + Sync,
    dims: impl Fn(usize) -> [usize; 2] + Send + Sync,
) -> Result<Vec<Packed>> {
    let Problem { batch, key_heads, keys, .. } = *given.problem;
    let each = keys.div_ceil(KEYS);
    let mut all: Vec<_> = (0..batch * key_heads * each).map(|_| Packed::new()).collect();
    let to = Shared::new(&mut all);
    each_range(given.exec.threads, batch * key_heads * each, |range| {
        for i in range {
            let first = i % each * KEYS;
            let Left { values, down, along } = of(i / each, first);
            // SAFETY: each factor is packed by one task.
            let to = unsafe { &mut to.part(i, 1)[0] };
            let left = Left { values: bytemuck::cast_slice(values), down, along };
            to.fill(left, dims(KEYS.min(keys - first)), false, Order::Lines);
        }
    })?;
    Ok(all)
}

/// Packs columns as a right factor, reusing the memory of an earlier one.
pub fn pack_columns<E: Real>(
    room: Option<Packed>,
    (values, along): (&[E], usize),
    dims: [usize; 2],
    split: bool,
) -> Option<Packed> {
    let mut packed = room.unwrap_or(Packed::new());
    packed.fill(Left { values: bytemuck::cast_slice(values), down: 1, along }, dims, split, Order::Pairs);
    Some(packed)
}

impl Packed {
    /// An empty factor.
    const fn new() -> Self {
        Packed { tiles: Aligned::none(), steps: 0, parts: 1, is_finite: true }
    }

    fn fill(&mut self, of: Left<f32>, [lines, depth]: [usize; 2], split: bool, order: Order) {
        (self.steps, self.parts) = (depth.div_ceil(STEP), if split { 2 } else { 1 });
        let bytes = lines.div_ceil(SIDE) * self.parts * self.steps * TILE;
        if self.tiles.len() < bytes {
            self.tiles = Aligned::new(bytes);
        }
        let (of, to) = (Factor { of, lines, depth, split }, &mut self.tiles[..bytes]);
        // SAFETY: only products by AMX get here, and the product has checked that its slices hold all lines.
        self.is_finite = unsafe {
            match (of.of.along == 1, order) {
                (true, Order::Lines) => of.pack::<true, false>(to),
                (true, Order::Pairs) => of.pack::<true, true>(to),
                (false, Order::Lines) => of.pack::<false, true>(to),
                (false, Order::Pairs) => of.pack::<false, false>(to),
            }
        };
    }

    /// The tiles of sixteen lines, or of their lower parts; empty past the last lines, where nothing is read.
    #[inline(always)]
    fn panel(&self, at: usize, part: usize) -> Source {
        let first = (at * self.parts + part % self.parts) * self.steps * TILE;
        Source::packed(&self.tiles[first.min(self.tiles.len())..])
    }
}

/// A factor to pack, as lines along the inner dimension.
struct Factor<'a> {
    of: Left<'a, f32>,
    lines: usize,
    depth: usize,
    /// Whether the lower parts of numbers are packed too.
    split: bool,
}

impl Factor<'_> {
    /// Packs lines, which are contiguous or else adjacent element by element, and with TURN transposes tiles into the
    /// wanted order. Returns whether all numbers are finite.
    ///
    /// # Safety
    /// The CPU must have AVX-512, and all lines must be readable.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn pack<const CONTIGUOUS: bool, const TURN: bool>(&self, to: &mut [u8]) -> bool {
        let once = self.depth.div_ceil(STEP) * TILE;
        let mut largest = _mm512_setzero_si512();
        for (at, to) in to.chunks_exact_mut((if self.split { 2 * once } else { once }).max(1)).enumerate() {
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
        _mm512_reduce_max_epu32(largest) < INFINITE
    }

    /// Writes one step of sixteen lines, and `once` bytes later their lower parts, if split. `largest` is updated with
    /// the largest magnitudes, as bits without the sign.
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
        if !self.split {
            return;
        }
        unrolled!(row < SIDE, {
            let [a, b] = unsafe { self.couple::<CONTIGUOUS, WHOLE>(start.wrapping_add(row * stride), at, row) };
            let lower = unsafe { [a.sub(upper(a)), b.sub(upper(b))] };
            tile[row] = unsafe { if CONTIGUOUS { joined(lower) } else { interleaved(lower) } };
        });
        if TURN {
            transpose(&mut tile);
        }
        write(&tile, &mut to[once..][..TILE]);
    }

    /// The two vectors that make up a row of a tile: halves of one line, or two numbers of all lines. Padding is 0.
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

/// Rounds to bf16, towards 0.
#[inline(always)]
unsafe fn upper(of: F32x16) -> F32x16 {
    unsafe { F32x16(_mm512_and_ps(of.0, _mm512_castsi512_ps(_mm512_set1_epi32(UPPER)))) }
}

/// The upper halves of two vectors' words, the first vector's before the second's.
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

/// The upper halves of two vectors' words, interleaved.
#[inline(always)]
unsafe fn interleaved([low, high]: [F32x16; 2]) -> F32x16 {
    unsafe {
        let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low.0));
        let high = _mm512_and_si512(_mm512_castps_si512(high.0), _mm512_set1_epi32(UPPER));
        F32x16(_mm512_castsi512_ps(_mm512_or_si512(low, high)))
    }
}
