//! Cumulative products, sums and log-sums on CUDA: against their f64 references, in pieces, and with equal bits in
//! repeated runs. Without a GPU each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::backward_inputs;
use crate::common::cumulative::{SIZES, column, inputs};
use crate::common::{cast, gpu, part, reference, worst};
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::scan::cumulative::{
    CumSum, CumSumBackward, CumprodScan, CumprodScanBackward, ExpProductOptions, ExpProductScan,
    ExpProductScanBackward, LogCumSumExp, LogCumSumExpBackward, Options, ReverseCumSum, ReverseCumSumBackward,
    SumOptions,
};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

const SUM: SumOptions = SumOptions { return_state: true };

fn plain(reverse: bool) -> Options {
    Options { reverse, return_state: true }
}

fn exp_product(reverse: bool) -> ExpProductOptions {
    ExpProductOptions { reverse, return_state: true, eps: 0.03, ..Default::default() }
}

/// Runs `O` on the device in these types, compares it with the reference, and runs it twice for equal bits.
fn agrees<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>, types: &[DType]) {
    for &dtype in types {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = reference::<O>(options, &inputs);
        let got = common::run_cuda::<O>(options, &inputs, device).unwrap();
        let again = common::run_cuda::<O>(options, &inputs, device).unwrap();
        assert_eq!(common::bits(&got), common::bits(&again), "{} {dtype}", O::NAME);
        for (name, expected) in expected.iter() {
            let (got, largest) = (got.get(name).unwrap(), expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs())));
            let (relative, of_largest) = match (got.spec().dtype, dtype) {
                (DType::F64, _) => (1e-10, 1e-11),
                (DType::F32, _) => (2e-5, 1e-5),
                (_, DType::Bf16) => (4e-3, 1e-5),
                (_, _) => (5e-4, 1e-5),
            };
            let off = worst(got, expected, relative, of_largest * largest);
            let specs = op::specs(&inputs);
            assert!(off <= 1.0, "{} {name} is off by {off} times the tolerance: {dtype} {specs:?}", O::NAME);
        }
    }
}

fn both<F: Op, B: Op<Options = F::Options>>(device: &Device, options: &F::Options, inputs: &Named<Owned>) {
    agrees::<F>(device, options, inputs, &DType::FLOATS);
    agrees::<B>(device, options, &backward_inputs::<F, B>(options, inputs), &DType::FLOATS);
}

/// In addition to the sizes of the CPU: clusters with vectors of four channels, in more than one block side by side;
/// many rounds of clusters, with single channels and with vectors of four; and enough rows for a block each, without
/// and with rounds.
const TILES: [[usize; 4]; 7] = [
    [2, 3, 300, 64],
    [1, 2, 129, 132],
    [1, 1, 500, 260],
    [1, 1, 5000, 36],
    [1, 2, 4400, 37],
    [16, 17, 33, 5],
    [16, 17, 140, 36],
];

fn sizes() -> impl Iterator<Item = [usize; 4]> {
    SIZES.into_iter().chain(TILES)
}

#[test]
fn the_product_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for sizes in sizes() {
        let few = inputs("gamma", sizes, (-1.3, 1.4), 0.0, None);
        both::<CumprodScan, CumprodScanBackward>(&device, &plain(false), &few);
        let near_1 = inputs("gamma", sizes, (0.99, 1.0), 1.0, Some(2.0));
        both::<CumprodScan, CumprodScanBackward>(&device, &plain(true), &near_1);
    }
}

#[test]
fn the_product_by_logarithms_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for sizes in sizes() {
        let below = inputs("gamma", sizes, (-0.02, 1.1), 1.0, None);
        both::<ExpProductScan, ExpProductScanBackward>(&device, &exp_product(true), &below);
        let near_1 = inputs("gamma", sizes, (0.99, 1.0), 1.0, Some(2.0));
        both::<ExpProductScan, ExpProductScanBackward>(&device, &exp_product(false), &near_1);
    }
}

