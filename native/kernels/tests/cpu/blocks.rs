//! Block formats: bytes as the formats define on every level, products near their f64 reference, and errors.

use crate::common;
use crate::common::check::{agrees_everywhere, noise};
use crate::common::composed::f16_convert;
use crate::common::quant::{SIZES, hard_rows, product, weights};
use crate::common::{Place, cast, levels, run};
use half::f16;
use serde_json::json;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::activations::Activation;
use sidewinder_kernels::ops::products::blocks::{
    Dequantize, DequantizeOptions, Format, Instructions, MatmulF32Q4, MatmulF32Q8, MatmulQ8Q4, MatmulQ8Q8, Options,
    Quantize, QuantizeOptions, STORAGE, multiply_by,
};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

const REFERENCE: Exec = Exec { level: Level::Reference, threads: 1 };

fn tensor(dtype: DType, dims: &[usize], values: &[f64]) -> Owned {
    Owned::from_fn(Spec::new(dtype, dims).unwrap(), |at| values[at])
}

fn one(name: &'static str, tensor: Owned) -> Named<Owned> {
    [(name, tensor)].into_iter().collect()
}

fn to_blocks(format: Format, x: Owned, unchecked: bool, exec: &Exec) -> Vec<u8> {
    let results = run::<Quantize>(&QuantizeOptions { format, unchecked }, &one("x", x), exec).unwrap();
    results.get("q").unwrap().view().bytes().to_vec()
}

fn from_blocks(format: Format, q: &[u8], exec: &Exec) -> Vec<f64> {
    let q = tensor(DType::U8, &[q.len()], &q.iter().map(|&byte| byte.into()).collect::<Vec<_>>());
    let results = run::<Dequantize>(&DequantizeOptions { format }, &one("q", q), exec).unwrap();
    results.get("x").unwrap().view().to_f64().into_iter().collect()
}

/// All levels but the reference.
fn execs() -> impl Iterator<Item = Exec> {
    levels().flat_map(|level| [1, 2, 8].map(|threads| Exec { level, threads }))
}

#[test]
fn bytes_are_those_of_the_reference_in_every_type_on_every_level() {
    for (rows, blocks) in [(0, 3), (3, 0), (1, 1), (3, 7), (5, 301), (1, 3000)] {
        for &dtype in STORAGE {
            let x =
                cast(op::about::<Quantize>(), &one("x", hard_rows(1, rows, blocks)), dtype).get("x").unwrap().clone();
            for format in Format::ALL {
                let expected = to_blocks(format, x.clone(), true, &REFERENCE);
                for exec in execs() {
                    let got = to_blocks(format, x.clone(), true, &exec);
                    let off = got.iter().zip(&expected).position(|(a, b)| a != b);
                    assert_eq!(off, None, "{format:?} {dtype} {exec:?}");
                    let (back, truth) = (from_blocks(format, &got, &exec), from_blocks(format, &got, &REFERENCE));
                    assert!(back.iter().zip(&truth).all(|(a, b)| a.to_bits() == b.to_bits()), "{format:?} {exec:?}");
                }
            }
        }
    }
}

#[test]
fn any_bytes_are_read_as_the_reference_reads_them() {
    for format in Format::ALL {
        let q = weights(4, format, 3, 64 * 32).view().bytes().to_vec();
        let truth = from_blocks(format, &q, &REFERENCE);
        for exec in execs() {
            assert_eq!(from_blocks(format, &q, &exec), truth, "{format:?} {exec:?}");
        }
    }
    // The byte -128 of Q8_0, which the quantizer never writes.
    let block: Vec<u8> = [0x00, 0x38].into_iter().chain([0x80; 32]).collect();
    assert_eq!(from_blocks(Format::Q8, &block, &Exec::default()), [-64.0; 32]);
}

