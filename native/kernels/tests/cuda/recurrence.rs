//! The recurrence of the MM-Rec block on CUDA: against its f64 reference, with clusters and with the grid, and launches
//! whose blocks do not fit. Without a GPU each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::backward_inputs;
use crate::common::gpu;
use crate::common::on_device::{both, off};
use crate::common::recurrences::{guarded, inputs, options};
use sidewinder_kernels::cuda::{Buffer, Declared, Source, Together};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{Named, Op};
use sidewinder_kernels::ops::mm_rec::block_recurrence::{BlockRecurrence, BlockRecurrenceBackward, Options};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn agrees(options: &Options, inputs: &Named<Owned>) {
    let Some(device) = gpu() else { return };
    both::<BlockRecurrence, BlockRecurrenceBackward>(&device, (options, options), inputs, 2.0);
}

/// One block, clusters of all sizes, and more sequences than clusters.
#[test]
fn small_widths_agree() {
    let sizes = [[1, 1, 1], [2, 3, 5], [3, 9, 31], [2, 7, 32], [1, 5, 33], [5, 6, 67], [2, 9, 130], [40, 3, 3]];
    for size in sizes.into_iter().chain([[0, 3, 4], [2, 0, 5], [2, 3, 0]]) {
        for (mixed, initial) in [(true, true), (true, false), (false, true)] {
            agrees(&options(mixed), &inputs(size, mixed, initial));
        }
    }
}

#[test]
fn widths_of_large_clusters_agree() {
    for size in [[1, 5, 257], [9, 4, 300], [130, 3, 260], [2, 6, 512]] {
        agrees(&options(true), &inputs(size, true, true));
        agrees(&options(false), &inputs(size, false, false));
    }
}

/// Matrices that do not fit in a cluster, and one that does not fit on all multiprocessors together.
#[test]
fn widths_of_the_whole_grid_agree() {
    for (size, mixed) in [([2, 4, 700], true), ([11, 3, 530], false), ([3, 3, 1026], true)] {
        agrees(&options(mixed), &inputs(size, mixed, true));
    }
}

#[test]
fn widths_beyond_the_multiprocessors_agree() {
    let Some(device) = gpu() else { return };
    let (options, inputs) = (options(true), inputs([2, 2, 4099], true, true));
    let expected = common::reference::<BlockRecurrence>(&options, &inputs);
    let got = common::run_cuda::<BlockRecurrence>(&options, &inputs, &device).unwrap();
    compare(&got, &expected, 1.0);
    let backward = backward_inputs::<BlockRecurrence, BlockRecurrenceBackward>(&options, &inputs);
    let expected = common::reference::<BlockRecurrenceBackward>(&options, &backward);
    let got = common::run_cuda::<BlockRecurrenceBackward>(&options, &backward, &device).unwrap();
    compare(&got, &expected, 1.0);
}

fn compare(got: &Named<Owned>, expected: &Named<Owned>, allowed: f64) {
    for (name, expected) in expected.iter() {
        let off = off(got.get(name).unwrap(), expected, DType::F32, 0.0);
        assert!(off <= allowed, "{name} is off by {off} times the tolerance");
    }
}

#[test]
fn guards_agree() {
    for size in [[2, 3, 5], [3, 11, 67], [2, 4, 300], [2, 3, 600]] {
        for state_norm in [false, true] {
            agrees(&guarded(state_norm), &inputs(size, true, true));
            let norm = Options { mix: None, state_clip: None, state_norm };
            agrees(&norm, &inputs(size, false, true));
        }
    }
}

