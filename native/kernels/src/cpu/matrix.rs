//! Matrix products, by the `gemm` crate, and in bf16 by AMX where available. gemm detects the CPU's instructions
//! itself (up to AVX-512), so it is equally fast on every [`Level`](super::Level). It sums each element in an order that
//! depends on the sizes and the CPU alone, not on the number of threads.
//!
//! Products of few rows read the second matrix once and are bound by that. gemm packs it first, which takes more than
//! twice as long. Such products are computed here, straight from 16-bit storage where the matrix has it. So are those
//! of somewhat more rows, some rows at a time, while a piece of the second matrix stays in the cache.

#[cfg(target_arch = "x86_64")]
mod bf16;

use super::convert::{rounded, widened};
use super::pool::Shared;
use super::vector::{MAX_LANES, transpose};
use super::{Epilogue, Exec, Real, Storage, Vector, Work, each_vector, elementwise, pool, prefetch, unrolled};
use crate::base::scratch::Scratch;
use crate::error::Result;
use gemm_common::Parallelism;
use std::ops::Range;

/// A product of gemm: `m`, `n`, `k`; the result, its strides and whether it is read; both matrices with their strides; the
/// factors of the result and of the product; what is conjugated.
pub type Gemm<E> = unsafe fn(
    usize,
    usize,
    usize,
    *mut E,
    isize,
    isize,
    bool,
    *const E,
    isize,
    isize,
    *const E,
    isize,
    isize,
    E,
    E,
    bool,
    bool,
    bool,
    Parallelism,
);

/// Most rows of the first matrix for which a product counts as one of few rows.
const FEW: usize = 4;

/// From this number of rows of the first matrix on, AMX is faster.
#[cfg(target_arch = "x86_64")]
const SOME: usize = FEW + 1;

/// Approximate upper limit for the elements of the second matrix in a piece of a product of few rows.
const PIECE: usize = 1 << 17;

/// Least number of pieces per thread.
const PIECES_PER_THREAD: usize = 4;

/// Below this number of multiplications, waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 20;

/// A matrix to read.
#[derive(Clone, Copy)]
pub struct Matrix<'a, E> {
    values: &'a [E],
    rows: usize,
    columns: usize,
    /// Distances in elements: down a column, and along a row.
    strides: [usize; 2],
}

impl<'a, E> Matrix<'a, E> {
    /// A row-major matrix of `rows` rows. Panics where `values` has another length than `rows * columns`.
    pub fn new(values: &'a [E], rows: usize, columns: usize) -> Self {
        assert_eq!(values.len(), rows * columns, "a matrix of {rows} rows of {columns}");
        Matrix { values, rows, columns, strides: [columns, 1] }
    }

    /// Its rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// A range of its columns.
    pub fn part(self, columns: Range<usize>) -> Self {
        assert!(columns.end <= self.columns, "columns that there are");
        let first = (columns.start * self.strides[1]).min(self.values.len());
        Matrix { values: &self.values[first..], columns: columns.len(), ..self }
    }

    /// The transpose, without a copy: only sizes and strides are exchanged.
    pub fn transposed(self) -> Self {
        let Matrix { values, rows, columns, strides: [down, along] } = self;
        Matrix { values, rows: columns, columns: rows, strides: [along, down] }
    }
}

impl<'a, E: bytemuck::Pod> Matrix<'a, E> {
    /// The matrix with its elements seen as another type, which must be as large.
    #[cfg(target_arch = "x86_64")]
    fn cast<T: bytemuck::Pod>(self) -> Matrix<'a, T> {
        let Matrix { values, rows, columns, strides } = self;
        Matrix { values: bytemuck::cast_slice(values), rows, columns, strides }
    }
}

impl<E: Copy> Matrix<'_, E> {
    /// The element at a row and a column.
    #[inline(always)]
    pub fn at(&self, row: usize, column: usize) -> E {
        self.values[row * self.strides[0] + column * self.strides[1]]
    }
}