#[test]
fn what_is_not_finite_is_refused_by_its_place() {
    for (format, bad) in [
        (Format::Q8, f64::NAN),
        (Format::Q8, f64::INFINITY),
        (Format::Q8, -8.32104e6),
        (Format::Q4, f64::NEG_INFINITY),
        (Format::Q4, 524160.0),
    ] {
        for at in [0, 31, 40000] {
            let x = Owned::from_fn(Spec::new(DType::F32, &[2, 32768]).unwrap(), |i| match i {
                i if i == at => bad,
                50000 => f64::NAN,
                i => (i % 13) as f64,
            });
            for exec in execs().chain([REFERENCE]) {
                let options = QuantizeOptions { format, unchecked: false };
                let Err(error) = run::<Quantize>(&options, &one("x", x.clone()), &exec) else {
                    panic!("{exec:?} takes {bad}")
                };
                assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Argument, "x", "quantize"));
                assert!(error.got.ends_with(&format!("at position {at}")), "{error} on {exec:?}");
                assert!(!error.hint.is_empty());
            }
        }
    }
    let largest = tensor(DType::F32, &[32], &[8321039.5; 32]);
    assert_eq!(to_blocks(Format::Q8, largest, false, &Exec::default())[..2], [0xff, 0x7b]);
}

#[test]
fn unchecked_bytes_are_the_same_on_every_level_and_read_as_not_finite() {
    let x = Owned::from_fn(Spec::new(DType::F32, &[8 * 32]).unwrap(), |i| match (i / 32, i % 32) {
        (0, 3) | (6, 9) => f64::NAN,
        (1, 5) | (6, 2) => f64::INFINITY,
        (2, 7) => f64::NEG_INFINITY,
        (3, 1) => 3e38,
        (4, 1) => -9e6,
        (5, 30) => 6e5,
        (_, j) => j as f64 - 16.0,
    });
    for format in Format::ALL {
        let expected = to_blocks(format, x.clone(), true, &REFERENCE);
        for exec in execs() {
            assert_eq!(to_blocks(format, x.clone(), true, &exec), expected, "{format:?} {exec:?}");
        }
        for (block, values) in from_blocks(format, &expected, &Exec::default()).chunks(32).enumerate() {
            let finite = block == 7 || (block == 5 && format == Format::Q8);
            assert_eq!(values.iter().all(|v| v.is_finite()), finite, "{format:?} block {block}: {values:?}");
        }
    }
}

#[test]
fn values_are_read_back_within_the_bounds() {
    // Scales must not become subnormal.
    let x = Owned::from_fn(Spec::new(DType::F32, &[64 * 32]).unwrap(), {
        let mut random = common::Random(11);
        move |at| (2.0 * random.next() - 1.0) * 2f64.powi((at / 32) as i32 % 18)
    });
    for format in Format::ALL {
        let q = to_blocks(format, x.clone(), false, &Exec::default());
        let back = from_blocks(format, &q, &Exec::default());
        for (block, (x, back)) in x.view().to_f64().as_slice().unwrap().chunks(32).zip(back.chunks(32)).enumerate() {
            let d = x.iter().fold(0.0f64, |m, v| m.max(v.abs())) / f64::from(format.divisor());
            let bound = if format == Format::Q8 { 0.51 * d + 127.0 * d * 2f64.powi(-11) } else { 1.01 * d };
            assert!(x.iter().zip(back).all(|(x, back)| (x - back).abs() <= bound), "{format:?} block {block}");
        }
    }
}

