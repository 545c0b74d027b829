//! Replaces `amx.rs` on architectures without AMX: no factor is packed.

use super::Given;
use super::product::Product;
use crate::cpu::{Real, Storage};
use crate::error::Result;

/// Has no values.
pub enum Packed {}

/// Leaves the product to vector code.
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
