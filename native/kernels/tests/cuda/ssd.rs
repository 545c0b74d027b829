//! The scan of Mamba-2 and its gradient on CUDA: against their f64 references, and the same bits each time.

use crate::common::check::noise;
use crate::common::on_device::both;
use crate::common::ssd::{inputs, options};
use crate::common::{gpu, with, without};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::ssd::{Options, Ssd, SsdBackward};
use sidewinder_kernels::ops::scan::step_size::ClampGrad;
use sidewinder_kernels::tensor::Owned;

fn agrees(device: &Device, options: &Options, inputs: &Named<Owned>) {
    both::<Ssd, SsdBackward>(device, (options, options), inputs, 0.0);
}

/// Calls that run on tensor cores where they are stored in 16 bits: factors of products are rounded once more. Whole and
/// broken chunks, one segment and several.
#[test]
fn heads_of_64_rows_agree() {
    let Some(device) = gpu() else { return };
    for sizes in [
        [1, 1, 1, 64, 1, 16],
        [2, 63, 3, 64, 1, 32],
        [1, 64, 4, 64, 2, 64],
        [3, 65, 2, 64, 2, 128],
        [1, 200, 6, 64, 3, 112],
        [1, 1100, 2, 64, 1, 32],
        [12, 70, 8, 64, 1, 48],
    ] {
        let all = inputs(sizes);
        both::<Ssd, SsdBackward>(&device, (&options(), &options()), &all, 1.0);
        let bare = without(&all, &["D", "z", "dt_bias", "initial_state"]);
        both::<Ssd, SsdBackward>(&device, (&options(), &options()), &bare, 1.0);
        let clamped = Options { dt_clamp: Some((0.3, 0.8)), return_state: false, ..options() };
        let wide = with(&all, "D", noise(6, &[sizes[2], 64], -1.0, 1.0));
        both::<Ssd, SsdBackward>(&device, (&clamped, &clamped), &wide, 1.0);
    }
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
        [3, 70, 2, 32, 1, 256],
        [0, 3, 2, 2, 1, 3],
        [2, 0, 2, 2, 1, 3],
        [2, 3, 0, 2, 1, 3],
        [2, 3, 2, 0, 1, 3],
        [2, 3, 2, 2, 1, 0],
    ] {
        agrees(&device, &options(), &inputs(sizes));
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let Some(device) = gpu() else { return };
    let all = inputs([2, 9, 4, 6, 2, 20]);
    for absent in [&["D"][..], &["z"], &["dt_bias"], &["initial_state"], &["D", "z", "dt_bias", "initial_state"]] {
        agrees(&device, &options(), &without(&all, absent));
        agrees(&device, &Options::default(), &without(&all, absent));
    }
    agrees(&device, &options(), &with(&all, "D", noise(6, &[4, 6], -1.0, 1.0)));
    for clamp_grad in [ClampGrad::Mask, ClampGrad::StraightThrough] {
        agrees(&device, &Options { dt_clamp: Some((0.3, 0.8)), clamp_grad, ..options() }, &all);
    }
}
