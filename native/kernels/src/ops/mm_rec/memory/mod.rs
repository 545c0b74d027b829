//! Writes into the memory of MM-Rec. Each layer has two banks of slots: a short one for the hidden state of each
//! step, and a long one for summaries.

pub mod write_long;
pub mod write_short;

/// How rows come to slots, which lie row after row: copies on CUDA and averages with what is there.
const WRITE: &str = include_str!("write.cu");
