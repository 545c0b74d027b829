//! The tests on CUDA. Without a GPU each says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod cumulative;
mod gated_delta_rule;
mod linear_attention;
mod memory;
mod mmrec_block;
mod ops;
mod packed;
mod quant_blocks;
mod recurrence;
mod runtime;
mod selective_scan;
mod ssd;
mod ternary;
