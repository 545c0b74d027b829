//! Sums of products with ternary weights.
//!
//! Bytes: a cell becomes its code, value + 1, in two bits of a byte, and `sum W q = sum code q - sum q`. Codes are
//! moved to the low end of separate bytes, shared by all rows of activations, or stay in place. Signs: counts the bits
//! where both are not 0, and those where their signs differ. Floats: they are added and subtracted by masks.

use super::wide::{Task, WORD, Wide, dispatch};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Level, Scaled, Storage};
use crate::error::Result;
use crate::ops::products::ternary::problem::plane_bytes;
use std::ops::Range;

/// Rows of weights per task: their planes stay in the cache while they are multiplied with all rows of activations.
const ROWS: usize = 32;

/// The most rows of activations that are multiplied with a row of weights at once.
const TILE: usize = 8;

/// From this number of cells on, waking another thread pays off.
pub const WORTH_SHARING: usize = 1 << 22;

/// Bytes of a plane whose products are summed before a reduction: half the limit of [`Wide::add_pairs`].
const PART: usize = 1 << 19;

/// The codes, value + 1, of cells: the even cells of each byte, then the odd ones. A sentinel gets the code of 0.
#[inline(always)]
fn pairs<V: Wide>(plane0: V, plane1: V) -> [V; 2] {
    let (even, odd) = (V::splat(0x55), V::splat(0xaa));
    // The low and the high bit of bit0 + (1 - bit1).
    let low = plane0.xor(plane1).xor(V::splat(0xff));
    let high = plane0.and_not(plane1);
    [low.and(even).or(high.and(even).left()), low.and(odd).right::<1>().or(high.and(odd))]
}

/// Activations in the order in which they are multiplied, each row padded with zeros to whole vectors.
pub enum Activations<'a> {
    /// In the order of [`by_bits`](super::quantize::by_bits), with the sum of each row.
    Bytes { x: &'a [i8], sums: &'a [i32] },
    /// Planes.
    Signs { planes: [&'a [u8]; 2] },
    /// Floats.
    Floats { x: &'a [f32] },
}

/// The outputs: `acc` gets the plain sums, `y` those after the epilogue.
pub struct Results<'a, S> {
    pub epilogue: Scaled<'a, f32>,
    pub level: Level,
    pub outs: usize,
    pub acc: Option<Shared<'a, i32>>,
    pub y: Option<Shared<'a, S>>,
}

impl<S: Storage<Wide = f32>> Results<'_, S> {
    /// Stores sums of some rows of activations by some rows of weights, given with their row stride.
    pub fn integers(&self, (sums, stride): (&[i32], usize), [rows, outs]: [Range<usize>; 2]) {
        if let Some(acc) = &self.acc {
            for (row, sums) in rows.clone().zip(sums.chunks(stride)) {
                // SAFETY: each sum is written once.
                let to = unsafe { acc.part(row * self.outs + outs.start, outs.len()) };
                to.copy_from_slice(&sums[..outs.len()]);
            }
        }
        if self.y.is_some() {
            let mut floats = [0.0; TILE * ROWS];
            let floats = &mut floats[..sums.len()];
            floats.iter_mut().zip(sums).for_each(|(float, &sum)| *float = sum as f32);
            self.floats((floats, stride), [rows, outs]);
        }
    }

    fn floats(&self, sums: (&[f32], usize), block: [Range<usize>; 2]) {
        if let Some(y) = &self.y {
            // SAFETY: each sum is written once.
            unsafe { self.epilogue.write(sums, block, (y, self.outs), self.level) };
        }
    }
}

/// A vector of a row, the last one padded with zeros.
#[inline(always)]
pub fn vector_of<V: Wide>(row: &[u8], block: usize) -> V {
    let start = block * V::BYTES;
    if start + V::BYTES <= row.len() {
        return V::load(&row[start..]);
    }
    let mut end = [0u8; 64];
    end[..row.len() - start].copy_from_slice(&row[start..]);
    V::load(&end)
}

