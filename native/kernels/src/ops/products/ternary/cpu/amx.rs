//! Products of several rows of bytes with ternary weights by AMX. Weights are the left factor: sixteen outputs at a
//! time are expanded to tiles of bytes, -1, 0 and 1, which are multiplied with all rows of x. These are the right
//! factor, packed once. A row has one scale, so sums stay in their tiles along the whole inner dimension.

// Every `unsafe` here is an intrinsic or a tile, sound where this is called: on CPUs with AMX, which has AVX-512.
#![allow(clippy::undocumented_unsafe_blocks)]

use crate::cpu::aligned::Aligned;
use crate::cpu::amx::{Lines, ROW, SIDE, TILE, Tiles, WHOLE, read, write};
use crate::cpu::vector::transpose;
use crate::error::Result;
use std::arch::x86_64::*;
use std::ops::Range;

/// From this number of rows on, tiles are faster than vectors.
pub const ROWS: usize = 8;

/// Rows of weights in a tile.
pub const OUTPUTS: usize = SIDE;

/// Tiles of x that are multiplied at a time.
const AT_ONCE: usize = 4;

/// Rows of bytes as right factors.
pub struct Prepared {
    tiles: Aligned<u8>,
    rows: usize,
    /// Tiles along a row.
    steps: usize,
}

impl Prepared {
    /// Packs rows of `n` bytes.
    pub fn new(q: &[i8], rows: usize, n: usize, threads: usize) -> Result<Prepared> {
        let lines = Lines { bytes: bytemuck::cast_slice(q), stride: n, count: rows, len: n };
        Ok(Prepared { tiles: unsafe { lines.pack_all(threads)? }, rows, steps: n.div_ceil(ROW) })
    }
}

/// The workspace of a task.
pub struct Scratch {
    weights: Aligned<u8>,
    sums: Aligned<i32>,
}

impl Scratch {
    /// Allocates tiles of weights as long as these rows.
    pub fn new(x: &Prepared) -> Scratch {
        Scratch { weights: Aligned::new(x.steps * TILE), sums: Aligned::new(AT_ONCE * SIDE * SIDE) }
    }
}

/// The sums of rows of x with at most [`OUTPUTS`] rows of weights, given as both their planes. Calls `end` with some
/// rows of x and their sums, [`OUTPUTS`] for each.
///
/// # Safety
/// The CPU must have AMX.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1")]
pub unsafe fn strip(
    x: &Prepared,
    planes: [&[u8]; 2],
    outs: usize,
    scratch: &mut Scratch,
    end: impl Fn(Range<usize>, &[i32]),
) {
    unsafe { unpack(planes, outs, &mut scratch.weights) };
    let sixteens = x.rows.div_ceil(SIDE);
    // Tiles 0 to 3 are sums, 4 is one of weights, 5 to 7 are rows of x.
    let sums = [outs, ROW];
    let tiles = unsafe { Tiles::new([sums, sums, sums, sums, [outs, ROW], WHOLE, WHOLE, WHOLE]) };
    for first in (0..sixteens).step_by(AT_ONCE) {
        let count = AT_ONCE.min(sixteens - first);
        unsafe {
            match count {
                1 => add::<1>(&tiles, x, first, scratch),
                2 => add::<2>(&tiles, x, first, scratch),
                3 => add::<3>(&tiles, x, first, scratch),
                _ => add::<4>(&tiles, x, first, scratch),
            }
        }
        for at in 0..count {
            let sums = &mut scratch.sums[at * SIDE * SIDE..][..SIDE * SIDE];
            turn(sums);
            end((first + at) * SIDE..x.rows.min((first + at + 1) * SIDE), sums);
        }
    }
}

/// The products of a strip with `N` tiles of x.
///
/// # Safety
/// The CPU must have AMX, and the tiles must be configured for the strip.
#[inline(always)]
unsafe fn add<const N: usize>(tiles: &Tiles, x: &Prepared, first: usize, scratch: &mut Scratch) {
    let (weights, panel) = (scratch.weights.as_ptr(), x.steps * TILE);
    let from = x.tiles[first * panel..][..N * panel].as_ptr();
    unsafe {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        for step in 0..x.steps {
            let x = |at: usize| from.wrapping_add(at * panel + step * TILE);
            tiles.load::<4>(weights.add(step * TILE), ROW);
            tiles.load::<5>(x(0), ROW);
            tiles.add_bytes::<0, 4, 5>();
            if N > 1 {
                tiles.load::<6>(x(1), ROW);
                tiles.add_bytes::<1, 4, 6>();
            }
            if N > 2 {
                tiles.load::<7>(x(2), ROW);
                tiles.add_bytes::<2, 4, 7>();
            }
            if N > 3 {
                tiles.load::<5>(x(3), ROW);
                tiles.add_bytes::<3, 4, 5>();
            }
        }
        let to = |at: usize| scratch.sums.as_ptr().cast_mut().wrapping_add(at * SIDE * SIDE).cast();
        tiles.store::<0>(to(0), ROW);
        tiles.store::<1>(to(1), ROW);
        tiles.store::<2>(to(2), ROW);
        tiles.store::<3>(to(3), ROW);
    }
}

/// Transposes a tile of sums.
#[inline(always)]
fn turn(sums: &mut [i32]) {
    let mut square = read(bytemuck::cast_slice(sums));
    transpose(&mut square);
    write(&square, bytemuck::cast_slice_mut(sums));
}

/// Expands cells to bytes, a tile for every 64 of them. Sentinels, and cells past the end of a row, have arbitrary
/// values.
///
/// # Safety
/// The CPU must have AVX-512.
#[inline(always)]
unsafe fn unpack([plane0, plane1]: [&[u8]; 2], outs: usize, to: &mut [u8]) {
    let bytes = (plane0.len() / outs).max(1);
    for (o, planes) in plane0.chunks_exact(bytes).zip(plane1.chunks_exact(bytes)).enumerate() {
        for (at, to) in to.chunks_exact_mut(TILE).enumerate() {
            let [positive, negative] = [planes.0, planes.1].map(|plane| word(plane, at * 8));
            let to = &mut to[o * ROW..][..ROW];
            unsafe {
                let ones = _mm512_maskz_set1_epi8(positive & !negative, 1);
                let cells = _mm512_mask_set1_epi8(ones, negative & !positive, -1);
                _mm512_store_si512(to.as_mut_ptr().cast(), cells);
            }
        }
    }
}

/// Eight bytes of a plane, zeros after its end.
#[inline(always)]
fn word(plane: &[u8], at: usize) -> u64 {
    match plane[at..].first_chunk() {
        Some(bytes) => u64::from_le_bytes(*bytes),
        None => {
            let mut bytes = [0; 8];
            bytes[..plane.len() - at].copy_from_slice(&plane[at..]);
            u64::from_le_bytes(bytes)
        }
    }
}

/// Splits a range of outputs into those of tiles.
pub fn tiles_of(outs: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = outs.end;
    outs.step_by(OUTPUTS).map(move |at| at..end.min(at + OUTPUTS))
}