/// Long enough for blocks to pass barriers at all distances from each other, with equal bits in repeated runs.
#[test]
fn long_walks_agree_and_repeat() {
    let Some(device) = gpu() else { return };
    for size in [[3, 3000, 40], [9, 1500, 300], [3, 400, 1100]] {
        let (options, inputs) = (options(true), inputs(size, true, true));
        let backward = backward_inputs::<BlockRecurrence, BlockRecurrenceBackward>(&options, &inputs);
        repeats::<BlockRecurrence>(&device, &options, &inputs);
        repeats::<BlockRecurrenceBackward>(&device, &options, &backward);
        if size[2] < 300 {
            let got = common::run_cuda::<BlockRecurrence>(&options, &inputs, &device).unwrap();
            compare(&got, &common::reference::<BlockRecurrence>(&options, &inputs), 1.0);
            let got = common::run_cuda::<BlockRecurrenceBackward>(&options, &backward, &device).unwrap();
            // Gradients of weights are sums over all times.
            compare(&got, &common::reference::<BlockRecurrenceBackward>(&options, &backward), 4.0);
        }
    }
}

fn repeats<O: Op>(device: &sidewinder_kernels::cuda::Device, options: &O::Options, inputs: &Named<Owned>) {
    let first = common::bits(&common::run_cuda::<O>(options, inputs, device).unwrap());
    for _ in 0..3 {
        assert_eq!(common::bits(&common::run_cuda::<O>(options, inputs, device).unwrap()), first, "{}", O::NAME);
    }
}

/// With a cluster, with the grid, and both with the norm: small enough for tools that check every memory access.
#[test]
fn one_small_walk_of_each_kind_repeats() {
    let Some(device) = gpu() else { return };
    for (size, options) in [
        ([2, 3, 67], options(true)),
        ([2, 3, 67], guarded(true)),
        ([2, 2, 530], options(true)),
        ([1, 2, 530], guarded(true)),
    ] {
        let inputs = inputs(size, true, true);
        repeats::<BlockRecurrence>(&device, &options, &inputs);
        let backward = backward_inputs::<BlockRecurrence, BlockRecurrenceBackward>(&options, &inputs);
        repeats::<BlockRecurrenceBackward>(&device, &options, &backward);
    }
}

/// Walks of several threads at once, each of which needs the whole device.
#[test]
fn walks_at_the_same_time_end() {
    let Some(device) = gpu() else { return };
    let (options, inputs) = (options(true), inputs([2, 50, 1100], true, true));
    let expected = common::bits(&common::run_cuda::<BlockRecurrence>(&options, &inputs, &device).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let got = common::run_cuda::<BlockRecurrence>(&options, &inputs, &device).unwrap();
                    assert_eq!(common::bits(&got), expected);
                }
            });
        }
    });
}

/// The parameters: the address of a word.
#[repr(C)]
#[derive(Clone, Copy)]
struct Waiting(u64);

// SAFETY: both declarations are a single address.
unsafe impl Declared for Waiting {
    type Any = Waiting;
    const TEXT: &'static str = "struct Waiting { unsigned* arrived; };";
}

const WAITING: Source<Waiting> = Source::new(
    "all_wait",
    "extern \"C\" __global__ void all_wait(Waiting p) {
        if (threadIdx.x) return;
        atomicAdd(p.arrived, 1);
        while (atomicAdd(p.arrived, 0) < gridDim.x) {}
    }",
);

/// Blocks that wait for each other and are not all resident would wait forever, so such a launch is refused.
#[test]
fn no_launch_hangs_where_the_grid_does_not_fit() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    let kernel = device.kernel(&WAITING, "").unwrap();
    let arrived = Buffer::new(&device, Spec::new(DType::F32, &[1]).unwrap()).unwrap();
    let shared = device.facts().shared / 2 + 1024;
    let launch = |blocks: u32| {
        lane.fill(&arrived, 0)?;
        let params = Waiting(lane.address(&arrived)?);
        // SAFETY: the buffer holds a word.
        unsafe { lane.launch_together(&kernel, Together::Grid, blocks, [32, shared], &params) }?;
        lane.synchronize()
    };
    let fits = device.facts().multiprocessors;
    launch(fits).unwrap();
    assert_eq!(launch(fits + 1).unwrap_err().kind, Kind::Cuda);
    launch(fits).unwrap();
    device.check().unwrap();
}
