//! MM-Rec: the ops of its block, and the block.

pub mod block_recurrence;
pub mod hds;
pub mod mdi;
pub mod memory;
pub mod mmrec_block;
pub mod multi_memory_attention;
