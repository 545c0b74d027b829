//! Ternary numbers: conversions, rules, products and layers on every level, and their errors.

use crate::common;
use crate::common::check::{agrees_everywhere, noise};
use crate::common::ternary::{bytes, named, product, values};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{Named, Op};
use sidewinder_kernels::ops::products::ternary::dequantize::DequantizeTernary;
use sidewinder_kernels::ops::products::ternary::layouts::{ConvertTernary, Layout, OnSentinel, Options};
use sidewinder_kernels::ops::products::ternary::linear::TernaryLinear;
use sidewinder_kernels::ops::products::ternary::net::{Argmax, SimpleRotorNet};
use sidewinder_kernels::ops::products::ternary::products::{DotTernary, F32, I8, LONGEST, Matmul, Ternary};
use sidewinder_kernels::ops::products::ternary::rules::{ActivationI8, QuantizeTernary};
use sidewinder_kernels::ops::products::ternary::stats::{self, StatsTernary};
use sidewinder_kernels::ops::products::ternary::sums::{ColumnSumsTernary, VerifySumsTernary};
use sidewinder_kernels::ops::products::ternary::{Extensions, allow};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn run<O: Op>(options: &O::Options, inputs: &Named<Owned>) -> Named<Owned> {
    common::run::<O>(options, inputs, &Exec::default()).unwrap()
}

fn refused<O: Op>(options: &O::Options, inputs: &Named<Owned>) -> Error {
    let errors = Level::available()
        .iter()
        .map(|&level| common::run::<O>(options, inputs, &Exec { level, threads: 2 }).err().expect("a refusal"));
    let errors: Vec<_> = errors.collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors.into_iter().next().unwrap()
}

fn to(layout: Layout) -> Options {
    Options { to: Some(layout), ..Options::default() }
}

fn numbers(of: &Owned) -> Vec<f64> {
    of.view().to_f64().into_iter().collect()
}

fn tensor(dtype: DType, dims: &[usize], of: &[f64]) -> Owned {
    Owned::from_fn(Spec::new(dtype, dims).unwrap(), |at| of[at])
}

/// Runs on every level, with all extensions that the CPU has and without them.
fn with_and_without_extensions<O: Op>(options: &O::Options, inputs: &Named<Owned>) {
    for most in [Extensions::None, Extensions::Dot, Extensions::DotAndCount] {
        allow(most);
        agrees_everywhere::<O>(options, inputs);
    }
}

#[test]
fn every_layout_and_back() {
    for n in (1..=70).chain([127, 128, 129, 1000, 20000]) {
        let rows = 1 + n % 9;
        let v = values(n as u64, &[rows, n]);
        for layout in Layout::ALL {
            let mut there = run::<ConvertTernary>(&to(layout), &named([("values", v.clone())]));
            assert_eq!(numbers(&there.expect("sentinels").unwrap()), [0.0]);
            assert_eq!(numbers(&there.expect("first").unwrap()), [-1.0]);
            for other in Layout::ALL {
                let options = Options { n: Some(n), rows: Some(rows), ..to(other) };
                let mut on = run::<ConvertTernary>(&options, &there);
                ["sentinels", "first"].into_iter().for_each(|name| drop(on.take(name)));
                let back = Options { n: Some(n), rows: Some(rows), ..to(Layout::Values) };
                let back = run::<ConvertTernary>(&back, &on);
                assert_eq!(numbers(back.get("values").unwrap()), numbers(&v), "{n} {layout:?} {other:?}");
            }
        }
    }
}

