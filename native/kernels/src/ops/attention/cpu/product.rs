//! The product of two matrices that are small enough for the caches, by register blocking.

use super::amx::{self, Packed};
use crate::cpu::{Level, Real, Storage, Vector, Work, unrolled};
use crate::tensor::DType;

/// The left matrix, whose elements are broadcast one by one.
#[derive(Clone, Copy)]
pub struct Left<'a, E> {
    /// Its elements, from the first one on.
    pub values: &'a [E],
    /// Stride between elements of a column.
    pub down: usize,
    /// Stride between elements of a row.
    pub along: usize,
}

impl<'a, E> Left<'a, E> {
    /// A row-major matrix with this row stride.
    pub fn rows(values: &'a [E], row: usize) -> Self {
        Left { values, down: row, along: 1 }
    }

    /// The transpose, in the same memory.
    pub fn transposed(self) -> Self {
        Left { down: self.along, along: self.down, ..self }
    }
}

/// How the product is combined with the earlier contents of its memory.
#[derive(Clone, Copy)]
pub enum Then<'a, E> {
    /// Overwrites them.
    Write,
    /// Adds to them.
    Add,
    /// Multiplies each column by its factor, then adds to it.
    Scale(&'a [E]),
}

/// In which matrix zeros stand for masked elements. Such a zero must also cancel a NaN or an infinity in the other
/// matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Care {
    /// In neither.
    None,
    /// In the left one.
    Left,
    /// In the right one.
    Right,
}

/// Which factors were computed in f32. Other factors come from bf16 tensors, and are exact in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computed {
    /// None.
    Neither,
    /// The left factor.
    Left,
    /// The right factor.
    Right,
    /// Both, or the tensors are not in bf16.
    Both,
}

impl Computed {
    /// `self` for tensors in bf16, otherwise both.
    pub fn of<S: Storage>(self) -> Computed {
        if S::DTYPE == DType::Bf16 { self } else { Computed::Both }
    }
}

