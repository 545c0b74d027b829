//! Calls of Mamba-2's scan.

use super::check::noise;
use sidewinder_kernels::op::{Named, named};
pub use sidewinder_kernels::ops::scan::ssd::Options;
use sidewinder_kernels::tensor::Owned;

/// Batch, length, heads, width, groups, state.
pub type Sizes = [usize; 6];

/// All inputs, with decays that are far from 0 and from 1.
pub fn inputs([batch, length, heads, width, groups, state]: Sizes) -> Named<Owned> {
    let rows = [batch, length, heads, width];
    let states = [batch, length, groups, state];
    named([
        ("x", Some(noise(1, &rows, -1.0, 1.0))),
        ("dt", Some(noise(2, &[batch, length, heads], -2.0, 1.0))),
        ("A", Some(noise(3, &[heads], -1.0, -0.1))),
        ("B", Some(noise(4, &states, -1.0, 1.0))),
        ("C", Some(noise(5, &states, -1.0, 1.0))),
        ("D", Some(noise(6, &[heads], -1.0, 1.0))),
        ("z", Some(noise(7, &rows, -2.0, 2.0))),
        ("dt_bias", Some(noise(8, &[heads], -0.5, 0.5))),
        ("initial_state", Some(noise(9, &[batch, heads, width, state], -1.0, 1.0))),
    ])
}

/// Options that most calls have.
pub fn options() -> Options {
    Options { dt_softplus: true, return_state: true, ..Default::default() }
}
