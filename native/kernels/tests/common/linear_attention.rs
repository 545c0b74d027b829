//! Calls of linear attention.

use super::check::noise;
use super::{with, without};
use sidewinder_kernels::op::{Named, named};
use sidewinder_kernels::ops::scan::linear_attention::Options;
use sidewinder_kernels::tensor::Owned;

/// Batch, length, groups, heads, keys, values.
pub type Sizes = [usize; 6];

/// The least logarithm of a decay, with which an initial state does not vanish from f32 over the whole sequence.
fn least(length: usize) -> f64 {
    -f64::min(0.5, 60.0 / length.max(1) as f64)
}

/// All inputs, with a decay for each head. Queries and keys are positive, as after a feature map, so that divisors are
/// not near 0.
pub fn inputs([batch, length, groups, heads, keys, values]: Sizes) -> Named<Owned> {
    let of_groups = [batch, length, groups, keys];
    named([
        ("q", Some(noise(1, &of_groups, 0.1, 1.0))),
        ("k", Some(noise(2, &of_groups, 0.1, 1.0))),
        ("v", Some(noise(3, &[batch, length, heads, values], -1.0, 1.0))),
        ("g", Some(noise(4, &[batch, length, heads], least(length), 0.0))),
        ("initial_state", Some(noise(5, &[batch, heads, keys, values], -1.0, 1.0))),
        ("initial_z", Some(noise(6, &[batch, heads, keys], 0.1, 1.0))),
    ])
}

/// [`inputs`] with a decay for each key.
pub fn by_key(sizes: Sizes) -> Named<Owned> {
    let [batch, length, _, heads, keys, _] = sizes;
    with(&inputs(sizes), "g", noise(7, &[batch, length, heads, keys], least(length), 0.0))
}

/// The calls to test: each kind of decay, without `z`, with states of `z`, and divided by it.
pub fn calls(sizes: Sizes) -> Vec<(Options, Named<Owned>)> {
    let state = Options { return_state: true, ..Default::default() };
    let z = Options { return_z: true, ..state.clone() };
    let normalize = Options { normalize: true, ..z.clone() };
    let decays = [inputs(sizes), without(&inputs(sizes), &["g"]), by_key(sizes)];
    let of = |all: Named<Owned>| {
        [(state.clone(), without(&all, &["initial_z"])), (z.clone(), all.clone()), (normalize.clone(), all)]
    };
    // With keys of one number y does not depend on q where it is divided: its gradient is but rounding.
    decays.into_iter().flat_map(of).filter(|(options, _)| sizes[4] != 1 || !options.normalize).collect()
}
