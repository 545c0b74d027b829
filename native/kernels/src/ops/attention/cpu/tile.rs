//! Tiles of rows, in the layouts that the products read.

use super::product::Left;
use super::{KEYS, each_range};
use crate::cpu::aligned::Aligned;
use crate::cpu::pool::Shared;
use crate::cpu::vector::{MAX_LANES, transpose};
use crate::cpu::{Exec, Level, Real, Storage, Vector, Work, unrolled};
use crate::error::Result;
use crate::ops::attention::Strides;
use std::ops::Range;

/// Returns the number of lanes of a level.
struct Lanes;

impl<E: Real> Work<E> for Lanes {
    type Output = usize;
    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) -> usize {
        V::LANES
    }
}

/// The number of lanes of a vector of `E`.
pub fn lanes<E: Real>(level: Level) -> usize {
    E::dispatch(level, Lanes)
}

/// A matrix in a tensor, with a row stride.
#[derive(Clone, Copy)]
pub struct Rows<'a, S> {
    /// The elements, from the first row on.
    pub values: &'a [S],
    /// Stride between rows.
    pub stride: usize,
    /// Number of rows.
    pub count: usize,
    /// Elements of a row.
    pub width: usize,
}

impl<'a, S> Rows<'a, S> {
    /// Row `i`.
    #[inline(always)]
    pub fn row(&self, i: usize) -> &'a [S] {
        &self.values[i * self.stride..][..self.width]
    }

    /// A range of rows of a tensor; `of` is batch and head.
    pub fn of(values: &'a [S], strides: &Strides, width: usize, of: (usize, usize), range: Range<usize>) -> Self {
        let start = if width == 0 || range.is_empty() { 0 } else { strides.at(of.0, of.1, range.start) };
        Rows { values: &values[start..], stride: strides.row, count: range.len(), width }
    }
}

/// Workspace for the copy of a tile.
pub struct Room<E>(Aligned<E>);

impl<E: Real> Room<E> {
    /// An empty workspace.
    pub fn new() -> Self {
        Room(Aligned::new(0))
    }

    /// A tile of keys or values as a left factor: in place, or a copy if it must be widened or its rows are not
    /// contiguous.
    pub fn tile<'s, S: Storage<Wide = E>>(&'s mut self, rows: Rows<'s, S>, level: Level) -> Left<'s, E> {
        if S::DTYPE == E::DTYPE && rows.stride == rows.width {
            return Left::rows(bytemuck::cast_slice(rows.values), rows.stride);
        }
        let stride = rows.width.next_multiple_of(MAX_LANES);
        if self.0.len() < rows.count * stride {
            self.0 = Aligned::new(rows.count * stride);
        }
        E::dispatch(level, Widen { from: rows, to: (&mut self.0, stride) });
        Left::rows(&self.0, stride)
    }
}

/// A contiguous copy of all keys or all values, head by head.
pub struct Dense<E> {
    values: Vec<E>,
    rows: usize,
    stride: usize,
}

impl<E: Real> Dense<E> {
    /// Copies `rows` rows of each of `count` heads; `of` gives the rows of a head in a range.
    pub fn new<'a, S: Storage<Wide = E>>(
        count: usize,
        rows: usize,
        width: usize,
        exec: &Exec,
        of: impl Fn(usize, Range<usize>) -> Rows<'a, S> + Send + Sync,
    ) -> Result<Self> {
        let stride = width.next_multiple_of(MAX_LANES);
        let mut values = bytemuck::zeroed_vec(count * rows * stride);
        let to = Shared::new(&mut values);
        let each = rows.div_ceil(KEYS);
        each_range(exec.threads, count * each, |range| {
            for i in range {
                let part = i % each * KEYS..rows.min((i % each + 1) * KEYS);
                let start = (i / each * rows + part.start) * stride;
                // SAFETY: parts share no row.
                let to = unsafe { to.part(start, part.len() * stride) };
                E::dispatch(exec.level, Widen { from: of(i / each, part), to: (to, stride) });
            }
        })?;
        Ok(Dense { values, rows, stride })
    }

    /// The rows of a head, from `first` on.
    pub fn tile(&self, head: usize, first: usize) -> Left<'_, E> {
        Left::rows(&self.values[(head * self.rows + first) * self.stride..], self.stride)
    }
}

/// Widens rows, each padded with zeros to a whole number of vectors.
pub struct Widen<'a, S: Storage> {
    /// The rows to read.
    pub from: Rows<'a, S>,
    /// The output, and its row stride.
    pub to: (&'a mut [S::Wide], usize),
}

impl<S: Storage> Work<S::Wide> for Widen<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (to, stride) = self.to;
        for i in 0..self.from.count {
            let (from, to) = (self.from.row(i), &mut to[i * stride..]);
            let mut d = 0;
            while d < from.len() {
                S::load::<V>(&from[d..]).store(&mut to[d..]);
                d += V::LANES;
            }
        }
    }
}

/// Widens rows, multiplies them by a factor and transposes them into columns, so that a vector holds one element of
/// several rows. Columns beyond the last row are zero.
pub struct ToColumns<'a, S: Storage> {
    /// The rows to read.
    pub from: Rows<'a, S>,
    /// The factor.
    pub factor: S::Wide,
    /// The output, and its number of columns.
    pub to: (&'a mut [S::Wide], usize),
}

impl<S: Storage> Work<S::Wide> for ToColumns<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (to, columns) = self.to;
        let factor = V::splat(self.factor);
        let mut i = 0;
        while i < columns {
            let mut d = 0;
            while d < self.from.width {
                let mut square = [V::zero(); MAX_LANES];
                let rows = V::LANES.min(self.from.count.saturating_sub(i));
                unrolled!(lane < rows, {
                    square[lane] = S::load::<V>(&self.from.row(i + lane)[d..]).mul(factor);
                });
                transpose(&mut square);
                let rows = V::LANES.min(self.from.width - d);
                unrolled!(lane < rows, {
                    square[lane].store(&mut to[(d + lane) * columns + i..]);
                });
                d += V::LANES;
            }
            i += V::LANES;
        }
    }
}

/// The reverse: transposes a square of columns, each multiplied by its own factor, into vectors of rows' elements.
#[inline(always)]
pub fn from_columns<V: Vector>(
    columns: (&[V::Element], usize),
    width: usize,
    (i, d): (usize, usize),
    factor: V,
) -> [V; MAX_LANES] {
    let mut square = [V::zero(); MAX_LANES];
    let rows = V::LANES.min(width - d);
    unrolled!(lane < rows, {
        square[lane] = V::load(&columns.0[(d + lane) * columns.1 + i..]).mul(factor);
    });
    transpose(&mut square);
    square
}
