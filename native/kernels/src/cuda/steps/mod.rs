//! Kernels that many ops are made of: element by element, rows by their numbers, sums of columns, and tiles.

pub(super) mod elementwise;
pub(super) mod gather;
pub(super) mod sum;
pub(crate) mod tiles;
