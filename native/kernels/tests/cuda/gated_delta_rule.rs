//! The gated delta rule and its gradient on CUDA: against their f64 references, and the same bits each time.

use crate::common::check::{backward_inputs, noise};
use crate::common::gated_delta_rule::{inputs, options};
use crate::common::on_device::{agrees as agrees_alone, agrees_by, both};
use crate::common::{gpu, with, without};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::gated_delta_rule::{GatedDeltaRule, GatedDeltaRuleBackward, Options};
use sidewinder_kernels::tensor::Owned;

fn agrees(device: &Device, options: &Options, inputs: &Named<Owned>) {
    both::<GatedDeltaRule, GatedDeltaRuleBackward>(device, (options, options), inputs, 0.0);
}

/// Results in 16 bits are sums of products of factors that were sums themselves. `dg` sums over states, with terms of both
/// signs that are larger than what remains.
fn chunked(device: &Device, options: &Options, inputs: &Named<Owned>) {
    agrees_alone::<GatedDeltaRule>(device, options, inputs, 2.0);
    let given = backward_inputs::<GatedDeltaRule, GatedDeltaRuleBackward>(options, inputs);
    agrees_by::<GatedDeltaRuleBackward>(device, options, &given, |name| if name == "dg" { 8.0 } else { 2.0 });
}

/// Lanes with one, two and four columns, rows over 8, 16 and 32 lanes, whole and broken chunks, several blocks and slices.
#[test]
fn all_sizes_agree() {
    let Some(device) = gpu() else { return };
    for (sizes, qk_l2norm) in [
        ([1, 1, 1, 1, 1, 1], false),
        ([2, 5, 2, 2, 3, 16], true),
        ([1, 63, 2, 4, 5, 17], false),
        ([2, 64, 3, 3, 8, 33], true),
        ([1, 130, 1, 1, 33, 70], true),
        ([2, 200, 4, 8, 64, 66], false),
        ([2, 15, 4, 8, 64, 64], false),
        ([1, 15, 2, 4, 128, 128], true),
        ([9, 13, 9, 18, 128, 64], true),
        ([12, 20, 12, 12, 64, 132], false),
        ([12, 18, 12, 12, 17, 65], true),
        ([1, 40, 2, 2, 256, 256], false),
        ([6, 9, 6, 12, 200, 130], true),
        ([1, 9, 1, 2, 300, 20], false),
        ([1, 67, 1, 1, 20, 300], true),
    ] {
        agrees(&device, &Options { qk_l2norm, ..options() }, &inputs(sizes));
    }
}

/// In 16-bit types, chunks on tensor cores; decays as in other tests, none, and such as end a state at once.
fn chunks_agree(sizes: [usize; 6], qk_l2norm: bool) {
    let Some(device) = gpu() else { return };
    let (all, options) = (inputs(sizes), Options { qk_l2norm, ..options() });
    chunked(&device, &options, &all);
    chunked(&device, &options, &without(&all, &["g", "initial_state"]));
    let gates = |low| with(&all, "g", noise(7, &[sizes[0], sizes[1], sizes[3]], low, 0.2));
    chunked(&device, &options, &gates(-5.0));
    agrees_alone::<GatedDeltaRule>(&device, &options, &gates(-200.0), 2.0);
}

// Whole and broken chunks, padded keys and columns, several blocks of columns; heads with their own q and k, and shared;
// sequences in several segments.
test_each! { chunks_agree, super::chunks_agree:
    of_16_steps: [1, 16, 1, 1, 64, 64], true;
    of_63_steps: [2, 63, 2, 4, 128, 128], true;
    of_64_steps: [1, 64, 2, 2, 128, 32], false;
    of_65_steps: [2, 65, 1, 2, 64, 40], true;
    of_129_steps: [1, 129, 3, 3, 24, 200], true;
    of_many_sequences: [40, 67, 3, 3, 40, 128], true;
    of_200_steps: [2, 200, 4, 8, 64, 64], false;
    of_1000_steps: [1, 1000, 1, 2, 128, 128], true;
    of_six_segments: [1, 2600, 1, 1, 128, 128], true;
    of_segments_of_two_sequences: [2, 3137, 1, 2, 40, 72], false;
    of_segments_and_many_columns: [1, 4096, 1, 1, 64, 264], true;
    of_segments_and_few_columns: [1, 2600, 1, 1, 128, 40], true;
}

#[test]
fn sizes_of_zero_agree() {
    let Some(device) = gpu() else { return };
    for sizes in [[0, 3, 1, 2, 2, 3], [2, 0, 1, 2, 2, 3], [2, 3, 1, 0, 2, 3], [2, 3, 1, 2, 0, 3], [2, 3, 1, 2, 3, 0]] {
        agrees(&device, &options(), &inputs(sizes));
        agrees(&device, &Options { qk_l2norm: true, ..options() }, &inputs(sizes));
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let Some(device) = gpu() else { return };
    let all = inputs([2, 69, 2, 4, 6, 20]);
    for absent in [&["g"][..], &["initial_state"], &["g", "initial_state"]] {
        agrees(&device, &options(), &without(&all, absent));
        agrees(&device, &Options { scale: Some(0.0), ..Default::default() }, &without(&all, absent));
    }
}

/// Strong decays, growth, and steps that turn a key's value around; and decays that end a state at once.
#[test]
fn any_gate_and_step_size_is_taken() {
    let Some(device) = gpu() else { return };
    let options = Options { qk_l2norm: true, ..options() };
    let all = with(&inputs([1, 100, 1, 2, 8, 12]), "beta", noise(8, &[1, 100, 2], -1.0, 2.0));
    agrees(&device, &options, &with(&all, "g", noise(7, &[1, 100, 2], -5.0, 0.5)));
    let ended = with(&all, "g", noise(7, &[1, 100, 2], -200.0, 0.5));
    agrees_alone::<GatedDeltaRule>(&device, &options, &ended, 0.0);
}

/// One token of many sequences.
#[test]
fn a_single_step_agrees() {
    let Some(device) = gpu() else { return };
    for sizes in [[64, 1, 4, 8, 128, 128], [3, 1, 2, 2, 64, 48]] {
        agrees_alone::<GatedDeltaRule>(&device, &Options { qk_l2norm: true, ..options() }, &inputs(sizes), 0.0);
    }
}