#[test]
fn conversions_agree_with_the_reference() {
    for n in [1, 7, 64, 65, 130, 33000] {
        for rows in [0, 1, 4, 6] {
            for layout in Layout::ALL {
                let given = [
                    named([("values", values(1, &[rows, n]))]),
                    named([("plane0", bytes(2, &[rows, n.div_ceil(8)])), ("plane1", bytes(3, &[rows, n.div_ceil(8)]))]),
                    named([("packed2", bytes(4, &[rows, n.div_ceil(4)]))]),
                    named([("offset_rows", bytes(5, &[rows.div_ceil(4), n]))]),
                    named([
                        ("byte0", values(6, &[rows, n]).cast(DType::U8)),
                        ("byte1", values(7, &[rows, n]).cast(DType::U8)),
                    ]),
                ];
                for inputs in given {
                    let rows = Some(rows);
                    let options = Options { n: Some(n), rows, on_sentinel: OnSentinel::Zero, ..to(layout) };
                    agrees_everywhere::<ConvertTernary>(&options, &inputs);
                    agrees_everywhere::<StatsTernary>(&stats::Options { n: Some(n), rows }, &inputs);
                }
            }
        }
    }
}

#[test]
fn the_examples_of_the_layouts() {
    let v = tensor(DType::I8, &[9], &[1.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0]);
    let packed = run::<ConvertTernary>(&to(Layout::Packed2), &named([("values", v.clone())]));
    assert_eq!(packed.get("packed2").unwrap().view().bytes(), [0x86, 0x00, 0x01]);
    let planes = run::<ConvertTernary>(&to(Layout::Planes), &named([("values", v)]));
    assert_eq!(planes.get("plane0").unwrap().view().bytes(), [0x09, 0x00]);
    assert_eq!(planes.get("plane1").unwrap().view().bytes(), [0x02, 0x01]);
    let bitnet = tensor(DType::U8, &[2, 2], &[0xa1, 0x18, 0x90, 0x0a].map(f64::from));
    let read = run::<ConvertTernary>(&to(Layout::Values), &named([("offset_rows", bitnet)]));
    let expected = [0, -1, -1, 1, -1, 1, -1, 1, 1, 0, 0, -1, 1, -1, 1, -1].map(f64::from);
    assert_eq!(numbers(read.get("values").unwrap()), expected);
    let damaged = named([("packed2", tensor(DType::U8, &[1], &[156.0]))]);
    let zero = Options { on_sentinel: OnSentinel::Zero, ..to(Layout::Values) };
    let read = run::<ConvertTernary>(&zero, &damaged);
    assert_eq!(numbers(read.get("values").unwrap()), [0.0, 0.0, -1.0, 1.0]);
    assert_eq!(numbers(read.get("sentinels").unwrap()), [1.0]);
    assert_eq!(numbers(read.get("first").unwrap()), [1.0]);
    let error = refused::<ConvertTernary>(&to(Layout::Values), &damaged);
    assert_eq!((error.kind, &*error.argument), (Kind::Argument, "packed2"));
    assert_eq!(&*error.got, "1 that are none, the first in row 0 at 1");
}

#[test]
fn dots_of_all_pairs_of_length_4() {
    // Every code of four cells, sentinels included, with every other one.
    let code = |of: usize, plane: usize| (0..4).fold(0, |bits, i| bits | (of >> (2 * i + plane) & 1) << i);
    let value = |of: usize, i: usize| (of >> (2 * i) & 1) as i32 - (of >> (2 * i + 1) & 1) as i32;
    let plane = |plane: usize, second: bool| {
        let spec = Spec::new(DType::U8, &[256 * 256, 1]).unwrap();
        Owned::from_fn(spec, |at| code(if second { at % 256 } else { at / 256 }, plane) as f64)
    };
    let inputs =
        named([("a0", plane(0, false)), ("a1", plane(1, false)), ("b0", plane(0, true)), ("b1", plane(1, true))]);
    let dot = |at: usize| (0..4).map(|i| value(at / 256, i) * value(at % 256, i)).sum::<i32>();
    let expected: Vec<f64> = (0..256 * 256).map(|at| f64::from(dot(at))).collect();
    for &level in Level::available() {
        for most in [Extensions::None, Extensions::DotAndCount] {
            allow(most);
            let got = common::run::<DotTernary>(&Default::default(), &inputs, &Exec { level, threads: 2 }).unwrap();
            assert_eq!(numbers(got.get("dot").unwrap()), expected, "{}", level.name());
        }
    }
}

