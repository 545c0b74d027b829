//! The tests of ops on the CPU, and of their building blocks. They are one program, which links once: `--test cpu NAME`
//! runs a part of it.

#[path = "../common/mod.rs"]
mod common;

mod activations;
mod attention;
mod block_recurrence;
mod blocks;
mod causal_conv1d;
mod chunks;
mod cumulative;
mod decode;
mod difference;
mod floors;
mod gated_delta_rule;
mod gated_rms_norm;
mod hds;
mod hds_query;
mod linear;
mod linear_attention;
mod linear_scan;
mod mamba_block;
mod matmul;
mod mdi;
mod memory;
mod mmrec_block;
mod multi_memory_attention;
mod norm;
mod op;
mod op_table;
mod packed;
mod parts;
mod rope;
mod scratch;
mod selective_scan;
mod selective_scan_backward;
mod sinusoidal_positions;
mod ssd;
mod ternary;
mod transformer;
mod vectors;
