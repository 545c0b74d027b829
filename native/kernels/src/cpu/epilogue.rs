//! The epilogue of products, before results are rounded and written: scales, a bias and an activation.

use super::activation::Unary;
use super::pool::Shared;
use super::{Level, Real, Storage, Vector, Work, each_vector};
use crate::base::activation::Activation;
use crate::with_activation;
use std::marker::PhantomData;
use std::ops::Range;

/// The epilogue of a product.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, E> {
    /// Added to every row of sums.
    pub bias: Option<&'a [E]>,
    /// Applied after the bias.
    pub activation: Option<Activation>,
}

impl<E> Default for Epilogue<'_, E> {
    fn default() -> Self {
        Epilogue { bias: None, activation: None }
    }
}

impl<E: Real> Epilogue<'_, E> {
    /// Applies the epilogue to `sums`, given with their row stride, and writes the results to a block of a matrix with
    /// rows of `width`.
    ///
    /// # Safety
    /// No other part of `y` that is alive may overlap with the block.
    pub unsafe fn write<S: Storage<Wide = E>>(
        &self,
        sums: (&[E], usize),
        block: [Range<usize>; 2],
        y: (&Shared<S>, usize),
        level: Level,
    ) {
        let scaled = Scaled { rows: None, columns: None, then: *self };
        // SAFETY: the caller's promise.
        unsafe { scaled.write(sums, block, y, level) };
    }
}

/// An epilogue that multiplies the sums by scales first, those of rows before those of columns.
#[derive(Clone, Copy, Debug)]
pub struct Scaled<'a, E> {
    /// A scale for each row.
    pub rows: Option<&'a [E]>,
    /// A scale for each column, or one for all.
    pub columns: Option<&'a [E]>,
    /// The epilogue of the scaled sums.
    pub then: Epilogue<'a, E>,
}

impl<E: Real> Scaled<'_, E> {
    /// As [`Epilogue::write`].
    ///
    /// # Safety
    /// No other part of `y` that is alive may overlap with the block.
    pub unsafe fn write<S: Storage<Wide = E>>(
        &self,
        sums: (&[E], usize),
        block: [Range<usize>; 2],
        y: (&Shared<S>, usize),
        level: Level,
    ) {
        with_activation!(self.then.activation, F => {
            E::dispatch(level, Write::<F, S> { of: self, sums, block, y, activation: PhantomData })
        });
    }
}

struct Write<'a, F, S: Storage> {
    of: &'a Scaled<'a, S::Wide>,
    sums: (&'a [S::Wide], usize),
    block: [Range<usize>; 2],
    y: (&'a Shared<'a, S>, usize),
    activation: PhantomData<F>,
}

impl<F: Unary, S: Storage> Work<S::Wide> for Write<'_, F, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Scaled { rows, columns, then: Epilogue { bias, .. } } = *self.of;
        let ([block, these], (sums, stride), (y, width)) = (self.block, self.sums, self.y);
        let bias = bias.map(|bias| &bias[these.clone()]);
        let (all, each) = match columns {
            Some(&[scale]) => (Some(scale), None),
            columns => (None, columns.map(|scales| &scales[these.clone()])),
        };
        for (row, sums) in block.zip(sums.chunks(stride.max(1))) {
            // SAFETY: the caller of `write` promises that no other part is alive.
            let y = unsafe { y.part(row * width + these.start, these.len()) };
            each_vector!(these.len(), |at, end| {
                let mut z = V::load_partial(&sums[at..end]);
                if let Some(scales) = rows {
                    z = z.mul(V::splat(scales[row]));
                }
                if let Some(scale) = all {
                    z = z.mul(V::splat(scale));
                }
                if let Some(scales) = each {
                    z = z.mul(V::load_partial(&scales[at..end]));
                }
                if let Some(bias) = bias {
                    z = z.add(V::load_partial(&bias[at..end]));
                }
                S::store(F::value(z), &mut y[at..end]);
            });
        }
    }
}
