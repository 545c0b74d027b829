//! Recurrences along a sequence.

mod border;
pub mod cumulative;
pub mod gated_delta_rule;
pub mod linear_attention;
pub mod linear_scan;
pub mod matrix_state;
pub mod selective_scan;
pub mod selective_state_update;
mod sequences;
pub mod ssd;
pub mod step_size;
