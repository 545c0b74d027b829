//! Memory decay integration and the MM-Rec block on CUDA: against their f64 references, and with equal bits in repeated
//! runs. Without a GPU each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::blocks::{inputs, sizes};
use crate::common::check::backward_inputs;
use crate::common::gpu;
use crate::common::on_device::{both, named};
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops::mm_rec::mdi::gamma::{MdiGamma, MdiGammaBackward};
use sidewinder_kernels::ops::mm_rec::mdi::update::{MdiUpdate, MdiUpdateBackward, Options};
use sidewinder_kernels::ops::mm_rec::mdi::{Mdi, MdiBackward};
use sidewinder_kernels::ops::mm_rec::mmrec_block::{self, MmrecBlock, MmrecBlockBackward};
use sidewinder_kernels::ops::norm::EpsMode;
use sidewinder_kernels::tensor::{DType, Owned};

const NONE: (&Options, &Options) = (&Options {}, &Options {});

fn step([rows, width, inner]: [usize; 3], context: bool) -> Named<Owned> {
    let x: &[usize] = &[rows, width];
    let of = |inputs: usize| 1.0 / (inputs.max(1) as f64).sqrt();
    let (wide, narrow) = (of(width), of(inner));
    let inputs = named([
        ("z", x, -1.0, 1.0),
        ("h_prev", x, -1.0, 1.0),
        ("wm", &[width, 2 * width], -wide, wide),
        ("bm", &[width], -1.0, 1.0),
        ("wg1", &[inner, width], -wide, wide),
        ("bg1", &[inner], -1.0, 1.0),
        ("wg2", &[width, inner], -narrow, narrow),
        ("bg2", &[width], -1.0, 1.0),
        ("context", x, -1.0, 1.0),
        ("wc1", &[inner, width], -wide, wide),
        ("bc1", &[inner], -1.0, 1.0),
        ("wc2", &[width, inner], -narrow, narrow),
        ("bc2", &[width], -1.0, 1.0),
    ]);
    inputs
        .into_iter()
        .filter(|(name, _)| context || !["context", "wc1", "bc1", "wc2", "bc2"].contains(&&**name))
        .collect()
}

#[test]
fn decay_integration_and_its_gradients_agree() {
    let Some(device) = gpu() else { return };
    for dims in [&[][..], &[1], &[7], &[1003], &[3, 5, 17], &[0, 4], &[300_001]] {
        let inputs = named([
            ("z", dims, -1.0, 1.0),
            ("h_old", dims, -1.0, 1.0),
            ("gate", dims, 0.0, 1.0),
            ("gamma", dims, 0.0, 1.0),
        ]);
        both::<MdiUpdate, MdiUpdateBackward>(&device, NONE, &inputs, 0.0);
    }
    for sizes in [[1, 1, 1], [2, 3, 1], [7, 17, 4], [37, 64, 16], [300, 96, 24], [0, 4, 2]] {
        for context in [false, true] {
            let inputs = step(sizes, context);
            both::<Mdi, MdiBackward>(&device, NONE, &inputs, 8.0);
            let inputs = common::check::known(op::about::<MdiGamma>(), &inputs);
            both::<MdiGamma, MdiGammaBackward>(&device, NONE, &inputs, 8.0);
        }
    }
}

#[test]
fn the_block_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    let of = |heads| mmrec_block::Options { heads, ..Default::default() };
    for (sizes, options) in [
        (sizes([1, 1, 1], [1, 1], [1, 1]), of(1)),
        (sizes([3, 17, 20], [5, 31], [1, 37]), of(5)),
        (sizes([2, 33, 64], [16, 256], [2, 64]), of(4)),
        (
            sizes([2, 7, 12], [3, 19], [2, 10]),
            mmrec_block::Options {
                levels: 2,
                ratio: 3,
                cursor: 4,
                state_clip: Some(0.7),
                norm: EpsMode::Inside,
                ..of(3)
            },
        ),
        (sizes([1, 9, 8], [2, 32], [1, 5]), mmrec_block::Options { levels: 1, state_norm: true, ..of(2) }),
        (sizes([0, 3, 4], [1, 5], [1, 6]), of(2)),
        (sizes([2, 0, 4], [1, 5], [2, 6]), of(2)),
    ] {
        for initial_state in [false, true] {
            both::<MmrecBlock, MmrecBlockBackward>(&device, (&options, &options), &inputs(sizes, initial_state), 24.0);
        }
    }
}

/// The gradient has equal bits whether a tensor is given to it or recomputed.
#[test]
fn what_the_block_keeps_changes_no_bit() {
    let Some(device) = gpu() else { return };
    let keeping = mmrec_block::Options { heads: 3, checkpoint: false, ..Default::default() };
    for dtype in DType::FLOATS {
        let inputs =
            common::cast(op::about::<MmrecBlock>(), &inputs(sizes([2, 37, 12], [3, 29], [1, 21]), true), dtype);
        let kept = common::run_cuda::<MmrecBlock>(&keeping, &inputs, &device).unwrap();
        let mut backward = backward_inputs::<MmrecBlock, MmrecBlockBackward>(&keeping, &inputs);
        let names = ["h", "gamma", "context", "q", "k", "v", "z", "hidden"];
        names.into_iter().for_each(|name| drop(backward.take(name)));
        let expected = common::run_cuda::<MmrecBlockBackward>(&keeping, &backward, &device).unwrap();
        names.into_iter().for_each(|name| backward.push(name, kept.get(name).unwrap().clone()));
        let got = common::run_cuda::<MmrecBlockBackward>(&keeping, &backward, &device).unwrap();
        assert_eq!(common::bits(&got), common::bits(&expected), "{dtype}");
    }
}
