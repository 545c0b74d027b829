//! Sums over rows and over lanes, in an order that depends on the sizes alone.

use super::strips::{self, Strips};
use super::{Exec, Real, Storage, Vector, Work};
use crate::cpu::pool::Shared;
use crate::error::Result;
use std::ops::Range;

/// Rows that are summed before their sum is added to the total: two short sums lose less precision than a long one.
const TOGETHER: usize = 64;

/// Upper limit for a strip's channels, so that its sums stay in the first-level cache.
const WIDEST: usize = 2048;

/// Writes the column sums of a matrix whose rows are as long as `sums`.
pub fn columns<S: Storage>(values: &[S], sums: &mut [S::Wide], exec: &Exec) -> Result<()> {
    let width = sums.len();
    let sums = Shared::new(sums);
    Strips::new(exec, 1, width, values.len(), WIDEST).for_each(|_, columns| {
        // SAFETY: strips share no column.
        let sums = unsafe { sums.part(columns.start, columns.len()) };
        S::Wide::dispatch(exec.level, Columns { values, width, columns, sums });
    })
}

struct Columns<'a, S: Storage> {
    values: &'a [S],
    width: usize,
    columns: Range<usize>,
    sums: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Columns<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let mut totals = strips::load::<V>(None, self.columns.len());
        let mut sums = totals.clone();
        for rows in self.values.chunks(self.width * TOGETHER) {
            sums.fill(V::zero());
            for row in rows.chunks_exact(self.width) {
                for (sum, values) in sums.iter_mut().zip(row[self.columns.clone()].chunks(V::LANES)) {
                    *sum = sum.add(S::load(values));
                }
            }
            for (total, sum) in totals.iter_mut().zip(&sums) {
                *total = total.add(*sum);
            }
        }
        strips::store(&totals, self.sums);
    }
}

/// Writes the sum of each vector's lanes to the first of each `stride` numbers.
#[inline(always)]
pub fn write_sums<V: Vector>(vectors: &[V], to: &mut [V::Element], stride: usize) {
    for (i, four) in vectors.chunks(4).enumerate() {
        // Not closures, which would be compiled without the level's instructions.
        if let ([a, b, c, d], true) = (four, V::LANES >= 4) {
            let sums = V::fold([*a, *b, *c, *d]).fours();
            for k in 0..4 {
                to[(4 * i + k) * stride] = sums[k];
            }
        } else {
            for (k, vector) in four.iter().enumerate() {
                to[(4 * i + k) * stride] = vector.sum();
            }
        }
    }
}