#[test]
fn dots_agree_with_the_reference() {
    for n in [0, 1, 8, 63, 64, 65, 127, 200] {
        let planes = [1, 2, 3, 4].map(|seed| bytes(seed, &[3, n]));
        let [a0, a1, b0, b1] = planes;
        let inputs = named([("a0", a0), ("a1", a1), ("b0", b0), ("b1", b1)]);
        with_and_without_extensions::<DotTernary>(&Default::default(), &inputs);
    }
}

#[test]
fn rules_agree_with_the_reference() {
    for (rows, n) in [(0, 5), (3, 0), (1, 1), (2, 7), (5, 64), (4, 130), (3, 1001)] {
        let w = named([("w", noise(9, &[rows, n], -1.0, 1.0))]);
        for options in [r#"{"rule":"absmean"}"#, r#"{"rule":"twn"}"#, r#"{"rule":"threshold","threshold":0.3}"#] {
            for per_row in [false, true] {
                let mut options: serde_json::Value = serde_json::from_str(options).unwrap();
                options["per_row"] = per_row.into();
                agrees_everywhere::<QuantizeTernary>(&serde_json::from_value(options).unwrap(), &w);
            }
        }
    }
}

#[test]
fn dequantized_numbers_agree_with_the_reference() {
    for (rows, n) in [(0, 5), (3, 0), (1, 1), (2, 7), (5, 64), (4, 130), (300, 1001)] {
        let options = serde_json::from_value(serde_json::json!({"n": n})).unwrap();
        for scales in [1, rows] {
            let planes = |seed| bytes(seed, &[rows, usize::div_ceil(n, 8)]);
            let scale = noise(4, &[scales], 0.1, 1.0);
            let inputs = named([("plane0", planes(2)), ("plane1", planes(3)), ("scale", scale)]);
            agrees_everywhere::<DequantizeTernary>(&options, &inputs);
        }
    }
    let scale = |of: &[f64]| tensor(DType::F32, &[of.len()], of);
    let planes = || [("plane0", bytes(2, &[2, 1])), ("plane1", bytes(3, &[2, 1]))];
    let [plane0, plane1] = planes();
    let infinite =
        run::<DequantizeTernary>(&Default::default(), &named([plane0, plane1, ("scale", scale(&[f64::INFINITY]))]));
    assert!(numbers(infinite.get("w").unwrap()).iter().all(|w| *w == 0.0 || w.is_infinite()));
    let [plane0, plane1] = planes();
    let three = named([plane0, plane1, ("scale", scale(&[1.0, 2.0, 3.0]))]);
    let error = refused::<DequantizeTernary>(&Default::default(), &three);
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "scale"));
}

#[test]
fn nan_is_0_and_spoils_no_threshold_that_is_given() {
    let w = named([("w", tensor(DType::F32, &[4], &[f64::NAN, 1.0, -1.0, f64::INFINITY]))]);
    let by = |options: &str| run::<QuantizeTernary>(&serde_json::from_str(options).unwrap(), &w);
    let cut = by(r#"{"rule":"threshold","threshold":0.0}"#);
    assert_eq!(cut.get("plane0").unwrap().view().bytes(), [0b1010]);
    assert_eq!(cut.get("plane1").unwrap().view().bytes(), [0b0100]);
    assert!(numbers(by("{}").get("scale").unwrap())[0].is_nan());
    for options in [r#"{"rule":"threshold"}"#, r#"{"rule":"threshold","threshold":-1.0}"#, r#"{"threshold":1.0}"#] {
        let error = refused::<QuantizeTernary>(&serde_json::from_str(options).unwrap(), &w);
        assert_eq!((error.kind, &*error.argument), (Kind::Option, "threshold"));
    }
}

#[test]
fn activations_agree_with_the_reference() {
    for (rows, n) in [(0, 5), (3, 0), (1, 1), (2, 7), (5, 64), (4, 130), (3, 1001)] {
        agrees_everywhere::<ActivationI8>(&Default::default(), &named([("x", noise(9, &[rows, n], -3.0, 3.0))]));
    }
    let x = tensor(DType::F32, &[2, 3], &[1.0, -2.0, 0.5, 0.0, 0.0, 0.0]);
    let got = run::<ActivationI8>(&Default::default(), &named([("x", x)]));
    assert_eq!(numbers(got.get("q").unwrap()), [64.0, -127.0, 32.0, 0.0, 0.0, 0.0]);
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let x = named([("x", tensor(DType::F32, &[2, 2], &[1.0, 2.0, 3.0, bad]))]);
        let error = refused::<ActivationI8>(&Default::default(), &x);
        assert!(error.got.ends_with("in row 1 at 1"), "{error}");
    }
}