/// Writes `epilogue(a b)` in row-major order, rounded once. Panics where the sizes do not match.
pub fn product<A: Storage, B: Storage<Wide = A::Wide>, T: Storage<Wide = A::Wide>>(
    a: Matrix<A>,
    b: Matrix<B>,
    to: &mut [T],
    epilogue: &Epilogue<A::Wide>,
    exec: &Exec,
) -> Result<()> {
    assert_eq!(to.len(), a.rows * b.columns, "{} by {}", a.rows, b.columns);
    #[cfg(target_arch = "x86_64")]
    if exec.level == super::Level::Amx && [A::DTYPE, B::DTYPE] == [crate::tensor::DType::Bf16; 2] && a.rows >= SOME {
        return by_tiles(a.cast(), b.cast(), to, epilogue, exec);
    }
    let wide = widened::<A>(a.values, exec)?;
    let a = Matrix { values: &wide[..], rows: a.rows, columns: a.columns, strides: a.strides };
    rounded::<T>(to, exec, |to| {
        if let Some(bias) = epilogue.bias {
            to.chunks_exact_mut(bias.len().max(1)).for_each(|row| row.copy_from_slice(bias));
        }
        multiply(a, b, to, epilogue.bias.is_some(), exec)?;
        elementwise::in_place(epilogue.activation, to, exec)
    })
}

/// Writes `epilogue(a b)` of matrices in bf16.
#[cfg(target_arch = "x86_64")]
fn by_tiles<T: Storage>(
    a: Matrix<half::bf16>,
    b: Matrix<half::bf16>,
    to: &mut [T],
    epilogue: &Epilogue<T::Wide>,
    exec: &Exec,
) -> Result<()> {
    if to.is_empty() {
        return Ok(());
    }
    let (columns, to) = (b.columns, Shared::new(to));
    let threads = pool::worth(exec.threads, a.rows.saturating_mul(columns).saturating_mul(a.columns), WORTH_SHARING);
    bf16::product(a, b, threads, &|rows: Range<usize>, these: Range<usize>, sums: &[f32]| {
        let sums = (bytemuck::cast_slice(sums), bf16::STRIP);
        // SAFETY: blocks of results share no element.
        unsafe { epilogue.write(sums, [rows, these], (&to, columns), exec.level) };
    })
}

/// Writes the product `a b` in row-major order; with `add`, adds it to `to`. The second matrix may have another storage
/// type. Panics where the sizes do not match.
pub fn multiply<S: Storage>(
    a: Matrix<S::Wide>,
    b: Matrix<S>,
    to: &mut [S::Wide],
    add: bool,
    exec: &Exec,
) -> Result<()> {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && to.len() == m * n, "({m}, {k}) by ({}, {n}) into {}", b.rows, to.len());
    let threads = pool::worth(exec.threads, m.saturating_mul(n).saturating_mul(k), WORTH_SHARING);
    let few = if b.strides[0] == 1 { SEVERAL - 1 } else { FEW };
    if (1..=few).contains(&m) && k > 0 && a.strides[1] == 1 && b.strides.contains(&1) {
        let to = &Shared::new(to);
        return FewRows { a, b, add, to }.run(threads, exec);
    }
    let wide = widened::<S>(b.values, exec)?;
    let b = Matrix { values: &wide, rows: b.rows, columns: b.columns, strides: b.strides };
    if b.strides[0] == 1 && (SEVERAL..n).contains(&m) {
        return by_columns(a, b, to, add, &Exec { threads, ..*exec });
    }
    by_gemm(a, b, (to, [n, 1]), add, threads)
}

/// From this number of rows on, it pays to compute the result column by column and transpose it afterwards. Otherwise,
/// where the columns of `b` are contiguous, gemm packs `b` the slow way, across, and there is more of `b` than of `a`.
/// Products of dense layers with fewer rows are shared by `for_each` alone.
pub const SEVERAL: usize = 16;

/// Columns of such a result that are computed and transposed at a time.
const PANEL: usize = 4096;