/// A product of activations and weights.
pub struct Call<'a> {
    pub n: usize,
    /// Elements of a row of activations, including its padding.
    pub stride: usize,
    pub rows: usize,
    pub planes: [&'a [u8]; 2],
    pub x: Activations<'a>,
}

impl Call<'_> {
    #[inline(always)]
    fn row(&self, out: usize) -> [&[u8]; 2] {
        let bytes = plane_bytes(self.n);
        let [plane0, plane1] = self.planes;
        [&plane0[out * bytes..][..bytes], &plane1[out * bytes..][..bytes]]
    }

    #[inline(always)]
    fn bytes<V: Wide, const R: usize>(&self, out: usize, x: &[i8]) -> [i32; R] {
        let mut sums = [V::no_sums(); R];
        let [plane0, plane1] = self.row(out);
        let whole = plane0.len() / V::BYTES;
        for block in 0..whole {
            let at = block * V::BYTES;
            self.add_codes(&mut sums, V::load(&plane0[at..]), V::load(&plane1[at..]), &x[8 * at..]);
        }
        if whole * V::BYTES < plane0.len() {
            let (plane0, plane1): (V, V) = (vector_of(plane0, whole), vector_of(plane1, whole));
            self.add_codes(&mut sums, plane0, plane1, &x[8 * whole * V::BYTES..]);
        }
        let mut totals = [0; R];
        for r in 0..R {
            totals[r] = V::sum(sums[r]);
        }
        totals
    }

    #[inline(always)]
    fn add_codes<V: Wide, const R: usize>(&self, sums: &mut [V::Sums; R], plane0: V, plane1: V, x: &[i8]) {
        let codes = V::codes(pairs(plane0, plane1));
        for r in 0..R {
            sums[r] = V::add_products(sums[r], &codes, &x[r * self.stride..][..8 * V::BYTES]);
        }
    }

    /// The sum of an output for a single row of activations.
    #[inline(always)]
    fn bytes_of_one<V: Wide>(&self, out: usize, x: &[i8]) -> i32 {
        let [plane0, plane1] = self.row(out);
        let mut sum = 0i32;
        for start in (0..plane0.len()).step_by(PART) {
            let end = plane0.len().min(start + PART);
            sum = sum.wrapping_add(sum_of_part::<V>(&plane0[start..end], &plane1[start..end], &x[8 * start..]));
        }
        sum
    }

    #[inline(always)]
    fn signs<V: Wide, const R: usize>(&self, out: usize, x: [&[u8]; 2]) -> [i32; R] {
        let (mut all, mut negative) = ([V::no_counts(); R], [V::no_counts(); R]);
        let [plane0, plane1] = self.row(out);
        for block in 0..plane0.len().div_ceil(V::BYTES) {
            let (plane0, plane1): (V, V) = (vector_of(plane0, block), vector_of(plane1, block));
            let there = plane0.xor(plane1);
            for r in 0..R {
                let at = r * self.stride + block * V::BYTES;
                let (x0, x1) = (V::load(&x[0][at..]), V::load(&x[1][at..]));
                let both = there.and(x0.xor(x1));
                all[r] = V::add_count(all[r], both);
                negative[r] = V::add_count(negative[r], both.and(plane1.xor(x1)));
            }
        }
        let mut totals = [0; R];
        for r in 0..R {
            totals[r] = V::count(all[r], negative[r]) as i32;
        }
        totals
    }

    #[inline(always)]
    fn floats<V: Wide, const R: usize>(&self, out: usize, x: &[f32]) -> [f32; R] {
        let mut sums = [V::no_floats(); R];
        let [plane0, plane1] = self.row(out);
        let words = plane0.chunks(8).zip(plane1.chunks(8)).enumerate();
        for (word, (plane0, plane1)) in words {
            let (mut a, mut b) = ([0; 8], [0; 8]);
            a[..plane0.len()].copy_from_slice(plane0);
            b[..plane1.len()].copy_from_slice(plane1);
            let [a, b] = [u64::from_le_bytes(a), u64::from_le_bytes(b)];
            // A sentinel counts as 0, and cells past the end may hold anything.
            let inside = if self.n - word * WORD >= WORD { u64::MAX } else { (1 << (self.n - word * WORD)) - 1 };
            let planes = [a & !b & inside, b & !a & inside];
            for r in 0..R {
                sums[r] = V::add_floats(sums[r], planes, &x[r * self.stride + word * WORD..][..WORD]);
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            totals[r] = V::sum_floats(sums[r]);
        }
        totals
    }

    /// `R` rows of activations by at most [`ROWS`] rows of weights.
    #[inline(always)]
    fn tile<V: Wide, const R: usize>(
        &self,
        first: usize,
        outs: Range<usize>,
        results: &Results<impl Storage<Wide = f32>>,
    ) {
        let (at, block) = (first * self.stride, [first..first + R, outs.clone()]);
        match &self.x {
            Activations::Bytes { x, sums } => {
                let mut totals = [[0; ROWS]; R];
                for (i, out) in outs.enumerate() {
                    let products = if R == 1 {
                        [self.bytes_of_one::<V>(out, &x[at..]); R]
                    } else {
                        self.bytes::<V, R>(out, &x[at..])
                    };
                    for r in 0..R {
                        totals[r][i] = products[r].wrapping_sub(sums[first + r]);
                    }
                }
                results.integers((totals.as_flattened(), ROWS), block);
            }
            Activations::Signs { planes: [plane0, plane1] } => {
                let mut totals = [[0; ROWS]; R];
                for (i, out) in outs.enumerate() {
                    let sums = self.signs::<V, R>(out, [&plane0[at..], &plane1[at..]]);
                    for r in 0..R {
                        totals[r][i] = sums[r];
                    }
                }
                results.integers((totals.as_flattened(), ROWS), block);
            }
            Activations::Floats { x } => {
                let mut totals = [[0.0; ROWS]; R];
                for (i, out) in outs.enumerate() {
                    let sums = self.floats::<V, R>(out, &x[at..]);
                    for r in 0..R {
                        totals[r][i] = sums[r];
                    }
                }
                results.floats((totals.as_flattened(), ROWS), block);
            }
        }
    }
}

