//! Conversions and counts, one word of 64 cells at a time.

use super::wide::{Planes, Task, WORD, Wide, dispatch};
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Level};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::ternary::grid::{Conversion, Grid, Layout, OnSentinel};
use crate::tensor::{View, ViewMut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `$body` with a layout as a compile-time constant, so that it is dispatched once and not per word.
macro_rules! with_layout {
    ($layout:expr, $known:ident => $body:expr) => {
        with_layout!($layout, $known => $body, Values Planes Packed2 OffsetRows BytePlanes)
    };
    ($layout:expr, $known:ident => $body:expr, $($name:ident)*) => {
        match $layout {
            $(Layout::$name => {
                let $known = Layout::$name;
                $body
            })*
        }
    };
}

/// Words per task: 16384 cells.
const STRIP: usize = 256;

/// From this number of cells on, waking another thread pays off.
const WORTH_SHARING: usize = 1 << 19;

/// The cells in the tensors of a layout.
pub struct Cells<'a> {
    grid: &'a Grid,
    bytes: [&'a [u8]; 2],
}

/// The bytes from `at` on, up to `end` and at most `N`, padded with zeros.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8], at: usize, end: usize) -> [u8; N] {
    if at + N <= end {
        return bytes[at..at + N].try_into().expect("as many");
    }
    let mut part = [0; N];
    part[..end - at].copy_from_slice(&bytes[at..end]);
    part
}

/// Gathers every second bit of 128.
#[inline(always)]
fn evens(bits: u128) -> u64 {
    let half = |mut v: u64| {
        v &= 0x5555_5555_5555_5555;
        v = (v | v >> 1) & 0x3333_3333_3333_3333;
        v = (v | v >> 2) & 0x0f0f_0f0f_0f0f_0f0f;
        v = (v | v >> 4) & 0x00ff_00ff_00ff_00ff;
        v = (v | v >> 8) & 0x0000_ffff_0000_ffff;
        (v | v >> 16) & 0xffff_ffff
    };
    half(bits as u64) | half((bits >> 64) as u64) << 32
}

/// The inverse: puts a 0 after each bit.
#[inline(always)]
fn apart(bits: u64) -> u128 {
    let half = |mut v: u64| {
        v = (v | v << 16) & 0x0000_ffff_0000_ffff;
        v = (v | v << 8) & 0x00ff_00ff_00ff_00ff;
        v = (v | v << 4) & 0x0f0f_0f0f_0f0f_0f0f;
        v = (v | v << 2) & 0x3333_3333_3333_3333;
        (v | v << 1) & 0x5555_5555_5555_5555
    };
    u128::from(half(bits & 0xffff_ffff)) | u128::from(half(bits >> 32)) << 64
}

impl Cells<'_> {
    /// The planes of a word: both bits for a sentinel, no bits past the end of the row.
    #[inline(always)]
    fn word<V: Wide>(&self, layout: Layout, row: usize, word: usize) -> Planes {
        let n = self.grid.n;
        let start = word * WORD;
        let inside = if n - start >= WORD { u64::MAX } else { (1 << (n - start)) - 1 };
        // Written out, because the compiler would call the closure of `map`.
        let [p0, p1] = self.whole_word::<V>(layout, row, word);
        [p0 & inside, p1 & inside]
    }

    #[inline(always)]
    fn whole_word<V: Wide>(&self, layout: Layout, row: usize, word: usize) -> Planes {
        let n = self.grid.n;
        let stride = n.div_ceil(layout.in_byte());
        let bytes = |plane: usize| part::<WORD>(self.bytes[plane], row * n + word * WORD, (row + 1) * n);
        match layout {
            Layout::Values => V::compress(&bytes(0)),
            Layout::BytePlanes => {
                let ([a, not_a], [b, not_b]) = (V::compress(&bytes(0)), V::compress(&bytes(1)));
                let none = not_a | not_b;
                [a | none, b | none]
            }
            Layout::Planes => {
                let (at, end) = (row * stride + word * 8, (row + 1) * stride);
                [u64::from_le_bytes(part(self.bytes[0], at, end)), u64::from_le_bytes(part(self.bytes[1], at, end))]
            }
            Layout::Packed2 => {
                let (at, end) = (row * stride + word * 16, (row + 1) * stride);
                let codes = u128::from_le_bytes(part(self.bytes[0], at, end));
                [evens(codes >> 1), evens(codes)]
            }
            Layout::OffsetRows => {
                let (i, r) = (row / self.grid.quarter(), row % self.grid.quarter());
                let mut values = part::<WORD>(self.bytes[0], r * n + word * WORD, (r + 1) * n);
                for value in &mut values {
                    *value = (*value >> (2 * i) & 3).wrapping_sub(1);
                }
                V::compress(&values)
            }
        }
    }
}

