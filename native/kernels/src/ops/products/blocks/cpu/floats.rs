//! Operations on floats: values of blocks, and products of rows of floats.

use super::super::format::{self, BLOCK, Format};
use crate::cpu::{Storage, Vector, Work};

/// A block's values in f32.
#[inline(always)]
pub fn of_block<S: Storage<Wide = f32>, V: Vector<Element = f32>>(x: &[S]) -> [f32; BLOCK] {
    let mut values = [0.0; BLOCK];
    for at in (0..BLOCK).step_by(V::LANES) {
        S::load::<V>(&x[at..at + V::LANES]).store(&mut values[at..]);
    }
    values
}

/// The sums of all rows of x for a range of outputs, in row-major order.
pub struct Sums<'a> {
    /// Rows of x.
    pub x: &'a [f32],
    /// The weights of these outputs.
    pub weights: &'a [u8],
    /// Their format.
    pub format: Format,
    /// Columns of x.
    pub columns: usize,
    /// The sums are written here.
    pub to: &'a mut [f32],
}

impl Work<f32> for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = f32>>(self) {
        match self.format {
            Format::Q8 => self.of_format::<V>(Format::Q8),
            Format::Q4 => self.of_format::<V>(Format::Q4),
        }
    }
}

impl Sums<'_> {
    /// Groups of eight rows share each unpacked block. The remaining rows go in groups of 4, 2 and 1: a group of fewer
    /// rows would take as long as the next larger one.
    #[inline(always)]
    fn of_format<V: Vector<Element = f32>>(self, format: Format) {
        let (columns, bytes) = (self.columns, format.row_bytes(self.columns));
        if columns == 0 {
            return self.to.fill(0.0);
        }
        let (rows, outputs) = (self.x.len() / columns, self.weights.len() / bytes);
        for (o, weights) in self.weights.chunks_exact(bytes).enumerate() {
            let mut row = 0;
            while row < rows {
                let x = &self.x[row * columns..];
                let (taken, sums) = match rows - row {
                    8.. => (8, rows_by_blocks::<V, 8>(format, x, columns, weights)),
                    4..8 => (4, rows_by_blocks::<V, 4>(format, x, columns, weights)),
                    2..4 => (2, rows_by_blocks::<V, 2>(format, x, columns, weights)),
                    _ => (1, rows_by_blocks::<V, 1>(format, x, columns, weights)),
                };
                for (at, sum) in sums[..taken].iter().enumerate() {
                    self.to[(row + at) * outputs + o] = *sum;
                }
                row += taken;
            }
        }
    }
}

/// The sums of `ROWS` rows for one output.
#[inline(always)]
fn rows_by_blocks<V: Vector<Element = f32>, const ROWS: usize>(
    format: Format,
    x: &[f32],
    columns: usize,
    weights: &[u8],
) -> [f32; 8] {
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &x[row * columns..][..columns]);
    let mut sums = [V::zero(); ROWS];
    for (block, weights) in weights.chunks_exact(format.bytes()).enumerate() {
        let values = format::read(format, weights);
        for at in (0..BLOCK).step_by(V::LANES) {
            let w = V::load(&values[at..]);
            for (sum, x) in sums.iter_mut().zip(rows) {
                *sum = w.mul_add(V::load(&x[block * BLOCK + at..]), *sum);
            }
        }
    }
    let mut totals = [0.0; 8];
    for (total, sum) in totals.iter_mut().zip(sums) {
        *total = sum.sum();
    }
    totals
}
