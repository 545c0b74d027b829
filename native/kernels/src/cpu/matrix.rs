//! Matrix products, by the `gemm` crate. It asks the CPU itself which instructions there are (up to
//! AVX-512), so it is as fast on every [`Level`](super::Level); and it adds up each element in an order
//! that depends on the sizes and the CPU alone, not on the number of threads.

use super::{Exec, Real, pool};
use crate::error::Result;
use gemm::Parallelism;

/// Below this many multiplications waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 20;

/// A matrix to read.
#[derive(Clone, Copy)]
pub struct Matrix<'a, E> {
    values: &'a [E],
    rows: usize,
    columns: usize,
    /// From element to element down a column, and along a row.
    strides: [usize; 2],
}

impl<'a, E> Matrix<'a, E> {
    /// A matrix of `rows` rows, one after the other. Panics where there are not as many values.
    pub fn new(values: &'a [E], rows: usize, columns: usize) -> Self {
        assert_eq!(values.len(), rows * columns, "a matrix of {rows} rows of {columns}");
        Matrix { values, rows, columns, strides: [columns, 1] }
    }

    /// The same with rows and columns changed.
    pub fn transposed(self) -> Self {
        let Matrix { values, rows, columns, strides: [down, along] } = self;
        Matrix { values, rows: columns, columns: rows, strides: [along, down] }
    }
}

/// Writes the product `a b`, row after row; or with `add`, adds it to what is there. Panics where the
/// sizes do not fit each other.
pub fn multiply<E: Real>(a: Matrix<E>, b: Matrix<E>, to: &mut [E], add: bool, exec: &Exec) -> Result<()> {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && to.len() == m * n, "({m}, {k}) by ({}, {n}) into {}", b.rows, to.len());
    let threads = if m.saturating_mul(n).saturating_mul(k) < WORTH_SHARING { 1 } else { exec.threads };
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    let ([a_down, a_along], [b_down, b_along]) = (a.strides.map(|s| s as isize), b.strides.map(|s| s as isize));
    let (zero, one) = (E::from_f64(0.0), E::from_f64(1.0));
    let to = pool::Shared::new(to);
    pool::inside(threads, || {
        // SAFETY: strides and sizes stay within the slices, as asserted here and in `Matrix::new`;
        // nobody else has a part of `to`.
        unsafe {
            let to = to.part(0, m * n).as_mut_ptr();
            let (a, b) = (a.values.as_ptr(), b.values.as_ptr());
            let alpha = if add { one } else { zero };
            gemm::gemm(
                m,
                n,
                k,
                to,
                1,
                n as isize,
                add,
                a,
                a_along,
                a_down,
                b,
                b_along,
                b_down,
                alpha,
                one,
                false,
                false,
                false,
                parallelism,
            );
        }
    })
}