/// The tensors that cells are written to.
struct To<'a> {
    grid: &'a Grid,
    bytes: [Shared<'a, u8>; 2],
}

impl To<'_> {
    /// Writes bytes to a row from byte `at` on, cut off at the end of the row.
    #[inline(always)]
    fn write<const N: usize>(&self, layout: Layout, tensor: usize, row: usize, at: usize, bytes: &[u8; N]) {
        let stride = self.grid.n.div_ceil(layout.in_byte());
        let count = N.min(stride - at);
        // SAFETY: no two words of a layout share a byte of a row.
        let to = unsafe { self.bytes[tensor].part(row * stride + at, count) };
        // A copy of constant size is compiled to moves, not to a call.
        match <&mut [u8; N]>::try_from(&mut *to) {
            Ok(to) => *to = *bytes,
            Err(_) => to.copy_from_slice(&bytes[..count]),
        }
    }

    #[inline(always)]
    fn word<V: Wide>(&self, layout: Layout, row: usize, word: usize, planes: Planes) {
        match layout {
            Layout::Values => self.write(layout, 0, row, word * WORD, &V::expand(planes)),
            Layout::BytePlanes => {
                self.write(layout, 0, row, word * WORD, &V::expand([planes[0], 0]));
                self.write(layout, 1, row, word * WORD, &V::expand([planes[1], 0]));
            }
            Layout::Planes => {
                self.write(layout, 0, row, word * 8, &planes[0].to_le_bytes());
                self.write(layout, 1, row, word * 8, &planes[1].to_le_bytes());
            }
            Layout::Packed2 => {
                let codes = apart(planes[0]) << 1 | apart(planes[1]);
                self.write(layout, 0, row, word * 16, &codes.to_le_bytes());
            }
            Layout::OffsetRows => unreachable!("four rows are written at once"),
        }
    }
}

/// The sentinels found so far.
#[derive(Default)]
struct Found {
    count: AtomicUsize,
    /// Number of cells from the first sentinel to the last cell; 0 means that there is no sentinel.
    until_end: AtomicUsize,
}

impl Found {
    #[inline(always)]
    fn note(&self, grid: &Grid, row: usize, word: usize, none: u64) {
        if none != 0 {
            let at = row * grid.n + word * WORD + none.trailing_zeros() as usize;
            self.count.fetch_add(none.count_ones() as usize, Ordering::Relaxed);
            self.until_end.fetch_max(grid.rows * grid.n - at, Ordering::Relaxed);
        }
    }

    fn first(&self, grid: &Grid) -> Option<usize> {
        match self.until_end.load(Ordering::Relaxed) {
            0 => None,
            distance => Some(grid.rows * grid.n - distance),
        }
    }
}

/// Calls `work` with each of `units` rows and a range of its words.
fn strips(units: usize, n: usize, exec: &Exec, work: impl Fn(usize, std::ops::Range<usize>) + Sync) -> Result<()> {
    let words = n.div_ceil(WORD);
    let long = words.div_ceil(STRIP).max(1);
    let together = (STRIP / words.max(1)).clamp(1, units.max(1));
    let threads = pool::worth(exec.threads, units * n, WORTH_SHARING);
    pool::for_each(threads, units.div_ceil(together) * long, |task| {
        let (first, strip) = (task / long * together, task % long);
        for unit in first..units.min(first + together) {
            work(unit, strip * STRIP..words.min((strip + 1) * STRIP));
        }
    })
}

struct Convert<'a, 'c> {
    cells: &'a Cells<'c>,
    to: &'a To<'c>,
    found: &'a Found,
    unit: usize,
    words: std::ops::Range<usize>,
}

impl Task for Convert<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        with_layout!(self.cells.grid.layout, from => with_layout!(self.to.grid.layout, to => self.all::<V>(from, to)));
    }
}

impl Convert<'_, '_> {
    #[inline(always)]
    fn all<V: Wide>(&self, from: Layout, to: Layout) {
        for word in self.words.clone() {
            if to == Layout::OffsetRows {
                self.four_rows::<V>(from, word);
            } else {
                self.to.word::<V>(to, self.unit, word, self.cleared::<V>(from, self.unit, word));
            }
        }
    }

    /// A word with its sentinels cleared and recorded.
    #[inline(always)]
    fn cleared<V: Wide>(&self, from: Layout, row: usize, word: usize) -> Planes {
        let [p0, p1] = self.cells.word::<V>(from, row, word);
        let none = p0 & p1;
        self.found.note(self.cells.grid, row, word, none);
        [p0 & !none, p1 & !none]
    }

