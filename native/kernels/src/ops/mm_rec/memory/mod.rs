//! Writes into the memory of MM-Rec. Each layer has two banks of slots: a short one for the hidden state of each
//! step, and a long one for summaries.

pub mod write_long;
pub mod write_short;

/// Writes rows into slots, by copies or as averages with the old contents.
const WRITE: &str = include_str!("write.cu");