#[test]
fn the_log_sum_exp_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for sizes in sizes() {
        for (reverse, start) in [(false, None), (true, Some(3.0))] {
            let inputs = inputs("x", sizes, (-9.0, 9.0), f64::NEG_INFINITY, start);
            both::<LogCumSumExp, LogCumSumExpBackward>(&device, &plain(reverse), &inputs);
        }
    }
}

#[test]
fn the_sums_and_their_gradients_agree() {
    let Some(device) = gpu() else { return };
    for sizes in sizes() {
        both::<CumSum, CumSumBackward>(&device, &SUM, &inputs("x", sizes, (-0.5, 1.0), 0.0, None));
        let inputs = inputs("x", sizes, (-0.5, 1.0), 0.0, Some(2.0));
        both::<ReverseCumSum, ReverseCumSumBackward>(&device, &SUM, &inputs);
    }
}

/// 131072 steps of 3 channels are dozens of rounds of a cluster.
#[test]
fn long_scans_agree() {
    let Some(device) = gpu() else { return };
    let sizes = [1, 1, 131072, 3];
    let f32 = &[DType::F32];
    let gamma = inputs("gamma", sizes, (0.99995, 1.0), 1.0, None);
    agrees::<CumprodScan>(&device, &plain(false), &gamma, f32);
    agrees::<ExpProductScan>(&device, &exp_product(true), &gamma, f32);
    let x = inputs("x", sizes, (0.0, 1.0), 0.1, None);
    agrees::<LogCumSumExp>(&device, &plain(false), &x, f32);
    agrees::<CumSum>(&device, &SUM, &x, f32);
    let backward = backward_inputs::<CumprodScan, CumprodScanBackward>(&plain(false), &gamma);
    let got = common::run_cuda::<CumprodScanBackward>(&plain(false), &backward, &device).unwrap();
    for (name, expected) in reference::<CumprodScanBackward>(&plain(false), &backward).iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let off = worst(got.get(name).unwrap(), expected, 2e-5, 2e-5 * largest);
        assert!(off <= 1.0, "{name} is off by {off} times the tolerance");
    }
}

/// A sequence at once, and in two calls of which the second starts from the state of the first.
#[test]
fn two_pieces_make_the_whole() {
    let Some(device) = gpu() else { return };
    let gamma = inputs("gamma", [2, 2, 700, 40], (0.9, 1.0), 0.97, Some(1.0));
    let whole = common::run_cuda::<CumprodScan>(&plain(false), &gamma, &device).unwrap();
    let mut state = gamma.get("initial_state").unwrap().clone();
    for range in [0..333, 333..700] {
        let x = part(gamma.get("gamma").unwrap(), 2, range.clone());
        let piece = [("gamma", x), ("initial_state", state)].into_iter().collect();
        let mut got = common::run_cuda::<CumprodScan>(&plain(false), &piece, &device).unwrap();
        state = got.take("last_state").unwrap();
        let expected = [("y", part(whole.get("y").unwrap(), 2, range))].into_iter().collect();
        common::assert_close(&got, &expected, "a piece");
    }
}

#[test]
fn products_of_tiles_do_not_overflow() {
    let Some(device) = gpu() else { return };
    let (length, width) = (1100, 64);
    for up in [false, true] {
        let power = |v: f64| if up { 1.0 / v } else { v };
        let value = |i: usize| match i / width {
            0..100 => power(0.25),
            100..150 => power(8.0),
            200 if i.is_multiple_of(width) => 0.0,
            150..300 => 1.0,
            300..400 => power(0.5),
            400..700 => power(1.5),
            _ => power(0.9375),
        };
        let gamma = Owned::from_fn(Spec::new(DType::F32, &[1, 1, length, width]).unwrap(), value);
        let initial_state = Owned::from_fn(Spec::new(DType::F32, &[1, 1, width]).unwrap(), |_| power(2f64.powi(100)));
        let inputs = [("gamma", gamma), ("initial_state", initial_state)].into_iter().collect();
        let truth = reference::<CumprodScan>(&plain(false), &inputs);
        let got = common::run_cuda::<CumprodScan>(&plain(false), &inputs, &device).unwrap();
        let off = worst(got.get("y").unwrap(), truth.get("y").unwrap(), 3e-5, 0.0);
        assert!(off <= 1.0, "off by {off} times the tolerance");
    }
}

