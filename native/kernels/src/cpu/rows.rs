//! Work on rows, divided among threads in pieces that depend on the sizes alone.

use super::pool::{self, Shared};
use super::{Exec, Real, Storage, sum};
use crate::error::Result;
use std::ops::Range;

/// Below this many elements waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 15;
/// Approximate number of elements of a piece.
const PIECE: usize = 1 << 14;
/// Upper limit for the number of pieces that have partial sums.
const MOST_SUMS: usize = 32;

/// Calls `work` with disjoint ranges that cover all `rows` rows of `columns` elements.
pub fn for_each([rows, columns]: [usize; 2], exec: &Exec, work: impl Fn(Range<usize>) + Send + Sync) -> Result<()> {
    let each = (PIECE / columns.max(1)).max(1);
    pool::for_each(threads(rows * columns, exec), rows.div_ceil(each), |piece| {
        work(piece * each..rows.min((piece + 1) * each));
    })
}

/// Like [`for_each`], where each piece adds to `count` partial sums of its own, which start at 0. Returns the totals.
pub fn with_sums<E: Real + Storage<Wide = E>>(
    [rows, columns]: [usize; 2],
    count: usize,
    exec: &Exec,
    work: impl Fn(Range<usize>, &mut [E]) + Send + Sync,
) -> Result<Vec<E>> {
    let each = rows.div_ceil(MOST_SUMS).max(1);
    let parts = rows.div_ceil(each);
    let mut partial = vec![E::from_f64(0.0); parts * count];
    let sums = Shared::new(&mut partial);
    pool::for_each(threads(rows * columns, exec), parts, |part| {
        // SAFETY: parts share no sums.
        let sums = unsafe { sums.part(part * count, count) };
        work(part * each..rows.min((part + 1) * each), sums);
    })?;
    let mut total = vec![E::from_f64(0.0); count];
    sum::columns::<E>(&partial, &mut total, exec)?;
    Ok(total)
}

fn threads(elements: usize, exec: &Exec) -> usize {
    if elements < WORTH_SHARING { 1 } else { exec.threads }
}

/// Sums `$term` over the elements of a row from `$at` to `$end`, with four accumulators, because a single one would be
/// bound by the latency of additions. They are written out: a loop over them is unrolled too late to keep them in
/// registers.
macro_rules! row_sum {
    ($columns:expr, |$at:ident, $end:ident| $term:expr) => {{
        let (mut a, mut b, mut c, mut d) = (V::zero(), V::zero(), V::zero(), V::zero());
        let mut $at = 0;
        macro_rules! add {
            ($sum:ident, $to:expr) => {
                let $end = $to;
                $sum = $sum.add($term);
                $at = $end;
            };
        }
        while $at + 4 * V::LANES <= $columns {
            add!(a, $at + V::LANES);
            add!(b, $at + V::LANES);
            add!(c, $at + V::LANES);
            add!(d, $at + V::LANES);
        }
        while $at < $columns {
            add!(a, $columns.min($at + V::LANES));
        }
        a.add(b).add(c.add(d)).sum()
    }};
}
pub(crate) use row_sum;