fn by_columns<E: Real>(a: Matrix<E>, b: Matrix<E>, to: &mut [E], add: bool, exec: &Exec) -> Result<()> {
    let (rows, columns) = (a.rows, b.columns);
    let mut panel = Scratch::any(rows * columns.min(PANEL))?;
    for first in (0..columns).step_by(PANEL) {
        let these = first..columns.min(first + PANEL);
        let of_b = Matrix { values: &b.values[first * b.strides[1]..], columns: these.len(), ..b };
        let panel = &mut panel[..rows * these.len()];
        by_gemm(a, of_b, (panel, [1, rows]), false, exec.threads)?;
        turn_back(panel, &Shared::new(to), (columns, these), add, exec)?;
    }
    Ok(())
}

/// Rows and columns that are transposed together.
const BLOCK: usize = 16;

type Block<E> = [[E; BLOCK]; BLOCK];

/// Transposes the panel into the columns `these` of `to`, or adds it there.
fn turn_back<E: Real>(
    panel: &[E],
    to: &Shared<E>,
    (columns, these): (usize, Range<usize>),
    add: bool,
    exec: &Exec,
) -> Result<()> {
    let height = panel.len() / these.len();
    pool::for_each(exec.threads, height.div_ceil(BLOCK), |block| {
        let rows = block * BLOCK..height.min((block + 1) * BLOCK);
        E::dispatch(exec.level, TurnBack { panel, height, to, columns, these: these.clone(), add, rows });
    })
}

/// Transposes some rows of a panel. The lines of the panel, and those of the result, often fall into the same few cache
/// sets. So each line is read or written once, and transposed in a local block.
struct TurnBack<'a, E: Real> {
    panel: &'a [E],
    height: usize,
    to: &'a Shared<'a, E>,
    columns: usize,
    these: Range<usize>,
    add: bool,
    rows: Range<usize>,
}

impl<E: Real> Work<E> for TurnBack<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) {
        for first in self.these.clone().step_by(BLOCK) {
            let columns = first..self.these.end.min(first + BLOCK);
            let turned = turned::<V>(&self.block(columns.clone()));
            for (row, values) in self.rows.clone().zip(&turned) {
                // SAFETY: blocks share no row.
                let to = unsafe { self.to.part(row * self.columns + first, columns.len()) };
                each_vector!(to.len(), |at, end| {
                    let value = V::load_partial(&values[at..end]);
                    let value = if self.add { value.add(V::load_partial(&to[at..end])) } else { value };
                    value.store_partial(&mut to[at..end]);
                });
            }
        }
    }
}

impl<E: Real> TurnBack<'_, E> {
    /// The rows of some columns of the panel.
    #[inline(always)]
    fn block(&self, columns: Range<usize>) -> Block<E> {
        let mut block = [[E::from_f64(0.0); BLOCK]; BLOCK];
        for (to, column) in block.iter_mut().zip(columns) {
            let from = &self.panel[(column - self.these.start) * self.height..][self.rows.clone()];
            match from.first_chunk() {
                Some(whole) => *to = *whole,
                None => to[..from.len()].copy_from_slice(from),
            }
        }
        block
    }
}

#[inline(always)]
fn turned<V: Vector>(block: &Block<V::Element>) -> Block<V::Element> {
    let mut turned = *block;
    for i in (0..BLOCK).step_by(V::LANES) {
        for j in (0..BLOCK).step_by(V::LANES) {
            let mut square = [V::zero(); MAX_LANES];
            for (to, row) in square.iter_mut().zip(&block[i..i + V::LANES]) {
                *to = V::load(&row[j..j + V::LANES]);
            }
            transpose(&mut square);
            for (row, values) in turned[j..j + V::LANES].iter_mut().zip(square) {
                values.store(&mut row[i..i + V::LANES]);
            }
        }
    }
    turned
}

