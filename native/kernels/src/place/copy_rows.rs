//! Copies of rows between tensors with heads that differ in the order of axes or in capacity.

use super::Place;
use crate::base::heads::{Layout, Strides, sizes_of};
use crate::cuda::{self, Buffer, Lane, Source, params};
use crate::error::Result;
use crate::tensor::{Described, Spec, View, ViewMut};

const COPY: Source<Params> = Source::new("copy_rows", include_str!("copy_rows.cu"));

/// A copy of rows of one tensor to adjacent rows of another, which is heads-first.
#[derive(Clone, Copy, Debug)]
pub struct CopyRows {
    /// Batch, heads, rows and width.
    sizes: [usize; 4],
    from: Strides,
    to: Strides,
    /// The first row to write.
    first: usize,
    /// The first row to read.
    skip: usize,
}

params! {
    /// The kernel's parameters.
    struct Params {
        from: u64 as "const STORAGE*",
        to: u64 as "STORAGE*",
        sizes: [i64; 4], // batch, heads, rows, width
        from_at: [i64; 3],
        to_at: [i64; 3],
        first: i64,
    }
}

impl CopyRows {
    /// A copy of all rows of a tensor of any layout to the rows from `first` on of a heads-first tensor. The caller has
    /// checked that batch, heads and width are equal and that the rows fit.
    pub fn into_heads_first(from: Spec, layout: Layout, to: Spec, first: usize) -> CopyRows {
        let sizes @ [_, heads, rows, width] = sizes_of(layout, &from.shape);
        let [_, _, room, _] = sizes_of(Layout::HeadsFirst, &to.shape);
        let strides = |layout, rows| Strides::new(layout, heads, rows, width);
        CopyRows { sizes, from: strides(layout, rows), to: strides(Layout::HeadsFirst, room), first, skip: 0 }
    }

    /// A copy of `rows` rows from `skip` on, of a heads-first tensor, to the front of another one with enough rows.
    pub fn grow(from: Spec, to: Spec, skip: usize, rows: usize) -> CopyRows {
        let mut copy = CopyRows { skip, ..CopyRows::into_heads_first(from, Layout::HeadsFirst, to, 0) };
        copy.sizes[2] = rows;
        copy
    }

    /// A copy of the first `columns` columns of a matrix of `wide` columns to a contiguous matrix.
    pub fn out_of_columns(rows: usize, wide: usize, columns: usize) -> CopyRows {
        let strides = |width| Strides::new(Layout::HeadsFirst, 1, rows, width);
        CopyRows { sizes: [1, 1, rows, columns], from: strides(wide), to: strides(columns), first: 0, skip: 0 }
    }

    /// The reverse of [`CopyRows::out_of_columns`]: a contiguous matrix to the first `columns` columns of one of `wide`
    /// columns.
    pub fn into_columns(rows: usize, columns: usize, wide: usize) -> CopyRows {
        let copy = CopyRows::out_of_columns(rows, wide, columns);
        CopyRows { from: copy.to, to: copy.from, ..copy }
    }

    /// Runs the copy on the CPU.
    pub fn cpu(&self, from: &View, to: &mut ViewMut) {
        let [batch, heads, rows, width] = self.sizes;
        let size = from.spec().dtype.size();
        // Adjacent rows are copied at once.
        let (runs, run) = if [self.from.row, self.to.row] == [width; 2] { (1, rows * width) } else { (rows, width) };
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for i in 0..runs {
                let (at, to_at) = (size * self.from.at(b, h, self.skip + i), size * self.to.at(b, h, self.first + i));
                let to = &mut to.bytes_mut()[to_at..to_at + size * run];
                to.copy_from_slice(&from.bytes()[at..at + size * run]);
            }
        }
    }

    /// Queues the copy on a lane.
    pub fn cuda(&self, from: &Buffer, to: &Buffer, lane: &Lane) -> Result<()> {
        let strides = |at: Strides| [at.batch as i64, at.head as i64, at.row as i64];
        let params = Params {
            from: lane.address(from)? + (self.skip * self.from.row * from.spec().dtype.size()) as u64,
            to: lane.address(to)?,
            sizes: self.sizes.map(|size| size as i64),
            from_at: strides(self.from),
            to_at: strides(self.to),
            first: self.first as i64,
        };
        let kernel = lane.device().kernel(&COPY, &cuda::types(from.spec().dtype))?;
        // SAFETY: the strides are those of the buffers, which the caller has checked to have these rows.
        unsafe { cuda::launch_each(lane, &kernel, self.sizes.iter().product(), &params) }
    }
}

/// Copies columns of `from`, from column `start` on, to all columns of `to`. Columns are the last axis of both; they
/// may have leading axes.
pub fn take_columns<P: Place>(place: &P, from: &P::View<'_>, start: usize, mut to: P::ViewMut<'_>) -> Result<()> {
    let (wide, columns, rows) = widths(&from.spec(), &to.spec());
    let all = rows * wide;
    let from = P::rows(&P::reshape(from, &[all])?, start.min(all)..all)?;
    place.copy_rows(&CopyRows::out_of_columns(rows, wide, columns), &from, &mut to)
}

/// The reverse of [`take_columns`]: copies `from` to columns of `to`, from column `start` on.
pub fn put_columns<P: Place>(place: &P, from: &P::View<'_>, to: P::ViewMut<'_>, start: usize) -> Result<()> {
    let (wide, columns, rows) = widths(&to.spec(), &from.spec());
    let all = rows * wide;
    let (_, mut to) = P::split_rows(P::reshape_mut(to, &[all])?, start.min(all))?;
    place.copy_rows(&CopyRows::into_columns(rows, columns, wide), from, &mut to)
}

/// Columns of the wide matrix and of the part, and the number of rows of both.
fn widths(wide: &Spec, part: &Spec) -> (usize, usize, usize) {
    let last = |spec: &Spec| spec.shape.last().copied().unwrap_or(1);
    let rows: usize = wide.shape.split_last().map_or(1, |(_, rows)| rows.iter().product());
    (last(wide), last(part), rows)
}