    #[inline(always)]
    fn four_rows<V: Wide>(&self, from: Layout, word: usize) {
        let mut codes = [0u8; WORD];
        let (quarter, rows) = (self.cells.grid.quarter(), self.cells.grid.rows);
        for i in 0..4 {
            let row = i * quarter + self.unit;
            if row < rows {
                let values = V::expand(self.cleared::<V>(from, row, word));
                for (code, value) in codes.iter_mut().zip(values) {
                    *code |= value.wrapping_add(1) << (2 * i);
                }
            }
        }
        self.to.write(Layout::OffsetRows, 0, self.unit, word * WORD, &codes);
    }
}

/// Converts on the CPU.
pub fn convert(problem: &Conversion, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let cells = Cells { grid: &problem.from, bytes: problem.from.bytes(inputs)? };
    let names = problem.to.layout.tensors();
    let first = outputs.expect(names[0])?.bytes();
    let second: &mut [u8] = if names.len() > 1 { outputs.expect(names[1])?.bytes() } else { &mut [] };
    let to = To { grid: &problem.to, bytes: [Shared::new(first), Shared::new(second)] };
    let found = Found::default();
    let units = if to.grid.layout == Layout::OffsetRows { to.grid.quarter() } else { to.grid.rows };
    strips(units, to.grid.n, exec, |unit, words| {
        dispatch(exec.level, Convert { cells: &cells, to: &to, found: &found, unit, words });
    })?;
    let first = found.first(&problem.from);
    let count = found.count.load(Ordering::Relaxed);
    if let (Some(first), OnSentinel::Error) = (first, problem.on_sentinel) {
        return Err(problem.from.refuse(count, first));
    }
    outputs.expect("sentinels")?.slice::<i32>()?[0] = count as i32;
    outputs.expect("first")?.slice::<i64>()?[0] = first.map_or(-1, |first| first as i64);
    Ok(())
}

struct Count<'a, 'c> {
    cells: &'a Cells<'c>,
    found: &'a Found,
    counts: &'a [AtomicUsize; 2],
    row: usize,
    words: std::ops::Range<usize>,
}

impl Task for Count<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        let counts = with_layout!(self.cells.grid.layout, from => self.all::<V>(from));
        for (all, count) in self.counts.iter().zip(counts) {
            all.fetch_add(count, Ordering::Relaxed);
        }
    }
}

impl Count<'_, '_> {
    #[inline(always)]
    fn all<V: Wide>(&self, from: Layout) -> [usize; 2] {
        let mut counts = [0; 2];
        for word in self.words.clone() {
            let [p0, p1] = self.cells.word::<V>(from, self.row, word);
            self.found.note(self.cells.grid, self.row, word, p0 & p1);
            counts[0] += (p1 & !p0).count_ones() as usize;
            counts[1] += (p0 & !p1).count_ones() as usize;
        }
        counts
    }
}

/// Counts on the CPU.
pub fn stats(grid: &Grid, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    let cells = Cells { grid, bytes: grid.bytes(inputs)? };
    let (found, counts) = (Found::default(), [AtomicUsize::new(0), AtomicUsize::new(0)]);
    strips(grid.rows, grid.n, exec, |row, words| {
        dispatch(exec.level, Count { cells: &cells, found: &found, counts: &counts, row, words });
    })?;
    let sentinels = found.count.load(Ordering::Relaxed) as i64;
    let [minus, plus] = counts.map(|count| count.into_inner() as i64);
    let zeros = (grid.rows * grid.n) as i64 - minus - plus - sentinels;
    outputs.expect("counts")?.slice::<i64>()?.copy_from_slice(&[minus, zeros, plus, sentinels]);
    outputs.expect("first")?.slice::<i64>()?[0] = found.first(grid).map_or(-1, |first| first as i64);
    Ok(())
}

/// The values of a row of planes, for column sums.
pub fn values_of_row(planes: [&[u8]; 2], row: usize, n: usize, level: Level, to: &mut [i8]) {
    let grid = Grid { layout: Layout::Planes, leading: Vec::new(), rows: row + 1, n };
    dispatch(level, Row { cells: Cells { grid: &grid, bytes: planes }, row, to });
}

struct Row<'a, 'c> {
    cells: Cells<'c>,
    row: usize,
    to: &'a mut [i8],
}

impl Task for Row<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Wide>(self) {
        for (word, to) in self.to.chunks_mut(WORD).enumerate() {
            let [p0, p1] = self.cells.word::<V>(Layout::Planes, self.row, word);
            for (to, value) in to.iter_mut().zip(V::expand([p0 & !p1, p1 & !p0])) {
                *to = value as i8;
            }
        }
    }
}
