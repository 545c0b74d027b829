//! Mamba-2's scan and its gradient on CUDA: against their f64 references, and with equal bits in repeated runs.

use crate::common::check::{backward_inputs, noise};
use crate::common::on_device::{agrees, agrees_by, both};
use crate::common::ssd::{inputs, options};
use crate::common::{gpu, with, without};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::ssd::{Options, Ssd, SsdBackward};
use sidewinder_kernels::ops::scan::step_size::ClampGrad;
use sidewinder_kernels::tensor::Owned;

fn both_agree(device: &Device, options: &Options, inputs: &Named<Owned>) {
    both::<Ssd, SsdBackward>(device, (options, options), inputs, 0.0);
}

/// Calls that use tensor cores for 16-bit storage, where factors of products are rounded once more. Whole and partial
/// chunks, one segment and several. Each size is a test of its own, for all of them compile their kernels.
macro_rules! heads_of_64_rows_agree {
    ($($steps:ident: $sizes:expr;)*) => {
        mod heads_of_64_rows_agree {
            $(#[test]
            fn $steps() {
                super::multiples_of_64_rows($sizes);
            })*
        }
    };
}

heads_of_64_rows_agree! {
    in_one_step: [3, 1, 8, 64, 2, 16];
    in_63_steps: [2, 63, 3, 64, 1, 32];
    in_64_steps: [1, 64, 4, 64, 2, 64];
    in_65_steps: [3, 65, 4, 64, 2, 128];
    in_70_steps: [12, 70, 8, 64, 1, 48];
    in_130_steps: [1, 130, 6, 64, 3, 112];
    in_1000_steps: [3, 1000, 6, 64, 3, 32];
    in_1100_steps: [1, 1100, 4, 64, 1, 128];
}

/// Wider heads run as several heads of 64 rows.
#[test]
fn wider_heads_agree() {
    for sizes in [[2, 65, 4, 128, 2, 32], [1, 130, 3, 192, 1, 128], [1, 700, 2, 128, 1, 64]] {
        multiples_of_64_rows(sizes);
    }
}

fn multiples_of_64_rows(sizes: [usize; 6]) {
    let Some(device) = gpu() else { return };
    let all = inputs(sizes);
    on_tensor_cores(&device, &options(), &all);
    let bare = without(&all, &["D", "z", "dt_bias", "initial_state"]);
    on_tensor_cores(&device, &Options { return_state: false, ..options() }, &bare);
    let clamped = Options { dt_clamp: Some((0.3, 0.8)), return_state: false, ..options() };
    let wide = with(&all, "D", noise(6, &[sizes[2], sizes[3]], -1.0, 1.0));
    on_tensor_cores(&device, &clamped, &wide);
}

/// Each optional input, and each way from `dt` to the step size.
#[test]
fn heads_of_64_rows_agree_without_what_is_optional() {
    let Some(device) = gpu() else { return };
    let all = inputs([2, 100, 4, 64, 2, 48]);
    for absent in ["D", "z", "dt_bias", "initial_state"] {
        on_tensor_cores(&device, &options(), &without(&all, &[absent]));
    }
    for clamp_grad in [ClampGrad::Mask, ClampGrad::StraightThrough] {
        on_tensor_cores(&device, &Options { dt_clamp: Some((0.3, 0.8)), clamp_grad, ..options() }, &all);
    }
    let positive = with(&all, "dt", noise(2, &[2, 100, 4], 0.5, 1.0));
    on_tensor_cores(&device, &Options { dt_clamp: Some((0.2, 0.9)), ..Options::default() }, &positive);
}

/// Almost nothing goes from a step to the next one, and the gradient of `A` is as small as that. That of the initial
/// state would be too small a factor for f16.
#[test]
fn heads_of_64_rows_agree_where_states_decay_at_once() {
    let Some(device) = gpu() else { return };
    let steady = with(&inputs([2, 100, 4, 64, 2, 48]), "dt", noise(2, &[2, 100, 4], 0.3, 0.6));
    let fast = with(&steady, "A", noise(3, &[4], -50.0, -40.0));
    on_tensor_cores(&device, &options(), &without(&fast, &["dt_bias", "initial_state"]));
}

/// Gradients are sums of products of factors that were sums themselves. Those that sum over all steps have terms of both
/// signs, and may be much smaller than these.
fn on_tensor_cores(device: &Device, options: &Options, inputs: &Named<Owned>) {
    agrees::<Ssd>(device, options, inputs, 1.0);
    let given = backward_inputs::<Ssd, SsdBackward>(options, inputs);
    let roundings = |name: &str| if ["dA", "ddt_bias"].contains(&name) { 6.0 } else { 2.0 };
    agrees_by::<SsdBackward>(device, options, &given, roundings);
}

#[test]
fn all_sizes_agree() {
    let Some(device) = gpu() else { return };
    for sizes in [
        [1, 1, 1, 1, 1, 1],
        [2, 5, 2, 3, 1, 16],
        [1, 63, 4, 5, 2, 17],
        [2, 64, 3, 8, 3, 33],
        [1, 65, 2, 16, 1, 64],
        [1, 1000, 3, 4, 1, 12],
        [1, 200, 4, 65, 2, 128],
        [1, 70, 2, 129, 1, 16],
        [3, 70, 2, 32, 1, 256],
        [0, 3, 2, 2, 1, 3],
        [2, 0, 2, 2, 1, 3],
        [2, 3, 0, 2, 1, 3],
        [2, 3, 2, 0, 1, 3],
        [2, 3, 2, 2, 1, 0],
    ] {
        both_agree(&device, &options(), &inputs(sizes));
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let Some(device) = gpu() else { return };
    let all = inputs([2, 9, 4, 6, 2, 20]);
    for absent in [&["D"][..], &["z"], &["dt_bias"], &["initial_state"], &["D", "z", "dt_bias", "initial_state"]] {
        both_agree(&device, &options(), &without(&all, absent));
        both_agree(&device, &Options::default(), &without(&all, absent));
    }
    both_agree(&device, &options(), &with(&all, "D", noise(6, &[4, 6], -1.0, 1.0)));
    for clamp_grad in [ClampGrad::Mask, ClampGrad::StraightThrough] {
        both_agree(&device, &Options { dt_clamp: Some((0.3, 0.8)), clamp_grad, ..options() }, &all);
    }
}
