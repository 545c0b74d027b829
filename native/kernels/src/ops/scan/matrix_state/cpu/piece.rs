//! A piece of a state: `N` vectors of columns, row by row.

use crate::cpu::{Storage, Vector, unrolled};
use std::ops::Range;

/// Runs `$body` for `$vectors` vectors of columns: two at a time, then for the last one. `$first` is the first of these
/// vectors and `$N` their number, a constant.
macro_rules! each {
    ($vectors:expr, |$first:ident, $N:ident| $body:expr) => {{
        let vectors = $vectors;
        for $first in (0..vectors / 2).map(|i| 2 * i) {
            const $N: usize = 2;
            $body;
        }
        if vectors % 2 == 1 {
            const $N: usize = 1;
            let $first = vectors - 1;
            $body;
        }
    }};
}
pub(super) use each;

/// The columns of the piece whose first vector has index `first` among those of `all`.
#[inline(always)]
pub fn columns<V: Vector, const N: usize>(all: &Range<usize>, first: usize) -> Range<usize> {
    all.start + first * V::LANES..all.end.min(all.start + (first + N) * V::LANES)
}

/// Loads columns of a row; lanes past the last one are zero.
#[inline(always)]
pub fn load<S: Storage, V: Vector<Element = S::Wide>, const N: usize>(row: &[S], columns: Range<usize>) -> [V; N] {
    let mut vectors = [V::zero(); N];
    unrolled!(n < N, {
        let start = columns.end.min(columns.start + n * V::LANES);
        vectors[n] = S::load(&row[start..columns.end.min(start + V::LANES)]);
    });
    vectors
}

/// Stores columns of a row; lanes past the last one are dropped.
#[inline(always)]
pub fn store<S: Storage, V: Vector<Element = S::Wide>, const N: usize>(vectors: &[V; N], to: &mut [S]) {
    let len = to.len();
    unrolled!(n < N, {
        S::store(vectors[n], &mut to[len.min(n * V::LANES)..len.min((n + 1) * V::LANES)]);
    });
}

/// A row of a piece.
#[inline(always)]
pub fn row<V, const N: usize>(piece: &[V], i: usize) -> &[V; N] {
    piece[i * N..].first_chunk().expect("a row")
}

/// `S^T k` and `S^T q`.
#[inline(always)]
pub fn read_out<V: Vector, const N: usize>(state: &[V], k: &[V::Element], q: &[V::Element]) -> [[V; N]; 2] {
    let (mut by_k, mut by_q) = ([V::zero(); N], [V::zero(); N]);
    for ((row, &k), &q) in state.chunks_exact(N).zip(k).zip(q) {
        let (k, q) = (V::splat(k), V::splat(q));
        unrolled!(n < N, {
            by_k[n] = row[n].mul_add(k, by_k[n]);
            by_q[n] = row[n].mul_add(q, by_q[n]);
        });
    }
    [by_k, by_q]
}

/// The decays of a step: that of all rows, or with `BY_KEY` that of each row.
#[derive(Clone, Copy)]
pub struct Decay<'a, V: Vector, const BY_KEY: bool> {
    of_all: V,
    of_rows: &'a [V::Element],
}

impl<'a, V: Vector, const BY_KEY: bool> Decay<'a, V, BY_KEY> {
    #[inline(always)]
    pub fn new(decays: &'a [V::Element]) -> Self {
        let of_all = if BY_KEY { V::zero() } else { V::splat(decays[0]) };
        Decay { of_all, of_rows: decays }
    }

    #[inline(always)]
    pub fn of(&self, row: usize) -> V {
        if BY_KEY { V::splat(self.of_rows[row]) } else { self.of_all }
    }
}

impl<V: Vector> Decay<'_, V, false> {
    /// No decay.
    #[inline(always)]
    pub fn none() -> Self {
        Decay { of_all: V::constant(1.0), of_rows: &[] }
    }
}

/// `S = decay S + k input^T`.
#[inline(always)]
pub fn add<V: Vector, const N: usize, const BY_KEY: bool>(
    state: &mut [V],
    decay: &Decay<V, BY_KEY>,
    k: &[V::Element],
    input: &[V; N],
) {
    for (i, (row, &k)) in state.chunks_exact_mut(N).zip(k).enumerate() {
        let (k, decay) = (V::splat(k), decay.of(i));
        unrolled!(n < N, {
            row[n] = k.mul_add(input[n], decay.mul(row[n]));
        });
    }
}

/// [`add`], then the product `S^T q`.
#[inline(always)]
pub fn add_and_read<V: Vector, const N: usize, const BY_KEY: bool>(
    state: &mut [V],
    decay: &Decay<V, BY_KEY>,
    k: &[V::Element],
    input: &[V; N],
    q: &[V::Element],
) -> [V; N] {
    let mut by_q = [V::zero(); N];
    for (i, ((row, &k), &q)) in state.chunks_exact_mut(N).zip(k).zip(q).enumerate() {
        let (k, q, decay) = (V::splat(k), V::splat(q), decay.of(i));
        unrolled!(n < N, {
            row[n] = k.mul_add(input[n], decay.mul(row[n]));
            by_q[n] = row[n].mul_add(q, by_q[n]);
        });
    }
    by_q
}

/// [`add`], then [`read_out`] with `next`, the `k` and `q` of the step after.
#[inline(always)]
pub fn add_and_read_out<V: Vector, const N: usize>(
    state: &mut [V],
    decay: V,
    k: &[V::Element],
    input: &[V; N],
    next: [&[V::Element]; 2],
) -> [[V; N]; 2] {
    let (mut by_k, mut by_q) = ([V::zero(); N], [V::zero(); N]);
    for (((row, &k), &next_k), &next_q) in state.chunks_exact_mut(N).zip(k).zip(next[0]).zip(next[1]) {
        let (k, next_k, next_q) = (V::splat(k), V::splat(next_k), V::splat(next_q));
        unrolled!(n < N, {
            row[n] = k.mul_add(input[n], decay.mul(row[n]));
            by_k[n] = row[n].mul_add(next_k, by_k[n]);
            by_q[n] = row[n].mul_add(next_q, by_q[n]);
        });
    }
    [by_k, by_q]
}
