//! Ternary numbers on the first GPU: bits and errors equal to the CPU's.

use crate::common;
use crate::common::check::noise;
use crate::common::ternary::{bytes, named, product, values};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::products::ternary::dequantize::DequantizeTernary;
use sidewinder_kernels::ops::products::ternary::layouts::{ConvertTernary, Layout, OnSentinel, Options};
use sidewinder_kernels::ops::products::ternary::linear::TernaryLinear;
use sidewinder_kernels::ops::products::ternary::net::Argmax;
use sidewinder_kernels::ops::products::ternary::products::{DotTernary, F32, I8, Matmul, Ternary};
use sidewinder_kernels::ops::products::ternary::rules::{ActivationI8, QuantizeTernary};
use sidewinder_kernels::ops::products::ternary::stats::{self, StatsTernary};
use sidewinder_kernels::ops::products::ternary::sums::{ColumnSumsTernary, VerifySumsTernary};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn both<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>) -> [Named<Owned>; 2] {
    let on_cpu = common::run::<O>(options, inputs, &Exec::default()).unwrap();
    [on_cpu, common::run_cuda::<O>(options, inputs, device).unwrap()]
}

/// Checks that CPU and device give equal bits in every type.
fn same<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>) {
    for &dtype in O::STORAGE {
        let inputs = common::cast(op::about::<O>(), inputs, dtype);
        let [on_cpu, on_gpu] = both::<O>(device, options, &inputs);
        for (name, expected) in on_cpu.iter() {
            let got = on_gpu.get(name).unwrap();
            assert_eq!(got.view().bytes(), expected.view().bytes(), "{} {name} {dtype}", O::NAME);
        }
    }
}

/// Checks that device and reference agree up to the order of sums.
fn near<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>) {
    for &dtype in O::STORAGE {
        let inputs = common::cast(op::about::<O>(), inputs, dtype);
        let [on_cpu, on_gpu] = both::<O>(device, options, &inputs);
        common::assert_close(&on_gpu, &on_cpu, O::NAME);
    }
}

fn options<O: Op>(text: &str) -> O::Options {
    serde_json::from_str(text).unwrap()
}

#[test]
fn conversions() {
    let Some(device) = common::gpu() else { return };
    for (rows, n) in [(0, 5), (1, 1), (6, 7), (9, 64), (5, 1003)] {
        let planes = || ("plane0", bytes(2, &[rows, usize::div_ceil(n, 8)]));
        let given = [
            named([("values", values(1, &[rows, n]))]),
            named([planes(), ("plane1", bytes(3, &[rows, n.div_ceil(8)]))]),
            named([("packed2", bytes(4, &[rows, n.div_ceil(4)]))]),
            named([("offset_rows", bytes(5, &[rows.div_ceil(4), n]))]),
            named([("byte0", values(6, &[rows, n]).cast(DType::U8)), ("byte1", values(7, &[rows, n]).cast(DType::U8))]),
        ];
        for inputs in given {
            for layout in Layout::ALL {
                let of = |on_sentinel| Options { to: Some(layout), n: Some(n), rows: Some(rows), on_sentinel };
                same::<ConvertTernary>(&device, &of(OnSentinel::Zero), &inputs);
                let [cpu, gpu] = [
                    common::run::<ConvertTernary>(&of(OnSentinel::Error), &inputs, &Exec::default()).err(),
                    common::run_cuda::<ConvertTernary>(&of(OnSentinel::Error), &inputs, &device).err(),
                ];
                assert_eq!(cpu, gpu);
            }
            same::<StatsTernary>(&device, &stats::Options { n: Some(n), rows: Some(rows) }, &inputs);
        }
    }
}

#[test]
fn rules() {
    let Some(device) = common::gpu() else { return };
    for (rows, n) in [(1, 1), (2, 7), (5, 64), (3, 1001), (300, 130)] {
        let w = named([("w", noise(9, &[rows, n], -1.0, 1.0))]);
        for text in [r#"{}"#, r#"{"per_row":true}"#, r#"{"rule":"twn"}"#, r#"{"rule":"threshold","threshold":0.3}"#] {
            same::<QuantizeTernary>(&device, &options::<QuantizeTernary>(text), &w);
        }
    }
}

