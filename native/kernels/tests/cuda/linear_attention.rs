//! Linear attention and its gradient on CUDA: against their f64 references, and the same bits each time.

use crate::common::check::{backward_inputs, noise};
use crate::common::linear_attention::{by_key, calls, inputs};
use crate::common::on_device::{agrees as agrees_alone, agrees_by};
use crate::common::{gpu, with, without};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::linear_attention::{LinearAttention, LinearAttentionBackward, Options};
use sidewinder_kernels::tensor::{Described, Owned};

/// Results in chunks are sums of products of factors that were sums themselves. There `dg` sums over states, with terms
/// of both signs that are larger than what remains.
fn agrees(device: &Device, options: &Options, inputs: &Named<Owned>) {
    let roundings = if in_chunks(options, inputs) { 2.0 } else { 0.0 };
    agrees_alone::<LinearAttention>(device, options, inputs, roundings);
    let given = backward_inputs::<LinearAttention, LinearAttentionBackward>(options, inputs);
    let of = |name: &str| if name == "dg" { 4.0 * roundings } else { roundings };
    agrees_by::<LinearAttentionBackward>(device, options, &given, of);
}

/// Whether sequences in 16-bit types run in chunks on tensor cores.
fn in_chunks(options: &Options, inputs: &Named<Owned>) -> bool {
    let [q, v] = ["q", "v"].map(|name| inputs.get(name).unwrap().spec().shape);
    let whole = |size: usize| size > 0 && size.is_multiple_of(8);
    let of_z = options.normalize || options.return_z || inputs.find("initial_z").is_some();
    !of_z && q[1] >= 16 && whole(q[3]) && q[3] <= 128 && whole(v[3])
}

fn sizes_agree(sizes: [usize; 6]) {
    let Some(device) = gpu() else { return };
    for (options, inputs) in calls(sizes) {
        agrees(&device, &options, &inputs);
    }
}

// Lanes with one, two and four columns, rows over 8, 16 and 32 lanes, whole and broken chunks, several blocks and slices.
test_each! { sizes_agree, super::sizes_agree:
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

// Whole and broken chunks, padded keys and columns, several blocks of columns; heads with their own q and k, and shared.
test_each! { chunks_agree, super::chunks_agree:
    of_16_steps: [1, 16, 1, 1, 64, 64];
    of_63_steps: [2, 63, 2, 4, 128, 128];
    of_64_steps: [1, 64, 2, 2, 128, 32];
    of_65_steps: [2, 65, 1, 2, 64, 40];
    of_129_steps: [1, 129, 3, 3, 24, 200];
    of_many_sequences: [40, 67, 3, 3, 40, 128];
    of_1000_steps: [1, 1000, 1, 2, 128, 128];
}

/// Decays as in other tests, none, and such as end a state at once.
fn chunks_agree(sizes: [usize; 6]) {
    let Some(device) = gpu() else { return };
    let options = Options { return_state: true, ..Default::default() };
    let [all, each_key] = [inputs(sizes), by_key(sizes)].map(|all| without(&all, &["initial_z"]));
    let gates = |low| with(&all, "g", noise(7, &[sizes[0], sizes[1], sizes[3]], low, 0.2));
    let key_gates = |low| with(&all, "g", noise(7, &[sizes[0], sizes[1], sizes[3], sizes[4]], low, 0.2));
    for inputs in [&all, &without(&all, &["g", "initial_state"]), &gates(-5.0), &each_key, &key_gates(-5.0)] {
        assert!(in_chunks(&options, inputs));
        agrees(&device, &options, inputs);
    }
    for inputs in [gates(-200.0), key_gates(-200.0)] {
        agrees_alone::<LinearAttention>(&device, &options, &inputs, 2.0);
    }
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