#[test]
fn the_examples_of_the_formats() {
    let exec = Exec::default();
    let up = tensor(DType::F32, &[32], &(0..32).map(f64::from).collect::<Vec<_>>());
    let q = to_blocks(Format::Q8, up.clone(), false, &exec);
    assert_eq!(q[..14], [0xd0, 0x33, 0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45]);
    let back = from_blocks(Format::Q8, &q, &exec);
    assert_eq!([back[1], back[31]], [0.9765625, 127.0 * 0.244140625]);
    let around = tensor(DType::F32, &[32], &(-16..16).map(f64::from).collect::<Vec<_>>());
    let q = to_blocks(Format::Q4, around, false, &exec);
    let expected = "00408091 91a2a2b3 b3c4c4d5 d5e6e6f7 f7f8".replace(' ', "");
    assert_eq!(q.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    let w = tensor(DType::U8, &[1, 18], &q.iter().map(|&byte| byte.into()).collect::<Vec<_>>());
    let inputs = [("x", up), ("w", w)].into_iter().collect();
    let y = run::<MatmulQ8Q4>(&Options::default(), &inputs, &exec).unwrap();
    assert_eq!(y.get("y").unwrap().view().to_f64().as_slice().unwrap(), [f64::from(2679.1992f32)]);
}

fn products_agree<O: Op<Options = Options>>(format: Format) {
    for (at, (rows, blocks, outputs)) in SIZES.into_iter().enumerate() {
        let activation = [None, Some(Activation::Relu), Some(Activation::Silu)][at % 3];
        let inputs = product(format, &[rows, blocks * 32], outputs, at % 2 == 0);
        agrees_everywhere::<O>(&Options { activation }, &inputs);
    }
    agrees_everywhere::<O>(&Options::default(), &product(format, &[2, 3, 64], 5, true));
    agrees_everywhere::<O>(&Options { activation: Some(Activation::GeluErf) }, &product(format, &[96], 40, true));
}

#[test]
fn products_of_quantized_rows_agree_with_the_reference() {
    products_agree::<MatmulQ8Q8>(Format::Q8);
    products_agree::<MatmulQ8Q4>(Format::Q4);
}

#[test]
fn products_of_floats_agree_with_the_reference() {
    products_agree::<MatmulF32Q8>(Format::Q8);
    products_agree::<MatmulF32Q4>(Format::Q4);
}

#[test]
fn what_is_not_finite_makes_its_row_not_finite_and_no_other() {
    fn check<O: Op<Options = Options>>(format: Format) {
        for rows in [2, 6] {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut inputs = product(format, &[rows, 96], 5, false);
                let x = inputs.take("x").unwrap().view().to_f64();
                let values = Owned::from_fn(Spec::new(DType::F32, &[rows, 96]).unwrap(), |at| {
                    if at == 96 + 40 { bad } else { x.as_slice().unwrap()[at] }
                });
                inputs.push("x", values);
                for exec in execs() {
                    let y = run::<O>(&Options::default(), &inputs, &exec).unwrap().take("y").unwrap().view().to_f64();
                    for ((row, _), y) in ndarray::indices((rows, 5)).into_iter().zip(&y) {
                        assert_eq!(y.is_finite(), row != 1, "{} {bad} row {row} {exec:?}", O::NAME);
                    }
                }
            }
        }
    }
    check::<MatmulQ8Q8>(Format::Q8);
    check::<MatmulQ8Q4>(Format::Q4);
    check::<MatmulF32Q8>(Format::Q8);
    check::<MatmulF32Q4>(Format::Q4);
}

/// The kind, argument and finding of the error of `O` for these inputs.
fn refused<O: Op>(options: serde_json::Value, inputs: Named<Owned>) -> (Kind, String, String) {
    let options: O::Options = serde_json::from_value(options).unwrap();
    let Err(error) = run::<O>(&options, &inputs, &Exec::default()) else { panic!("{} takes it", O::NAME) };
    (error.kind, error.argument.to_string(), error.to_string())
}