#[test]
fn dequantized() {
    let Some(device) = common::gpu() else { return };
    for (rows, n) in [(0, 5), (1, 1), (2, 7), (5, 64), (300, 1001)] {
        for scales in [1, rows] {
            let planes = |seed| bytes(seed, &[rows, usize::div_ceil(n, 8)]);
            let scale = noise(4, &[scales], 0.1, 1.0);
            let inputs = named([("plane0", planes(2)), ("plane1", planes(3)), ("scale", scale)]);
            same::<DequantizeTernary>(&device, &options::<DequantizeTernary>(&format!(r#"{{"n":{n}}}"#)), &inputs);
        }
    }
}

#[test]
fn activations() {
    let Some(device) = common::gpu() else { return };
    for (rows, n) in [(0, 5), (1, 1), (2, 7), (5, 64), (3, 1001)] {
        same::<ActivationI8>(&device, &Default::default(), &named([("x", noise(9, &[rows, n], -3.0, 3.0))]));
    }
    let spec = Spec::new(DType::F32, &[2, 300]).unwrap();
    let bad = named([("x", Owned::from_fn(spec, |at| if at == 500 { f64::NAN } else { at as f64 }))]);
    let error = common::run_cuda::<ActivationI8>(&Default::default(), &bad, &device).err().expect("a refusal");
    assert_eq!(&*error.got, "NaN in row 1 at 200");
}

const SIZES: [(usize, usize, usize); 26] = [
    (0, 5, 3),
    (3, 0, 2),
    (1, 1, 1),
    (2, 7, 5),
    (5, 64, 33),
    (1, 520, 70),
    (9, 1001, 4),
    (1, 1024, 5000),
    (6, 512, 5000),
    (5, 128, 33),
    (9, 1024, 65),
    (33, 640, 200),
    (32, 4096, 130),
    (70, 2176, 17_000),
    // More chunks than are in flight, and bits past the last column.
    (9, 6272, 65),
    (17, 8320, 70),
    (9, 1021, 65),
    (1, 8192, 4300),
    // Few rows, whose bits are counted: all possible numbers of rows, odd addresses, one chunk for many warps, and more
    // blocks than run at once.
    (2, 8192, 300),
    (3, 1021, 65),
    (4, 4224, 4300),
    (1, 128, 9),
    (1, 512, 17_000),
    // Clusters: some blocks without a chunk, more clusters than run at once, and more rows than fit in one.
    (9, 2560, 300),
    (20, 2560, 9000),
    (40, 4096, 130),
];

/// The longest columns for which a multiprocessor with 227 KB has space for the bits of one row of bytes, or of eight
/// rows of signs, and longer ones; the longest for which sums of 64 times the values fit, and longer ones; and tiles of
/// teams of warps: side by side, taking turns, with more groups of rows, and more than run at once.
const LONG: [(usize, usize, usize); 11] = [
    (1, 20_480, 70),
    (1, 199_168, 3),
    (1, 199_296, 3),
    (5, 98_816, 3),
    (5, 98_944, 3),
    (7, 262_144, 70),
    (7, 262_272, 70),
    (29, 1152, 8200),
    (32, 16_384, 520),
    (50, 4096, 1000),
    (70, 1152, 30_000),
];

#[test]
fn products() {
    let Some(device) = common::gpu() else { return };
    for (rows, n, outs) in SIZES {
        let inputs = product(rows, n, outs);
        let sums = options::<Matmul<I8>>(r#"{"return_sums":true,"activation":"relu"}"#);
        same::<Matmul<I8>>(&device, &sums, &inputs);
        same::<Matmul<Ternary>>(&device, &Default::default(), &inputs);
        near::<Matmul<F32>>(&device, &Default::default(), &inputs);
        let mut planes = product(rows, n, outs);
        planes.take("x");
        planes.push("x_plane0", bytes(6, &[rows, n.div_ceil(8)]));
        planes.push("x_plane1", bytes(7, &[rows, n.div_ceil(8)]));
        same::<Matmul<Ternary>>(&device, &Default::default(), &planes);
    }
}

#[test]
fn products_of_long_rows_and_of_many() {
    let Some(device) = common::gpu() else { return };
    for (rows, n, outs) in LONG {
        let inputs = product(rows, n, outs);
        same::<Matmul<I8>>(&device, &options::<Matmul<I8>>(r#"{"return_sums":true}"#), &inputs);
        same::<Matmul<Ternary>>(&device, &Default::default(), &inputs);
    }
}

#[test]
fn rows_that_are_not_finite_are_nan() {
    let Some(device) = common::gpu() else { return };
    // Few rows, whose bits are counted if rows are whole units, and enough rows for tensor cores to multiply.
    for (rows, n) in [(2, 64), (2, 128), (4, 128), (9, 128)] {
        let mut inputs = product(rows, n, 3);
        let spec = Spec::new(DType::F32, &[rows, n]).unwrap();
        inputs.take("x");
        inputs.push("x", Owned::from_fn(spec, |at| if at == n + 6 { f64::INFINITY } else { 1.0 }));
        let got = common::run_cuda::<Matmul<I8>>(&Default::default(), &inputs, &device).unwrap();
        let y = got.get("y").unwrap().view().to_f64();
        let nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
        let expected: Vec<bool> = (0..3 * rows).map(|at| at / 3 == 1).collect();
        assert_eq!(nan, expected);
    }
}

#[test]
fn dots_sums_and_the_largest() {
    let Some(device) = common::gpu() else { return };
    let planes =
        |n: usize| ["a0", "a1", "b0", "b1"].into_iter().zip(1..).map(move |(name, i)| (name, bytes(i, &[3, n])));
    for n in [1, 8, 33, 200] {
        same::<DotTernary>(&device, &Default::default(), &planes(n).collect());
    }
    for (rows, n, outs) in [(2, 7, 5), (3, 1001, 40), (2, 64, 1500)] {
        let inputs = product(rows, n, outs);
        let mut weights = product(rows, n, outs);
        ["x", "w_scale", "bias"].into_iter().for_each(|name| drop(weights.take(name)));
        let n = options::<ColumnSumsTernary>(&format!(r#"{{"n":{n}}}"#));
        same::<ColumnSumsTernary>(&device, &n, &weights);
        let [mut columns, _] = both::<ColumnSumsTernary>(&device, &n, &weights);
        let [mut sums, _] = both::<Matmul<I8>>(&device, &options::<Matmul<I8>>(r#"{"return_sums":true}"#), &inputs);
        ["y", "x_scale"].into_iter().for_each(|name| drop(sums.take(name)));
        sums.push("column_sums", columns.expect("column_sums").unwrap());
        same::<VerifySumsTernary>(&device, &Default::default(), &sums);
        let acc = sums.expect("acc").unwrap();
        sums.push("acc", Owned::from_fn(sidewinder_kernels::tensor::Described::spec(&acc), |_| 1.0));
        let [cpu, gpu] = [
            common::run::<VerifySumsTernary>(&Default::default(), &sums, &Exec::default()).err(),
            common::run_cuda::<VerifySumsTernary>(&Default::default(), &sums, &device).err(),
        ];
        assert!(cpu.is_some());
        assert_eq!(cpu, gpu);
    }
    same::<Argmax>(&device, &Default::default(), &named([("x", noise(3, &[70, 17], -1.0, 1.0))]));
}

#[test]
fn layers() {
    let Some(device) = common::gpu() else { return };
    let inputs = named([
        ("x", noise(1, &[2, 3, 70], -1.0, 1.0)),
        ("w", noise(2, &[9, 70], -1.0, 1.0)),
        ("bias", noise(3, &[9], -1.0, 1.0)),
    ]);
    same::<TernaryLinear>(&device, &options::<TernaryLinear>(r#"{"activation":"relu"}"#), &inputs);
    near::<TernaryLinear>(&device, &options::<TernaryLinear>(r#"{"rule":"twn","activations":"f32"}"#), &inputs);
}