#[test]
fn infinities_and_nan_go_where_they_belong() {
    let Some(device) = gpu() else { return };
    let (inf, nan, huge) = (f64::INFINITY, f64::NAN, 3e38);
    let all: &[(&[f64], &[f64])] = &[
        (&[-inf, -inf, 1.0, -inf], &[-inf, -inf, 1.0, 1.0]),
        (&[0.0, inf, 1.0, -inf], &[0.0, inf, inf, inf]),
        (&[huge, -huge, huge, huge], &[huge, huge, huge, huge]),
        (&[0.0, nan, 1.0, -inf], &[0.0, nan, nan, nan]),
    ];
    for (x, expected) in all {
        let spec = Spec::new(DType::F32, &[1, 1, 4, 1]).unwrap();
        let inputs = [("x", column(spec, x))].into_iter().collect();
        let got = common::run_cuda::<LogCumSumExp>(&plain(false), &inputs, &device).unwrap();
        let off = worst(got.get("y").unwrap(), &column(spec, expected), 1e-6, 0.0);
        assert!(off <= 1.0, "{x:?}: {:?}", got.get("y").unwrap().view().to_f64());
        let dy = column(spec, &[1.0; 4]);
        let given = inputs.into_iter().chain([("dy".into(), dy)]).collect();
        let got = common::run_cuda::<LogCumSumExpBackward>(&plain(false), &given, &device).unwrap();
        let dx = got.get("dx").unwrap().view().to_f64();
        let right = |(dx, x): (&f64, &f64)| *x != -inf || *dx == 0.0;
        assert!(x.iter().any(|x| x.is_nan()) || dx.iter().zip(*x).all(right), "{x:?}: {dx:?}");
    }
    let gamma: &[f64] = &[0.5, nan, 0.5, 0.25];
    let inputs = [("gamma", column(Spec::new(DType::F32, &[1, 1, 4, 1]).unwrap(), gamma))].into_iter().collect();
    let got = common::run_cuda::<ExpProductScan>(&exp_product(false), &inputs, &device).unwrap();
    let y = got.get("y").unwrap().view().to_f64();
    assert_eq!(y.iter().map(|y| y.is_nan()).collect::<Vec<_>>(), [false, true, true, true]);
}

/// Many launches in sequence on several lanes: clusters that wait must not block each other.
#[test]
fn many_launches_at_once_give_the_same_bits() {
    let Some(device) = gpu() else { return };
    let inputs = inputs("gamma", [2, 4, 3000, 64], (0.99, 1.0), 1.0, None);
    let expected = common::bits(&common::run_cuda::<CumprodScan>(&plain(false), &inputs, &device).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let lane = device.lane().unwrap();
                let call = ops::call::<CumprodScan>(op::specs(&inputs), &plain(false)).unwrap();
                let given = common::uploaded(&lane, &inputs).unwrap();
                let results = call.outputs().try_map(|&spec| Buffer::new(&device, spec)).unwrap();
                for _ in 0..50 {
                    results.iter().for_each(|(_, buffer)| lane.poison(buffer).unwrap());
                    call.cuda(&given.as_ref(), &results.as_ref(), &lane).unwrap();
                }
                let got: Vec<_> = results.iter().map(|(_, buffer)| lane.downloaded(buffer).unwrap()).collect();
                let got: Vec<_> = got.iter().map(|tensor| tensor.view().bytes().to_vec()).collect();
                assert_eq!(got, expected);
            });
        }
    });
}
