//! Kernels shared by ops: element-wise maps, gathers of rows, sums of columns, and tiles.

pub(super) mod elementwise;
pub(super) mod gather;
pub(super) mod sum;
pub(crate) mod tiles;
