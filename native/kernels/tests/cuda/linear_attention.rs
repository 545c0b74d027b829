//! Linear attention and its gradient on CUDA: against their f64 references, and the same bits each time.

use crate::common::check::noise;
use crate::common::linear_attention::{by_key, calls, inputs};
use crate::common::on_device::{agrees as agrees_alone, both};
use crate::common::{gpu, with, without};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::linear_attention::{LinearAttention, LinearAttentionBackward, Options};
use sidewinder_kernels::tensor::Owned;

fn agrees(device: &Device, options: &Options, inputs: &Named<Owned>) {
    both::<LinearAttention, LinearAttentionBackward>(device, (options, options), inputs, 0.0);
}

/// A test for each of these sizes, since the kernels for all their types and options take time to compile.
macro_rules! sizes_agree {
    ($($name:ident: $sizes:expr;)*) => {
        mod sizes_agree {
            $(#[test]
            fn $name() {
                let Some(device) = super::gpu() else { return };
                for (options, inputs) in super::calls($sizes) {
                    super::agrees(&device, &options, &inputs);
                }
            })*
        }
    };
}

// Lanes with one, two and four columns, rows over 8, 16 and 32 lanes, whole and broken chunks, several blocks and slices.
sizes_agree! {
    of_ones: [1, 1, 1, 1, 1, 1];
    of_3_keys: [2, 5, 2, 2, 3, 16];
    of_5_keys: [1, 63, 2, 4, 5, 17];
    of_8_keys: [2, 64, 3, 3, 8, 33];
    of_17_keys: [12, 18, 12, 12, 17, 65];
    of_20_keys_and_300_values: [1, 67, 1, 1, 20, 300];
    of_33_keys: [1, 130, 1, 1, 33, 70];
    of_64_keys: [2, 200, 4, 8, 64, 64];
    of_64_keys_and_132_values: [12, 20, 12, 12, 64, 132];
    of_128_keys: [1, 70, 2, 4, 128, 128];
    of_128_keys_in_many_heads: [9, 5, 9, 18, 128, 64];
    of_256_keys: [1, 40, 2, 2, 256, 256];
    of_300_keys: [1, 9, 1, 2, 300, 20];
}

#[test]
fn a_long_sequence_agrees() {
    let Some(device) = gpu() else { return };
    for (options, inputs) in calls([1, 1000, 1, 2, 16, 8]) {
        agrees(&device, &options, &inputs);
    }
}

#[test]
fn sizes_of_zero_agree() {
    let Some(device) = gpu() else { return };
    for sizes in [[0, 3, 1, 2, 2, 3], [2, 0, 1, 2, 2, 3], [2, 3, 1, 0, 2, 3], [2, 3, 1, 2, 0, 3], [2, 3, 1, 2, 3, 0]] {
        for (options, inputs) in calls(sizes) {
            agrees(&device, &options, &inputs);
        }
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let Some(device) = gpu() else { return };
    let all = inputs([2, 69, 2, 4, 6, 20]);
    for absent in [&["initial_state"][..], &["initial_z"], &["g", "initial_state", "initial_z"]] {
        for normalize in [false, true] {
            agrees(&device, &Options { normalize, ..Default::default() }, &without(&all, absent));
        }
        agrees(&device, &Options { scale: Some(0.0), ..Default::default() }, &without(&all, absent));
    }
}

/// Strong decays and growth; and decays that end a state at once.
#[test]
fn any_decay_is_taken() {
    let Some(device) = gpu() else { return };
    let options = Options { return_state: true, ..Default::default() };
    let all = without(&inputs([1, 100, 1, 2, 8, 12]), &["initial_z"]);
    for dims in [&[1, 100, 2][..], &[1, 100, 2, 8]] {
        agrees(&device, &options, &with(&all, "g", noise(7, dims, -5.0, 0.5)));
        agrees_alone::<LinearAttention>(&device, &options, &with(&all, "g", noise(7, dims, -200.0, 0.5)), 0.0);
    }
}

/// One token of many sequences.
#[test]
fn a_single_step_agrees() {
    let Some(device) = gpu() else { return };
    for sizes in [[64, 1, 4, 8, 128, 128], [3, 1, 2, 2, 64, 48]] {
        for inputs in [inputs(sizes), by_key(sizes)] {
            let options = Options { return_state: true, return_z: true, normalize: true, ..Default::default() };
            agrees_alone::<LinearAttention>(&device, &options, &inputs, 0.0);
            agrees_alone::<LinearAttention>(&device, &Options::default(), &without(&inputs, &["initial_z"]), 0.0);
        }
    }
}
