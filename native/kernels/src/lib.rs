//! Fast sequence-model kernels for CPUs (AVX-512, AVX2, NEON, scalar) and NVIDIA GPUs.
//!
//! Read in this order: [`tensor`] and [`error`] (what goes in and out), [`op`] (what an op is),
//! [`cpu`] and [`cuda`] (what kernels are written with), then the ops, one folder each.

pub mod cpu;
pub mod cuda;
pub mod error;
pub mod op;
pub mod safetensors;
pub mod tensor;

pub mod selective_scan;
pub mod selective_state_update;

/// Calls `$with!(Op)` for every op there is: the one list that all op-independent code walks.
#[macro_export]
macro_rules! for_each_op {
    ($with:ident) => {
        $with!($crate::selective_scan::SelectiveScan);
        $with!($crate::selective_state_update::SelectiveStateUpdate);
    };
}
