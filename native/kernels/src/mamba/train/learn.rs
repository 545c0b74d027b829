//! What learning needs of a place beside ops.

use super::{Update, cpu, cuda};
use crate::error::Result;
use crate::place::{Cpu, Cuda, Place};
use crate::tensor::Described;

/// A place where models learn.
pub trait Learn: Place {
    /// The sum of `-ln softmax(row)[target]` over all rows of logits. With a scale they are replaced by their gradient
    /// times that.
    fn cross_entropy(&self, logits: Self::ViewMut<'_>, targets: &[u32], scale: Option<f64>) -> Result<f64>;
    /// Adds each row to that of a table that has its number: the gradient of [`Place::gather`].
    fn scatter(&self, from: &Self::View<'_>, rows: &[u32], to: Self::ViewMut<'_>) -> Result<()>;
    /// The sum of the squares of all elements.
    fn squares(&self, of: &Self::View<'_>) -> Result<f64>;
    /// Changes weights and the means of gradients and of their squares.
    fn update(&self, changed: [Self::ViewMut<'_>; 3], gradient: &Self::View<'_>, update: &Update) -> Result<()>;
}

macro_rules! learn {
    ($place:ident, $room:ident) => {
        impl Learn for $place<'_> {
            fn cross_entropy(&self, logits: Self::ViewMut<'_>, targets: &[u32], scale: Option<f64>) -> Result<f64> {
                $room::cross_entropy(logits, targets, scale, self.0)
            }
            fn scatter(&self, from: &Self::View<'_>, rows: &[u32], to: Self::ViewMut<'_>) -> Result<()> {
                $room::scatter(from, &ByRow::new(rows, to.spec().shape[0]), to, self.0)
            }
            fn squares(&self, of: &Self::View<'_>) -> Result<f64> {
                $room::squares(of, self.0)
            }
            fn update(
                &self,
                changed: [Self::ViewMut<'_>; 3],
                gradient: &Self::View<'_>,
                update: &Update,
            ) -> Result<()> {
                $room::update(changed, gradient, update, self.0)
            }
        }
    };
}
learn!(Cpu, cpu);
learn!(Cuda, cuda);

/// Numbers of rows, turned around: which of them are that of each row of a table, in order.
pub struct ByRow {
    /// Where those of each row start, and the end of the last.
    pub starts: Vec<u32>,
    pub order: Vec<u32>,
}

impl ByRow {
    fn new(rows: &[u32], count: usize) -> ByRow {
        let mut starts = vec![0; count + 1];
        rows.iter().for_each(|&row| starts[row as usize + 1] += 1);
        (0..count).for_each(|row| starts[row + 1] += starts[row]);
        let (mut next, mut order) = (starts.clone(), vec![0; rows.len()]);
        for (at, &row) in rows.iter().enumerate() {
            order[next[row as usize] as usize] = at as u32;
            next[row as usize] += 1;
        }
        ByRow { starts, order }
    }
}
