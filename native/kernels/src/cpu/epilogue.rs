//! What follows the sums of a product before they are rounded and written: a bias and an activation.

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
    /// Writes a block of results to a matrix with rows of `width`. The sums come with how far it is from row to row.
    ///
    /// # Safety
    /// No other part of `y` that is alive may overlap with the block.
    pub unsafe fn write<S: Storage<Wide = E>>(
        &self,
        (sums, stride): (&[E], usize),
        [rows, columns]: [Range<usize>; 2],
        (y, width): (&Shared<S>, usize),
        level: Level,
    ) {
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        with_activation!(self.activation, F => {
            E::dispatch(level, Write::<F, S> { sums, stride, bias, rows, columns, y, width, activation: PhantomData })
        });
    }
}

struct Write<'a, F, S: Storage> {
    sums: &'a [S::Wide],
    stride: usize,
    bias: Option<&'a [S::Wide]>,
    rows: Range<usize>,
    columns: Range<usize>,
    y: &'a Shared<'a, S>,
    width: usize,
    activation: PhantomData<F>,
}

impl<F: Unary, S: Storage> Work<S::Wide> for Write<'_, F, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let count = self.columns.len();
        for (row, sums) in self.rows.zip(self.sums.chunks(self.stride.max(1))) {
            // SAFETY: the caller of `write` promises that no other task has the block.
            let y = unsafe { self.y.part(row * self.width + self.columns.start, count) };
            each_vector!(count, |at, end| {
                let mut z = V::load_partial(&sums[at..end]);
                if let Some(bias) = self.bias {
                    z = z.add(V::load_partial(&bias[at..end]));
                }
                S::store(F::value(z), &mut y[at..end]);
            });
        }
    }
}