/// Writes the product to the result at these strides, which are positive.
fn by_gemm<E: Real>(
    a: Matrix<E>,
    b: Matrix<E>,
    (to, [to_down, to_along]): (&mut [E], [usize; 2]),
    add: bool,
    threads: usize,
) -> Result<()> {
    if to_along < to_down {
        // gemm is made for results whose columns are contiguous.
        return by_gemm(b.transposed(), a.transposed(), (to, [to_along, to_down]), add, threads);
    }
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    let [[to_down, to_along], [a_down, a_along], [b_down, b_along]] =
        [[to_down, to_along], a.strides, b.strides].map(|strides| strides.map(|stride| stride as isize));
    let (zero, one) = (E::from_f64(0.0), E::from_f64(1.0));
    let alpha = if add { one } else { zero };
    let to = pool::Shared::new(to);
    pool::inside(threads, || {
        // SAFETY: strides and sizes stay within the slices, as asserted by `multiply` and in `Matrix::new`; no other
        // part of `to` is alive.
        unsafe {
            let to = to.part(0, m * n).as_mut_ptr();
            let (a, b) = (a.values.as_ptr(), b.values.as_ptr());
            let conjugate = false;
            E::gemm()(
                m,
                n,
                k,
                to,
                to_along,
                to_down,
                add,
                a,
                a_along,
                a_down,
                b,
                b_along,
                b_down,
                alpha,
                one,
                conjugate,
                conjugate,
                conjugate,
                parallelism,
            );
        }
    })
}

/// Columns, or rows, of the second matrix that are summed together: elements of the first are loaded once for them.
const TOGETHER: usize = 4;

/// The most columns of the result that stay in the first-level cache while rows of the second matrix are read, and the
/// fewest that are worth reading of a row.
const WIDE: usize = 2048;
const NARROW: usize = 128;

/// A product whose first matrix has few rows.
struct FewRows<'a, S: Storage> {
    a: Matrix<'a, S::Wide>,
    b: Matrix<'a, S>,
    add: bool,
    to: &'a Shared<'a, S::Wide>,
}

impl<S: Storage> FewRows<'_, S> {
    /// Distributes the columns of the result over threads.
    fn run(&self, threads: usize, exec: &Exec) -> Result<()> {
        let columns = self.b.columns;
        let each = match self.b.strides[0] {
            1 => {
                // As many pieces for each thread: all end at about the same time.
                let pieces = (columns * self.b.rows / PIECE).max(threads * PIECES_PER_THREAD);
                columns.div_ceil(pieces.next_multiple_of(threads)).next_multiple_of(TOGETHER).max(TOGETHER)
            }
            _ => columns.div_ceil(threads).next_multiple_of(NARROW).clamp(NARROW, WIDE),
        };
        pool::for_each(threads, columns.div_ceil(each), |piece| {
            let columns = piece * each..columns.min((piece + 1) * each);
            for first in (0..self.a.rows).step_by(FEW) {
                match self.a.rows - first {
                    1 => self.rows::<1>(first, columns.clone(), exec),
                    2 => self.rows::<2>(first, columns.clone(), exec),
                    3 => self.rows::<3>(first, columns.clone(), exec),
                    _ => self.rows::<FEW>(first, columns.clone(), exec),
                }
            }
        })
    }

    /// `M` rows of the result from `first` on, at the given columns.
    fn rows<const M: usize>(&self, first: usize, columns: Range<usize>, exec: &Exec) {
        let piece = Piece::<S, M> { of: self, first, columns };
        match self.b.strides[0] {
            1 => S::Wide::dispatch(exec.level, Dots(piece)),
            _ => S::Wide::dispatch(exec.level, Rows(piece)),
        }
    }
}

/// A range of columns of `M` rows of the result.
struct Piece<'a, S: Storage, const M: usize> {
    of: &'a FewRows<'a, S>,
    first: usize,
    columns: Range<usize>,
}

impl<S: Storage, const M: usize> Piece<'_, S, M> {
    /// A row of the result, at some of the piece's columns.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    fn result(&self, row: usize, columns: Range<usize>) -> &mut [S::Wide] {
        // SAFETY: pieces share no element, and one thread processes each, one row after the other.
        unsafe { self.of.to.part((self.first + row) * self.of.b.columns + columns.start, columns.len()) }
    }

    #[inline(always)]
    fn row_of_a(&self, row: usize) -> &[S::Wide] {
        &self.of.a.values[(self.first + row) * self.of.a.strides[0]..][..self.of.a.columns]
    }
}

