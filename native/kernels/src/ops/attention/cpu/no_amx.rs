//! Without AMX, no factor is in tiles.

use super::Given;
use super::product::Product;
use crate::cpu::{Real, Storage};
use crate::error::Result;

/// Nothing.
pub enum Packed {}

/// Leaves the product to vectors.
pub fn run(_: &mut Product<f32>) -> bool {
    false
}

/// Packs nothing.
pub fn pack_all<S: Storage>(_: &Given<S>) -> Result<Option<[Vec<Packed>; 2]>> {
    Ok(None)
}

/// Packs nothing.
pub fn pack_columns<E: Real>(_: Option<Packed>, _: (&[E], usize), _: [usize; 2], _: bool) -> Option<Packed> {
    None
}
