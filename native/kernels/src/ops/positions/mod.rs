//! What tells positions apart.

pub mod rope;
pub mod sinusoidal_positions;
