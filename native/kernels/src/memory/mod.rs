//! Writing into the memory of MM-Rec: banks of slots, of which each layer has a short one, which takes in the hidden
//! state of each step, and a long one, which takes in summaries.

pub mod state;
pub mod write_long;
pub mod write_short;

/// How rows come to slots, which lie row after row: copies on CUDA and averages with what is there.
const WRITE: &str = include_str!("write.cu");
