//! Positional encodings.

pub mod rope;
pub mod sinusoidal_positions;
