//! A matrix that is multiplied with a few vectors repeatedly, as in each step of a recurrence. It is packed so that a
//! product reads it sequentially, some rows at a time, with sums that stay in registers.

use super::matrix::Matrix;
use super::pool::{self, Shared};
use super::{Exec, Level, Real, Storage, Vector, Work, prefetch_near, unrolled};
use crate::error::Result;

/// Height of a panel, in vectors of rows.
const VECTORS: usize = 4;

/// Columns that are packed together. A cache line of each row is read once, and written while it is still cached.
const BLOCK: usize = 16;

/// Vectors in a task of [`Panels::add_all`], which multiplies one panel with them.
const TOGETHER: usize = 64;

/// Prefetch distance within a panel, in elements.
const AHEAD: usize = 2048;

/// The rows of a matrix in panels. A panel holds the first elements of all its rows, then the second ones, and so on.
pub struct Panels<S> {
    values: Vec<S>,
    rows: usize,
    inner: usize,
    /// Rows of a panel; the last panel is padded with zeros.
    width: usize,
    level: Level,
}

impl<S: Storage> Panels<S> {
    /// Packs a matrix for products with the instructions of `exec.level`.
    pub fn pack(matrix: Matrix<S>, exec: &Exec) -> Result<Self> {
        let width = VECTORS * S::Wide::dispatch(exec.level, Lanes);
        let [rows, inner] = matrix.dims();
        let mut values = vec![S::from_f64(0.0); rows.next_multiple_of(width) * inner];
        let to = Shared::new(&mut values);
        pool::for_each(exec.threads, rows.div_ceil(width), |panel| {
            // SAFETY: panels share no element.
            let to = unsafe { to.part(panel * width * inner, width * inner) };
            pack_panel(matrix, panel * width, width, to);
        })?;
        Ok(Panels { values, rows, inner, width, level: exec.level })
    }

    /// Number of panels.
    pub fn count(&self) -> usize {
        self.rows.div_ceil(self.width)
    }

    /// The rows of the matrix that a panel holds.
    pub fn rows(&self, panel: usize) -> std::ops::Range<usize> {
        panel * self.width..self.rows.min((panel + 1) * self.width)
    }

    /// Multiplies a panel's rows with each of the `vectors` (the rows of that matrix). The products go into the columns
    /// [`Panels::rows`] of `to`, whose rows are as long as the matrix has rows. With `add` they are added to its
    /// contents.
    ///
    /// # Safety
    /// No other thread accesses these columns of `to` at the same time.
    pub unsafe fn multiply(&self, panel: usize, vectors: &[S::Wide], to: &Shared<S::Wide>, add: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.multiply_from(0, panel, vectors, to, add) };
    }

    /// Like [`Panels::multiply`], into the rows of `to` from `first` on.
    ///
    /// # Safety
    /// No other thread accesses these columns of these rows at the same time.
    unsafe fn multiply_from(&self, first: usize, panel: usize, vectors: &[S::Wide], to: &Shared<S::Wide>, add: bool) {
        assert_eq!(vectors.len() % self.inner.max(1), 0, "vectors as long as the rows");
        S::Wide::dispatch(self.level, Product { of: self, panel, vectors, first, to, add });
    }

    /// Adds the products with many vectors, divided among threads.
    pub fn add_all(&self, vectors: &[S::Wide], to: &mut [S::Wide], threads: usize) -> Result<()> {
        let (each, to) = (TOGETHER * self.inner, Shared::new(to));
        let blocks = vectors.len().div_ceil(each.max(1));
        pool::for_each(threads, self.count() * blocks, |i| {
            let (panel, block) = (i / blocks, i % blocks);
            let vectors = &vectors[block * each..vectors.len().min((block + 1) * each)];
            // SAFETY: no two of them share a panel and a vector.
            unsafe { self.multiply_from(block * TOGETHER, panel, vectors, &to, true) };
        })
    }
}

struct Lanes;

impl<E> Work<E> for Lanes {
    type Output = usize;

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) -> usize {
        V::LANES
    }
}

fn pack_panel<S: Storage>(matrix: Matrix<S>, first: usize, width: usize, to: &mut [S]) {
    let [rows, inner] = matrix.dims();
    for columns in (0..inner).step_by(BLOCK) {
        for row in first..rows.min(first + width) {
            for column in columns..inner.min(columns + BLOCK) {
                to[column * width + row - first] = matrix.at(row, column);
            }
        }
    }
}

struct Product<'a, S: Storage> {
    of: &'a Panels<S>,
    panel: usize,
    vectors: &'a [S::Wide],
    /// The row of `to` for the first vector.
    first: usize,
    to: &'a Shared<'a, S::Wide>,
    add: bool,
}

impl<S: Storage> Work<S::Wide> for Product<'_, S> {
    type Output = ();

    /// Each loaded element of the matrix is multiplied with several vectors, as many as there are registers for.
    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let count = self.vectors.len() / self.of.inner.max(1);
        let mut first = 0;
        while first < count {
            first += match count - first {
                1 => self.some::<V, 1>(first),
                2 => self.some::<V, 2>(first),
                // AVX2 has 16 registers.
                _ if V::LANES == 8 => self.some::<V, 2>(first),
                3 => self.some::<V, 3>(first),
                _ => self.some::<V, 4>(first),
            }
        }
    }
}

impl<S: Storage> Product<'_, S> {
    #[inline(always)]
    fn some<V: Vector<Element = S::Wide>, const M: usize>(&self, first: usize) -> usize {
        let (of, width) = (self.of, VECTORS * V::LANES);
        let panel = &of.values[self.panel * width * of.inner..][..width * of.inner];
        let mut vectors = [&[][..]; M];
        for (m, vector) in vectors.iter_mut().enumerate() {
            *vector = &self.vectors[(first + m) * of.inner..][..of.inner];
        }
        let mut sums = [[V::zero(); VECTORS]; M];
        for (k, column) in panel.chunks_exact(width).enumerate() {
            prefetch_near(column.as_ptr(), AHEAD);
            let mut values = [V::zero(); VECTORS];
            unrolled!(r < VECTORS, {
                values[r] = S::load::<V>(&column[r * V::LANES..(r + 1) * V::LANES]);
            });
            unrolled!(m < M, {
                let factor = V::splat(vectors[m][k]);
                unrolled!(r < VECTORS, {
                    sums[m][r] = values[r].mul_add(factor, sums[m][r]);
                });
            });
        }
        unrolled!(m < M, {
            self.store(first + m, sums[m]);
        });
        M
    }

    #[inline(always)]
    fn store<V: Vector<Element = S::Wide>>(&self, vector: usize, sums: [V; VECTORS]) {
        let rows = self.of.rows(self.panel);
        // SAFETY: `multiply`'s caller promises exclusive access to these columns.
        let to = unsafe { self.to.part((self.first + vector) * self.of.rows + rows.start, rows.len()) };
        unrolled!(r < VECTORS, {
            let to = &mut to[rows.len().min(r * V::LANES)..rows.len().min((r + 1) * V::LANES)];
            let sum = if self.add { V::load_partial(to).add(sums[r]) } else { sums[r] };
            sum.store_partial(to);
        });
    }
}
