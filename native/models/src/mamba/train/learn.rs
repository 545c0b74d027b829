//! The operations that training needs on each device, besides ops.

use super::{Update, cpu, cuda};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::place::{Cpu, Cuda, Place};
use sidewinder_kernels::tensor::Described;

/// A device on which models are trained.
pub trait Learn: Place {
    /// The sum of `-ln softmax(row)[target]` over all rows of logits. With a `scale`, the logits are replaced by their
    /// gradient times it.
    fn cross_entropy(&self, logits: Self::ViewMut<'_>, targets: &[u32], scale: Option<f64>) -> Result<f64>;
    /// Adds row `i` of `from` to row `rows[i]` of the table `to`: the gradient of [`Place::gather`].
    fn scatter(&self, from: &Self::View<'_>, rows: &[u32], to: Self::ViewMut<'_>) -> Result<()>;
    /// The sum of the squares of all elements.
    fn squares(&self, of: &Self::View<'_>) -> Result<f64>;
    /// Applies AdamW to `changed`: the weights, the mean of gradients and the mean of their squares.
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

/// Inverted row indices: for each row of a table, the positions that refer to it, in order. The order makes sums
/// reproducible.
pub struct ByRow {
    /// The start of each table row's positions in `order`, and the end of the last.
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
