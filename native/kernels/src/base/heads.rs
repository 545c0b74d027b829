//! Tensors of rank 4 with a head axis, in either order of heads and rows.

use serde::{Deserialize, Serialize};

/// How to mend a wrong shape of a tensor of heads.
pub const HINT: &str = "Axes are (batch, heads, length, width), or with the layout heads_last (batch, length, heads, \
                        width); those of masks and biases are always (batch, heads, queries, keys)";

/// The order of the axes of queries, keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `(batch, heads, length, width)`.
    #[default]
    HeadsFirst,
    /// `(batch, length, heads, width)`, the order in which projections give them.
    HeadsLast,
}

/// Strides in elements of a tensor with heads; each row is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From one batch to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one row to the next.
    pub row: usize,
}

impl Strides {
    /// The strides of a contiguous tensor of these sizes.
    pub fn new(layout: Layout, heads: usize, rows: usize, width: usize) -> Strides {
        let (head, row) = match layout {
            Layout::HeadsFirst => (rows * width, width),
            Layout::HeadsLast => (width, heads * width),
        };
        Strides { batch: heads * rows * width, head, row }
    }

    /// The offset of a row.
    #[inline]
    pub fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch + head * self.head + row * self.row
    }
}

/// Batch, heads, rows and width of a shape of four axes.
pub fn sizes_of(layout: Layout, dims: &[usize]) -> [usize; 4] {
    let [batch, second, third, width] = [dims[0], dims[1], dims[2], dims[3]];
    match layout {
        Layout::HeadsFirst => [batch, second, third, width],
        Layout::HeadsLast => [batch, third, second, width],
    }
}
