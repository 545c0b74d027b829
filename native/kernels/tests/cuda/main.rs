//! The tests on CUDA. Without a GPU each says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

#[path = "../common/mod.rs"]
mod common;

/// A module of tests, each of which gives its values to a function. What compiles many kernels is a test for each size, so
/// that they compile at once.
macro_rules! test_each {
    ($module:ident, $check:path: $($name:ident: $($given:expr),+;)*) => {
        mod $module {
            $(#[test]
            fn $name() {
                $check($($given),+);
            })*
        }
    };
}

mod attention;
mod cumulative;
mod gated_delta_rule;
mod linear_attention;
mod memory;
mod mmrec_block;
mod ops;
mod packed;
mod parts;
mod quant_blocks;
mod recurrence;
mod runtime;
mod selective_scan;
mod ssd;
mod ternary;