/// For a second matrix with contiguous columns: each element is a dot product of two slices.
struct Dots<'a, S: Storage, const M: usize>(Piece<'a, S, M>);

impl<S: Storage, const M: usize> Work<S::Wide> for Dots<'_, S, M> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Range { start, end } = self.0.columns;
        let mut column = start;
        while column < end {
            let count = TOGETHER.min(end - column);
            self.together::<V>(column, count);
            column += count;
        }
    }
}

impl<S: Storage, const M: usize> Dots<'_, S, M> {
    #[inline(always)]
    fn together<V: Vector<Element = S::Wide>>(&self, column: usize, count: usize) {
        let (of, inner) = (self.0.of, self.0.of.b.rows);
        let mut sums = [[V::zero(); TOGETHER]; M];
        let mut b = [&[][..]; TOGETHER];
        for (k, b) in b.iter_mut().enumerate() {
            // Columns past the last repeat the last one, and are not written.
            *b = &of.b.values[(column + k.min(count - 1)) * of.b.strides[1]..][..inner];
        }
        let a: [&[S::Wide]; M] = std::array::from_fn(|row| &self.0.row_of_a(row)[..inner]);
        // Memory is prefetched in its order, a group ahead; past the last group, that group again.
        let after = if column + count < self.0.columns.end { TOGETHER * of.b.strides[1] } else { 0 };
        let ahead = b[0].as_ptr().wrapping_add(after);
        each_vector!(inner, |at, end| {
            let mut factors = [V::zero(); M];
            unrolled!(row < M, {
                factors[row] = V::load_partial(&a[row][at..end]);
            });
            unrolled!(k < TOGETHER, {
                prefetch(ahead, TOGETHER * at + k * V::LANES);
                let values = S::load::<V>(&b[k][at..end]);
                unrolled!(row < M, {
                    sums[row][k] = values.mul_add(factors[row], sums[row][k]);
                });
            });
        });
        for (row, sums) in sums.iter().enumerate() {
            let to = self.0.result(row, column..column + count);
            for (to, sum) in to.iter_mut().zip(sums) {
                let sum = sum.sum();
                *to = if of.add { Vector::add(*to, sum) } else { sum };
            }
        }
    }
}

/// For a second matrix with contiguous rows: four of them at a time are added to the result.
struct Rows<'a, S: Storage, const M: usize>(Piece<'a, S, M>);

impl<S: Storage, const M: usize> Work<S::Wide> for Rows<'_, S, M> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let mut inner = 0;
        while inner < self.0.of.b.rows {
            let count = TOGETHER.min(self.0.of.b.rows - inner);
            for row in 0..M {
                self.add_rows::<V>(row, inner, count);
            }
            inner += count;
        }
    }
}

impl<S: Storage, const M: usize> Rows<'_, S, M> {
    #[inline(always)]
    fn add_rows<V: Vector<Element = S::Wide>>(&self, row: usize, inner: usize, count: usize) {
        let (of, columns) = (self.0.of, &self.0.columns);
        let width = columns.len();
        let to = self.0.result(row, columns.clone());
        let fresh = inner == 0 && !of.add;
        let mut factors = [V::zero(); TOGETHER];
        let mut b = [&[][..]; TOGETHER];
        for k in 0..count {
            factors[k] = V::splat(self.0.row_of_a(row)[inner + k]);
            b[k] = &of.b.values[(inner + k) * of.b.strides[0] + columns.start..][..width];
        }
        each_vector!(width, |at, end| {
            let mut sum = if fresh { V::zero() } else { V::load_partial(&to[at..end]) };
            let mut k = 0;
            while k < count {
                prefetch(b[k].as_ptr(), at + TOGETHER * of.b.strides[0]);
                sum = S::load::<V>(&b[k][at..end]).mul_add(factors[k], sum);
                k += 1;
            }
            sum.store_partial(&mut to[at..end]);
        });
    }
}