#[test]
fn rows_that_are_not_whole_blocks_are_refused() {
    for values in [1, 31, 33] {
        let (kind, argument, text) = refused::<Quantize>(json!({}), one("x", noise(1, &[2, values], -1.0, 1.0)));
        assert_eq!((kind, &*argument), (Kind::Shape, "x"));
        assert!(text.contains("multiple of 32"), "{text}");
        let inputs = [("x", noise(1, &[values], -1.0, 1.0)), ("w", weights(1, Format::Q8, 1, 32))];
        assert_eq!(refused::<MatmulQ8Q8>(json!({}), inputs.into_iter().collect()).1, "x");
    }
    assert_eq!(refused::<Quantize>(json!({}), one("x", noise(1, &[], -1.0, 1.0))).0, Kind::Shape);
    for (format, bytes) in [("q8_0", 33), ("q8_0", 18), ("q4_0", 34), ("q4_0", 1)] {
        let q = tensor(DType::U8, &[bytes], &vec![0.0; bytes]);
        let (kind, argument, _) = refused::<Dequantize>(json!({"format": format}), one("q", q));
        assert_eq!((kind, &*argument), (Kind::Shape, "q"));
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let inputs = |w: Owned, b: usize| -> Named<Owned> {
        [("x", noise(1, &[2, 64], -1.0, 1.0)), ("w", w), ("b", noise(2, &[b], -1.0, 1.0))].into_iter().collect()
    };
    let q8 = || weights(1, Format::Q8, 3, 64);
    let (kind, argument, text) = refused::<MatmulQ8Q4>(json!({}), inputs(q8(), 3));
    assert_eq!((kind, &*argument), (Kind::Shape, "w"));
    assert!(text.contains("(O, 36)") && text.contains("q4_0"), "{text}");
    assert_eq!(refused::<MatmulQ8Q8>(json!({}), inputs(weights(1, Format::Q8, 3, 32), 3)).1, "w");
    assert_eq!(refused::<MatmulQ8Q8>(json!({}), inputs(q8(), 4)).1, "b");
    assert_eq!(refused::<MatmulQ8Q8>(json!({}), inputs(noise(1, &[3, 68], -1.0, 1.0), 3)).0, Kind::DType);
    let wide =
        |op: Named<Owned>| op.map(|t| if t.view().to_f64().ndim() == 2 { t.clone() } else { t.cast(DType::F64) });
    assert_eq!(refused::<MatmulQ8Q8>(json!({}), wide(inputs(q8(), 3))).1, "b");
    let (kind, ..) = refused::<Quantize>(json!({}), one("x", noise(1, &[32], -1.0, 1.0).cast(DType::F64)));
    assert_eq!(kind, Kind::DType);
    assert!(serde_json::from_value::<QuantizeOptions>(json!({"format": "q5_0"})).is_err());
}

#[test]
fn half_precision_rounds_to_nearest_even_on_every_level() {
    let edges = [65519.996, 65520.0, 65504.0, 6.0e-8, 2.9802322e-8, 2.9802326e-8, 1.00048828125, 1.0014648, -0.0];
    let inputs = one(
        "x",
        Owned::from_fn(Spec::new(DType::F32, &[3001]).unwrap(), {
            let mut random = common::Random(2);
            move |at| match at {
                at if at < edges.len() => edges[at],
                at => (2.0 * random.next() - 1.0) * 2f64.powi(at as i32 % 50 - 30),
            }
        }),
    );
    let expected = inputs.get("x").unwrap().view().to_f64().mapv(|v| f16::from_f32(v as f32));
    for exec in execs() {
        let got = f16_convert(&Place::Cpu(exec), &inputs, &json!({}));
        let [bits, back] = ["bits", "back"].map(|name| got.get(name).unwrap().view().to_f64());
        assert_eq!(bits.mapv(|v| v as i16 as u16), expected.mapv(f16::to_bits), "{exec:?}");
        assert_eq!(back.mapv(f64::to_bits), expected.mapv(|v| v.to_f64().to_bits()), "{exec:?}");
    }
    let start: Vec<_> = expected.iter().take(9).map(|v| v.to_bits()).collect();
    assert_eq!(start, [0x7bff, 0x7c00, 0x7bff, 1, 0, 1, 0x3c00, 0x3c02, 0x8000]);
}

/// Covers the instruction sets that a better one replaces on this machine.
#[test]
fn all_byte_products_of_this_cpu_agree_with_the_reference() {
    fn check<O: Op<Options = Options, Problem = sidewinder_kernels::ops::products::blocks::Problem>>(format: Format) {
        for (rows, blocks, outputs) in SIZES {
            let mut inputs = product(format, &[rows, blocks * 32], outputs, false);
            // The extreme values of x are multiplied with those of the weights.
            let mut x = inputs.take("x").unwrap().view().to_f64().into_iter();
            let x = Owned::from_fn(Spec::new(DType::F32, &[rows, blocks * 32]).unwrap(), |at| {
                let noise = x.next().unwrap();
                if at % 11 == 1 { if at % 2 == 0 { 2.0 } else { -2.0 } } else { noise }
            });
            inputs.push("x", x);
            let (problem, _) = op::check::<O>(&op::specs(&inputs), &Options::default()).unwrap();
            let expected = common::reference::<O>(&Options::default(), &inputs);
            for instructions in Instructions::available(Level::best()) {
                let mut y = Owned::poisoned(Spec::new(DType::F32, &[rows, outputs]).unwrap());
                let given = [&inputs.get("x").unwrap().view(), &inputs.get("w").unwrap().view()];
                let exec = Exec { level: Level::best(), threads: 2 };
                multiply_by(instructions, &problem, given, None, y.view_mut(), &exec).unwrap();
                common::assert_close(&one("y", y), &expected, &format!("{} {instructions:?}", O::NAME));
            }
        }
    }
    check::<MatmulQ8Q8>(Format::Q8);
    check::<MatmulQ8Q4>(Format::Q4);
    let all = Instructions::available(Level::best());
    assert_eq!(Instructions::available(Level::Scalar), [Instructions::Plain]);
    assert!(all.len() > 1 || Level::best() == Level::Scalar);
}