#[inline(always)]
fn sum_of_part<V: Wide>(plane0: &[u8], plane1: &[u8], x: &[i8]) -> i32 {
    let mut sums = [V::no_sums(); 4];
    let whole = plane0.len() / V::BYTES;
    for block in 0..whole {
        let at = block * V::BYTES;
        let pairs = pairs(V::load(&plane0[at..]), V::load(&plane1[at..]));
        V::add_pairs(&mut sums, pairs, &x[8 * at..][..8 * V::BYTES]);
    }
    if whole * V::BYTES < plane0.len() {
        let pairs = pairs::<V>(vector_of(plane0, whole), vector_of(plane1, whole));
        V::add_pairs(&mut sums, pairs, &x[8 * whole * V::BYTES..][..8 * V::BYTES]);
    }
    V::sum_of_pairs(sums)
}

struct Block<'a, 'c, S> {
    call: &'a Call<'c>,
    outs: Range<usize>,
    results: &'a Results<'a, S>,
}

impl<S: Storage<Wide = f32>> Task for Block<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        let Block { call, outs, results } = self;
        let mut row = 0;
        while V::TILE == TILE && row + TILE <= call.rows {
            call.tile::<V, TILE>(row, outs.clone(), results);
            row += TILE;
        }
        while row + 4 <= call.rows {
            call.tile::<V, 4>(row, outs.clone(), results);
            row += 4;
        }
        for row in row..call.rows {
            call.tile::<V, 1>(row, outs.clone(), results);
        }
    }
}

/// Multiplies on all threads.
pub fn run<S: Storage<Wide = f32>>(call: &Call, results: &Results<S>, exec: &Exec) -> Result<()> {
    let (outs, work) = (results.outs, call.rows * call.n * results.outs);
    let rows = if outs < 4 * ROWS { outs.div_ceil(4).max(1) } else { ROWS };
    pool::for_each(pool::worth(exec.threads, work, WORTH_SHARING), outs.div_ceil(rows), |task| {
        let outs = task * rows..outs.min((task + 1) * rows);
        dispatch(exec.level, Block { call, outs, results });
    })
}