/// A product `left right`, `rows` by `width`, over `depth`.
pub struct Product<'a, E> {
    /// The left matrix.
    pub left: Left<'a, E>,
    /// The right matrix, whose rows are read as vectors, and its row stride.
    pub right: (&'a [E], usize),
    /// Rows of the product.
    pub rows: usize,
    /// Columns of the left matrix.
    pub depth: usize,
    /// Columns of the product; a multiple of the lanes of a vector.
    pub width: usize,
    /// The product's memory, and its row stride.
    pub to: (&'a mut [E], usize),
    /// How the product is combined with the earlier contents of that memory.
    pub then: Then<'a, E>,
    /// In which matrix zeros stand for masked elements.
    pub care: Care,
    /// Which matrices may hold numbers that are not exact in bf16.
    pub computed: Computed,
    /// The matrices in packed tiles, if they are packed already. Only AMX has such tiles.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub packed: [Option<&'a Packed>; 2],
}

impl<'a, E: Real> Product<'a, E> {
    /// The product of two matrices, with no assumptions about them, overwriting `to`.
    pub fn new(
        left: Left<'a, E>,
        right: (&'a [E], usize),
        [rows, depth, width]: [usize; 3],
        to: (&'a mut [E], usize),
    ) -> Self {
        let (then, care, computed, packed) = (Then::Write, Care::None, Computed::Both, [None; 2]);
        Product { left, right, rows, depth, width, to, then, care, computed, packed }
    }

    /// Computes the product. Panics where a matrix exceeds its slice.
    pub fn run(mut self, level: Level) {
        if self.rows == 0 || self.width == 0 {
            return;
        }
        assert!((self.rows - 1) * self.to.1 + self.width <= self.to.0.len(), "a product inside its slice");
        if let Some(last) = self.depth.checked_sub(1) {
            let Left { values, down, along } = self.left;
            assert!((self.rows - 1) * down + last * along < values.len(), "a left matrix inside its slice");
            assert!(last * self.right.1 + self.width <= self.right.0.len(), "a right matrix inside its slice");
        }
        if !self.by_tiles(level) {
            E::dispatch(level, self);
        }
    }

    /// Computes the product by AMX; returns false where that is not possible.
    fn by_tiles(&mut self, level: Level) -> bool {
        if level != Level::Amx || self.computed == Computed::Both || self.care != Care::None {
            return false;
        }
        // SAFETY: f32 is the only type with this `DTYPE`.
        E::DTYPE == DType::F32 && amx::run(unsafe { &mut *(&raw mut *self).cast::<Product<f32>>() })
    }
}

/// Vectors per row of a block. With [`most_rows`] rows of them, a row of the right matrix and an element of the left
/// one, a block fits in the registers: 32 on AVX-512 and NEON, 16 otherwise. Twelve rows of two vectors would need
/// fewer loads, but their addresses alone need more registers than there are.
const fn most_vectors<V: Vector>() -> usize {
    if V::LANES == 8 { 2 } else { 4 }
}

/// Rows per block.
const fn most_rows<V: Vector>() -> usize {
    if V::LANES == 1 { 4 } else { 6 }
}

impl<E: Real> Work<E> for Product<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(mut self) {
        match self.care {
            Care::None => self.panels::<V>(),
            Care::Left => self.carefully::<V, true>(),
            Care::Right => self.carefully::<V, false>(),
        }
    }
}

impl<E: Real> Product<'_, E> {
    #[inline(always)]
    fn panels<V: Vector<Element = E>>(&mut self) {
        let mut column = 0;
        while column < self.width {
            let vectors = ((self.width - column) / V::LANES).min(most_vectors::<V>());
            match vectors {
                1 => self.panel::<V, 1>(column),
                2 => self.panel::<V, 2>(column),
                3 if most_vectors::<V>() >= 3 => self.panel::<V, 3>(column),
                4 if most_vectors::<V>() >= 4 => self.panel::<V, 4>(column),
                _ => unreachable!("a width of whole vectors"),
            }
            column += vectors * V::LANES;
        }
    }

    /// All rows, for `N` vectors of columns.
    #[inline(always)]
    fn panel<V: Vector<Element = E>, const N: usize>(&mut self, column: usize) {
        let mut row = 0;
        if most_rows::<V>() == 6 {
            while self.rows - row >= 6 {
                self.block::<V, 6, N>(row, column);
                row += 6;
            }
        }
        while self.rows - row >= 4 {
            self.block::<V, 4, N>(row, column);
            row += 4;
        }
        while self.rows - row >= 2 {
            self.block::<V, 2, N>(row, column);
            row += 2;
        }
        if row < self.rows {
            self.block::<V, 1, N>(row, column);
        }
    }

    #[inline(always)]
    fn block<V: Vector<Element = E>, const R: usize, const N: usize>(&mut self, row: usize, column: usize) {
        let mut sums = [[V::zero(); N]; R];
        // One of these strides is 1; as a constant it costs no instruction.
        match (self.left.down, self.left.along) {
            (down, 1) => self.sum::<V, R, N>(row, column, (down, 1), &mut sums),
            (1, along) => self.sum::<V, R, N>(row, column, (1, along), &mut sums),
            strides => self.sum::<V, R, N>(row, column, strides, &mut sums),
        }
        unrolled!(r < R, {
            self.put::<V, N>(row + r, column, sums[r]);
        });
    }

    #[inline(always)]
    fn sum<V: Vector<Element = E>, const R: usize, const N: usize>(
        &self,
        row: usize,
        column: usize,
        strides: (usize, usize),
        sums: &mut [[V; N]; R],
    ) {
        // Unrolled by four: the loop counter of single steps would take the issue slots that the multiplications leave.
        let left = self.left.values.as_ptr().wrapping_add(row * strides.0);
        let right = self.right.0.as_ptr().wrapping_add(column);
        let mut k = 0;
        while self.depth - k >= 4 {
            unrolled!(step < 4, {
                // SAFETY: `run` proved that the slices hold the elements of all rows and steps.
                unsafe { self.step::<V, R, N>(left, right, k + step, strides, sums) };
            });
            k += 4;
        }
        while k < self.depth {
            // SAFETY: as above.
            unsafe { self.step::<V, R, N>(left, right, k, strides, sums) };
            k += 1;
        }
    }

    /// Adds the products of a column of the left matrix with a row of the right one.
    ///
    /// # Safety
    /// The slices must hold these elements.
    #[inline(always)]
    unsafe fn step<V: Vector<Element = E>, const R: usize, const N: usize>(
        &self,
        left: *const E,
        right: *const E,
        k: usize,
        (down, along): (usize, usize),
        sums: &mut [[V; N]; R],
    ) {
        let mut vectors = [V::zero(); N];
        unrolled!(n < N, {
            // SAFETY: the caller's promise.
            let values = unsafe { std::slice::from_raw_parts(right.add(k * self.right.1 + n * V::LANES), V::LANES) };
            vectors[n] = V::load(values);
        });
        unrolled!(r < R, {
            // SAFETY: as above.
            let left = V::splat(unsafe { *left.add(r * down + k * along) });
            unrolled!(n < N, {
                sums[r][n] = left.mul_add(vectors[n], sums[r][n]);
            });
        });
    }

    /// One vector of columns at a time, skipping zero factors of the matrix that `care` names.
    #[inline(always)]
    fn carefully<V: Vector<Element = E>, const LEFT: bool>(&mut self) {
        let tiny = V::constant(f32::MIN_POSITIVE as f64);
        for row in 0..self.rows {
            let mut column = 0;
            while column < self.width {
                let mut sum = V::zero();
                for k in 0..self.depth {
                    let left = V::splat(self.left.values[row * self.left.down + k * self.left.along]);
                    let right = V::load(&self.right.0[k * self.right.1 + column..]);
                    let factor = if LEFT { left } else { right };
                    sum = sum.where_less(factor.abs(), tiny, left.mul_add(right, sum));
                }
                self.put::<V, 1>(row, column, [sum]);
                column += V::LANES;
            }
        }
    }

    #[inline(always)]
    fn put<V: Vector<Element = E>, const N: usize>(&mut self, row: usize, column: usize, sums: [V; N]) {
        let to = &mut self.to.0[row * self.to.1 + column..][..N * V::LANES];
        unrolled!(n < N, {
            let to = &mut to[n * V::LANES..];
            let sum = match self.then {
                Then::Write => sums[n],
                Then::Add => V::load(to).add(sums[n]),
                Then::Scale(factors) => V::load(to).mul_add(V::load(&factors[column + n * V::LANES..]), sums[n]),
            };
            sum.store(to);
        });
    }
}

/// Whether all elements of a matrix are finite.
pub struct AreFinite<'a, E> {
    /// The matrix, and its row stride.
    pub values: (&'a [E], usize),
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub width: usize,
}

impl<E: Real> Work<E> for AreFinite<'_, E> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) -> bool {
        // Products with 0 are 0, or NaN if an element is not finite; sums keep NaN.
        let (mut even, mut odd) = (V::zero(), V::zero());
        for row in 0..self.rows {
            let values = &self.values.0[row * self.values.1..][..self.width];
            let mut i = 0;
            while i < self.width {
                even = V::load_partial(&values[i..]).mul_add(V::zero(), even);
                (even, odd) = (odd, even);
                i += V::LANES;
            }
        }
        even.add(odd).sum().to_f64() == 0.0
    }
}
