//! Calls of the gated delta rule.

use super::check::noise;
use sidewinder_kernels::op::{Named, named};
pub use sidewinder_kernels::ops::scan::gated_delta_rule::Options;
use sidewinder_kernels::tensor::Owned;

/// Batch, length, groups, heads, keys, values.
pub type Sizes = [usize; 6];

/// All inputs. Without lengths of 1, keys are short enough for steps that shrink a state.
pub fn inputs([batch, length, groups, heads, keys, values]: Sizes) -> Named<Owned> {
    let (of_groups, of_steps) = ([batch, length, groups, keys], [batch, length, heads]);
    let short = 1.5 / (keys.max(2) as f64).sqrt();
    named([
        ("q", Some(noise(1, &of_groups, -1.0, 1.0))),
        ("k", Some(noise(2, &of_groups, -short, short))),
        ("v", Some(noise(3, &[batch, length, heads, values], -1.0, 1.0))),
        ("beta", Some(noise(4, &of_steps, 0.1, 1.0))),
        ("g", Some(noise(5, &of_steps, -0.5, 0.0))),
        ("initial_state", Some(noise(6, &[batch, heads, keys, values], -1.0, 1.0))),
    ])
}

/// Options that most calls have.
pub fn options() -> Options {
    Options { return_state: true, ..Default::default() }
}