const SIZES: [(usize, usize, usize); 12] = [
    (0, 5, 3),
    (3, 0, 2),
    (1, 1, 1),
    (2, 7, 5),
    (5, 64, 33),
    (13, 130, 9),
    (1, 520, 70),
    (9, 1001, 4),
    (4, 512, 40),
    (17, 0, 3),
    (19, 200, 300),
    (70, 65, 17),
];

#[test]
fn products_agree_with_the_reference() {
    for (rows, n, outs) in SIZES {
        let inputs = product(rows, n, outs);
        let sums = serde_json::from_str(r#"{"return_sums":true,"activation":"relu"}"#).unwrap();
        with_and_without_extensions::<Matmul<I8>>(&sums, &inputs);
        with_and_without_extensions::<Matmul<Ternary>>(&Default::default(), &inputs);
        agrees_everywhere::<Matmul<F32>>(&Default::default(), &inputs);
        let mut alone = product(rows, n, outs);
        ["w_scale", "bias"].into_iter().for_each(|name| drop(alone.take(name)));
        agrees_everywhere::<Matmul<Ternary>>(&Default::default(), &alone);
        let planes = [("x_plane0", 6), ("x_plane1", 7)].map(|(name, seed)| (name, bytes(seed, &[rows, n.div_ceil(8)])));
        alone.take("x");
        planes.into_iter().for_each(|(name, plane)| alone.push(name, plane));
        agrees_everywhere::<Matmul<Ternary>>(&Default::default(), &alone);
    }
}

#[test]
fn sums_are_the_same_bits_on_every_level() {
    let inputs = product(7, 1003, 37);
    let options = serde_json::from_str(r#"{"return_sums":true}"#).unwrap();
    let results: Vec<_> = common::levels()
        .map(|level| common::bits(&common::run::<Matmul<I8>>(&options, &inputs, &Exec { level, threads: 1 }).unwrap()))
        .collect();
    assert!(results.iter().all(|bits| *bits == results[0]));
}

#[test]
fn products_of_the_largest_sums_fit() {
    let n = LONGEST / 8 * 8;
    let ones = |name, byte: f64| (name, tensor(DType::U8, &[1, n / 8], &vec![byte; n / 8]));
    let x = ("x", tensor(DType::F32, &[1, n], &vec![1.0; n]));
    let inputs = named([x, ones("plane0", 255.0), ones("plane1", 0.0)]);
    let options = serde_json::from_str(r#"{"return_sums":true}"#).unwrap();
    for &level in Level::available() {
        for most in [Extensions::None, Extensions::DotAndCount] {
            allow(most);
            let got = common::run::<Matmul<I8>>(&options, &inputs, &Exec { level, threads: 1 }).unwrap();
            assert_eq!(numbers(got.get("acc").unwrap()), [127.0 * n as f64]);
        }
    }
}

#[test]
fn floats_that_no_weight_takes_spoil_nothing() {
    let x = tensor(DType::F32, &[1, 3], &[f64::NAN, 2.0, f64::INFINITY]);
    let planes =
        [("plane0", tensor(DType::U8, &[3, 1], &[2.0, 4.0, 255.0])), ("plane1", tensor(DType::U8, &[3, 1], &[0.0; 3]))];
    let [plane0, plane1] = planes;
    for level in common::levels() {
        let inputs = named([("x", x.clone()), plane0.clone(), plane1.clone()]);
        let got = common::run::<Matmul<F32>>(&Default::default(), &inputs, &Exec { level, threads: 1 }).unwrap();
        let y = numbers(got.get("y").unwrap());
        assert_eq!(y[..2], [2.0, f64::INFINITY], "{}", level.name());
        assert!(y[2].is_nan());
        let error = refused::<Matmul<I8>>(&Default::default(), &inputs);
        assert_eq!(&*error.got, "NaN in row 0 at 0");
    }
}

#[test]
fn the_example_of_bytes() {
    let inputs = named([
        ("x", tensor(DType::F32, &[3], &[1.0, -2.0, 0.5])),
        ("plane0", tensor(DType::U8, &[1, 1], &[1.0])),
        ("plane1", tensor(DType::U8, &[1, 1], &[2.0])),
        ("w_scale", tensor(DType::F32, &[1], &[0.5])),
    ]);
    let got = run::<Matmul<I8>>(&serde_json::from_str(r#"{"return_sums":true}"#).unwrap(), &inputs);
    assert_eq!(numbers(got.get("acc").unwrap()), [191.0]);
    assert!((numbers(got.get("y").unwrap())[0] - 1.503937).abs() < 1e-6);
}

#[test]
fn layers_agree_with_the_reference() {
    for options in [
        r#"{}"#,
        r#"{"rule":"twn","activations":"f32","activation":"gelu"}"#,
        r#"{"rule":"threshold","threshold":0.4,"activations":"ternary"}"#,
        r#"{"per_row":true,"activation":"relu"}"#,
    ] {
        let inputs = named([
            ("x", noise(1, &[2, 3, 70], -1.0, 1.0)),
            ("w", noise(2, &[9, 70], -1.0, 1.0)),
            ("bias", noise(3, &[9], -1.0, 1.0)),
        ]);
        agrees_everywhere::<TernaryLinear>(&serde_json::from_str(options).unwrap(), &inputs);
    }
}

#[test]
fn the_example_of_the_network() {
    let planes = |name, values: &[f64]| (name, tensor(DType::U8, &[2, 1], values));
    let mut inputs = named([
        ("x", tensor(DType::F32, &[1, 3], &[0.2, -0.7, 0.0])),
        planes("w1_plane0", &[0b101 as f64, 0b100 as f64]),
        planes("w1_plane1", &[0b010 as f64, 0b001 as f64]),
        ("b1", tensor(DType::F32, &[2], &[0.5, 0.25])),
        planes("w2_plane0", &[3.0, 0.0]),
        planes("w2_plane1", &[0.0, 2.0]),
        ("b2", tensor(DType::F32, &[2], &[0.0, 1.0])),
    ]);
    for &level in Level::available() {
        let got = common::run::<SimpleRotorNet>(&Default::default(), &inputs, &Exec { level, threads: 1 }).unwrap();
        assert_eq!(numbers(got.get("logits").unwrap()), [1.0, 1.0]);
        assert_eq!(numbers(got.get("class").unwrap()), [0.0]);
    }
    let options = serde_json::from_str(r#"{"scales":true}"#).unwrap();
    assert_eq!(&*refused::<SimpleRotorNet>(&options, &inputs).argument, "w1_scale");
    inputs.push("w1_scale", tensor(DType::F32, &[1], &[2.0]));
    inputs.push("w2_scale", tensor(DType::F32, &[2], &[0.5, 4.0]));
    let got = run::<SimpleRotorNet>(&options, &inputs);
    assert_eq!(numbers(got.get("logits").unwrap()), [0.5, 1.0]);
    assert_eq!(numbers(got.get("class").unwrap()), [1.0]);
    let wrong = serde_json::from_str(r#"{"scales":true,"hidden":3}"#).unwrap();
    assert_eq!(&*refused::<SimpleRotorNet>(&wrong, &inputs).argument, "hidden");
}

#[test]
fn the_largest_is_the_first_of_equals_and_never_nan() {
    for (row, class) in [
        (vec![1.0, 3.0, 3.0], 1.0),
        (vec![f64::NAN, -1.0, f64::NEG_INFINITY], 1.0),
        (vec![f64::NAN, f64::NAN], 0.0),
        (vec![f64::NEG_INFINITY], 0.0),
        (vec![0.0, -0.0], 0.0),
    ] {
        let got = run::<Argmax>(&Default::default(), &named([("x", tensor(DType::F32, &[row.len()], &row))]));
        assert_eq!(numbers(got.get("class").unwrap()), [class], "{row:?}");
    }
    agrees_everywhere::<Argmax>(&Default::default(), &named([("x", noise(3, &[4, 5, 17], -1.0, 1.0))]));
    let empty = named([("x", noise(3, &[4, 0], -1.0, 1.0))]);
    assert_eq!(refused::<Argmax>(&Default::default(), &empty).kind, Kind::Shape);
}

#[test]
fn sums_of_columns_prove_results() {
    for (rows, n, outs) in SIZES {
        let inputs = product(rows, n, outs);
        let mut planes = product(rows, n, outs);
        ["x", "w_scale", "bias"].into_iter().for_each(|name| drop(planes.take(name)));
        let options = serde_json::from_value(serde_json::json!({"n": n})).unwrap();
        agrees_everywhere::<ColumnSumsTernary>(&options, &planes);
        let mut columns = run::<ColumnSumsTernary>(&options, &planes);
        let mut sums = run::<Matmul<I8>>(&serde_json::from_str(r#"{"return_sums":true}"#).unwrap(), &inputs);
        ["y", "x_scale"].into_iter().for_each(|name| drop(sums.take(name)));
        sums.push("column_sums", columns.expect("column_sums").unwrap());
        agrees_everywhere::<VerifySumsTernary>(&Default::default(), &sums);
        if rows * outs * n > 100 {
            let acc = sums.expect("acc").unwrap();
            let spec = acc.spec();
            let mut values = acc.view().to_f64().into_iter();
            let mut at = 0;
            let mut damaged = || {
                at += 1;
                values.next().unwrap() + f64::from(at == 1 + outs)
            };
            sums.push("acc", Owned::from_fn(spec, |_| damaged()));
            let failed = rows > 1;
            if failed {
                let error = refused::<VerifySumsTernary>(&Default::default(), &sums);
                assert_eq!(&*error.got, "a difference of 1 in row 1");
            }
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let shaped = |name: &'static str, dims: &[usize]| {
        let mut inputs = product(2, 20, 3);
        let dtype = inputs.expect(name).unwrap().spec().dtype;
        inputs.push(name, Owned::zeros(Spec::new(dtype, dims).unwrap()));
        inputs
    };
    for (name, dims) in [("plane0", &[3, 2][..]), ("plane1", &[3, 4]), ("w_scale", &[2]), ("bias", &[1]), ("x", &[])] {
        let error = refused::<Matmul<I8>>(&Default::default(), &shaped(name, dims));
        assert_eq!((error.kind, &*error.argument), (Kind::Shape, name), "{error}");
    }
    let none = refused::<ConvertTernary>(&Options::default(), &Named::default());
    assert_eq!((none.kind, &*none.argument), (Kind::Argument, "values"));
    let both = named([("values", values(1, &[8])), ("packed2", bytes(2, &[2]))]);
    assert_eq!(&*refused::<ConvertTernary>(&Options::default(), &both).got, "several");
    let one = named([("plane0", bytes(2, &[2]))]);
    assert_eq!(&*refused::<ConvertTernary>(&Options::default(), &one).argument, "plane1");
    for n in [8, 17] {
        let planes = named([("plane0", bytes(2, &[2])), ("plane1", bytes(3, &[2]))]);
        let error = refused::<ConvertTernary>(&Options { n: Some(n), ..Options::default() }, &planes);
        assert_eq!((error.kind, &*error.argument), (Kind::Option, "n"));
    }
    let two = named([("values", tensor(DType::I8, &[2, 3], &[0.0, 1.0, -1.0, 0.0, 2.0, -128.0]))]);
    let error = refused::<ConvertTernary>(&Options::default(), &two);
    assert_eq!(&*error.got, "2 that are none, the first in row 1 at 1");
}
