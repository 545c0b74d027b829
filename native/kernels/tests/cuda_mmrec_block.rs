//! Memory decay integration and the block of MM-Rec on CUDA: against their f64 references, and the same bits each
//! time. Without a GPU each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

mod common;

use common::gpu;
use common::on_device::{both, named};
use sidewinder_kernels::mdi::gamma::{MdiGamma, MdiGammaBackward};
use sidewinder_kernels::mdi::update::{MdiUpdate, MdiUpdateBackward, Options};
use sidewinder_kernels::mdi::{Mdi, MdiBackward};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::tensor::Owned;

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
            let inputs = common::check::known::<MdiGamma>(&inputs);
            both::<MdiGamma, MdiGammaBackward>(&device, NONE, &inputs, 8.0);
        }
    }
}
