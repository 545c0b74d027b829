//! Attention against its f64 reference: every option, every level, every type, and the edges.

use crate::common;
use crate::common::{Random, bits, cast, check, levels, reference, run};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::attention::{Attention, AttentionBackward, Layout, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    value_width: usize,
}

const SMALL: Sizes = Sizes { batch: 2, heads: 4, key_heads: 2, queries: 5, keys: 7, width: 3, value_width: 6 };

impl Sizes {
    fn one_head(queries: usize, keys: usize, width: usize) -> Sizes {
        Sizes { batch: 1, heads: 1, key_heads: 1, queries, keys, width, value_width: width }
    }

    fn inputs(&self, layout: Layout) -> Named<Owned> {
        let Sizes { batch, heads, key_heads, queries, keys, width, value_width } = *self;
        let shape = |heads, rows, width| match layout {
            Layout::HeadsFirst => [batch, heads, rows, width],
            Layout::HeadsLast => [batch, rows, heads, width],
        };
        let (q, k) = (shape(heads, queries, width), shape(key_heads, keys, width));
        let mut inputs = check::inputs(&[("q", &q), ("k", &k), ("v", &shape(key_heads, keys, value_width))]);
        let q = inputs.take("q").unwrap().view().to_f64();
        // Scores that make weights differ widely, without letting the small ones vanish.
        let mut of_q = q.iter().map(|v| 3.0 * v);
        inputs.push("q", Owned::from_fn(Spec::new(DType::F32, q.shape()).unwrap(), |_| of_q.next().unwrap()));
        inputs
    }
}

/// A random mask, in which a key is visible with probability `likely`.
fn mask(seed: u64, dims: &[usize], likely: f64) -> Owned {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Owned::from_fn(Spec::new(DType::U8, dims).unwrap(), |_| if random.next() < likely { 3.0 } else { 0.0 })
}

fn with(mut inputs: Named<Owned>, name: &'static str, tensor: Owned) -> Named<Owned> {
    inputs.take(name);
    inputs.push(name, tensor);
    inputs
}

fn causal(q_offset: Option<i64>) -> Options {
    Options { causal: true, q_offset, ..Options::default() }
}

/// The tolerance of gradients in a type, relative to themselves and to the largest value. They are computed from `y`
/// and `lse` as stored, which the reference does not read.
fn allowed(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-10, 1e-11),
        DType::F32 => (5e-5, 1e-5),
        DType::Bf16 => (2e-2, 2e-2),
        _ => (3e-3, 3e-3),
    }
}

/// Compares the gradient with the reference, and its bits between numbers of threads.
pub fn gradients_agree<F: Op<Options = Options>, B: Op<Options = Options>>(options: &Options, inputs: &Named<Owned>) {
    for dtype in DType::FLOATS {
        let inputs = check::backward_inputs::<F, B>(options, &cast(op::about::<F>(), inputs, dtype));
        let expected = reference::<B>(options, &inputs);
        let (rtol, of_largest) = allowed(dtype);
        for level in levels() {
            let results = |threads| run::<B>(options, &inputs, &Exec { level, threads }).unwrap();
            let one = results(1);
            for (name, expected) in expected.iter() {
                let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
                let off = common::worst(one.get(name).unwrap(), expected, rtol, of_largest * largest + 1e-30);
                assert!(
                    off <= 1.0,
                    "{name} off by {off}: {dtype} {} {:?} {options:?}",
                    level.name(),
                    op::specs(&inputs)
                );
            }
            for &threads in common::THREADS {
                assert_eq!(bits(&results(threads)), bits(&one), "{dtype} {} {threads} threads", level.name());
            }
        }
    }
}

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<Attention>(options, inputs);
    gradients_agree::<Attention, AttentionBackward>(options, inputs);
}

#[test]
fn the_example_that_is_done_by_hand() {
    let tensor = |dims: &[usize], values: &[f64]| Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |i| values[i]);
    let one = tensor(&[1, 1, 2, 2], &[1.0, 0.0, 0.0, 1.0]);
    let v = tensor(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let inputs: Named<Owned> = [("q", one.clone()), ("k", one), ("v", v)].into_iter().collect();
    for level in levels() {
        let outputs = run::<Attention>(&Options::default(), &inputs, &Exec { level, threads: 1 }).unwrap();
        let y = tensor(&[1, 1, 2, 2], &[1.6604769, 2.6604769, 2.3395231, 3.3395231]);
        assert!(common::worst(outputs.get("y").unwrap(), &y, 1e-6, 0.0) <= 1.0, "{}", level.name());
        let lse = tensor(&[1, 1, 2], &[1.10794031, 1.10794031]);
        assert!(common::worst(outputs.get("lse").unwrap(), &lse, 1e-6, 0.0) <= 1.0, "{}", level.name());
    }
}

#[test]
fn all_small_lengths() {
    for n in 0..34 {
        let keys = (n * 7 + 3) % 34;
        let options = if n % 2 == 0 { Options::default() } else { causal(None) };
        agrees(&options, &Sizes { queries: n, keys, heads: 2, batch: 1, ..SMALL }.inputs(Layout::HeadsFirst));
    }
    agrees(&Options::default(), &Sizes::one_head(3, 0, 4).inputs(Layout::HeadsFirst));
}

#[test]
fn widths_of_all_kinds() {
    for (width, value_width) in [(1, 1), (2, 17), (8, 1), (15, 16), (16, 33), (31, 5), (64, 48), (100, 7), (512, 130)] {
        let sizes = Sizes { width, value_width, queries: 19, keys: 37, heads: 1, key_heads: 1, ..SMALL };
        let options = Options { layout: Layout::HeadsLast, ..causal(None) };
        agrees(&options, &sizes.inputs(Layout::HeadsLast));
    }
}

/// Lengths that exceed a block of queries, a tile of keys, and a stretch of keys.
#[test]
fn lengths_beyond_a_tile() {
    for (queries, keys) in [(64, 64), (65, 63), (130, 190), (33, 550), (129, 1030)] {
        for options in [Options::default(), causal(None), causal(Some(0))] {
            agrees(&options, &Sizes { batch: 1, heads: 2, queries, keys, ..SMALL }.inputs(Layout::HeadsFirst));
        }
    }
}

/// Few queries over many keys, as in decoding, for several ratios of heads to key heads.
#[test]
fn single_queries_over_many_keys() {
    for (queries, keys) in [(1, 1), (1, 66), (1, 2500), (2, 1300), (3, 700), (4, 100)] {
        for (heads, key_heads) in [(1, 1), (4, 1), (6, 2)] {
            let sizes = Sizes { batch: 1, heads, key_heads, queries, keys, width: 20, value_width: 70 };
            let inputs = sizes.inputs(Layout::HeadsLast);
            let options = Options { layout: Layout::HeadsLast, ..causal(None) };
            check::agrees_everywhere::<Attention>(&options, &inputs);
            let inputs = with(inputs, "mask", mask(3, &[heads, queries, keys], 0.7));
            let inputs = with(inputs, "bias", check::noise(4, &[heads, 1, keys], -1.0, 1.0));
            check::agrees_everywhere::<Attention>(&options, &inputs);
        }
    }
}

#[test]
fn every_subset_of_options() {
    let Sizes { batch, heads, queries, keys, .. } = SMALL;
    for subset in 0..32 {
        let has = |bit: usize| subset >> bit & 1 == 1;
        let layout = if has(0) { Layout::HeadsLast } else { Layout::HeadsFirst };
        let sizes = Sizes { key_heads: if has(1) { 2 } else { 4 }, ..SMALL };
        let mut inputs = sizes.inputs(layout);
        if has(2) {
            inputs.push("mask", mask(5, &[batch, 1, queries, keys], 0.6));
        }
        if has(3) {
            inputs.push("bias", check::noise(6, &[1, heads, queries, keys], -2.0, 2.0));
        }
        let scale = has(1).then_some(0.3);
        agrees(&Options { causal: has(4), q_offset: None, scale, layout, cache: None }, &inputs);
    }
}

#[test]
fn masks_and_biases_repeated_along_any_axes() {
    let sizes = Sizes { queries: 67, keys: 70, heads: 2, key_heads: 1, ..SMALL };
    let full = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
    for subset in 0..16 {
        let dims: Vec<_> = full.iter().enumerate().map(|(i, &d)| if subset >> i & 1 == 1 { d } else { 1 }).collect();
        let inputs = sizes.inputs(Layout::HeadsFirst);
        let inputs = with(inputs, "mask", mask(subset as u64 + 7, &dims, 0.8));
        agrees(&Options::default(), &with(inputs, "bias", check::noise(8, &dims, -1.0, 1.0)));
    }
    // Leading axes are omitted.
    let inputs = SMALL.inputs(Layout::HeadsFirst);
    let inputs = with(inputs, "mask", mask(9, &[SMALL.keys], 0.5));
    agrees(&causal(Some(3)), &with(inputs, "bias", check::noise(10, &[SMALL.queries, 1], -1.0, 1.0)));
}

#[test]
fn any_offset_of_queries() {
    for offset in [i64::MIN, -100, -70, -5, -1, 0, 1, 3, 66, 69, 70, 1000, i64::MAX] {
        let sizes = Sizes { batch: 1, heads: 2, queries: 70, keys: 68, ..SMALL };
        agrees(&causal(Some(offset)), &sizes.inputs(Layout::HeadsFirst));
    }
}

#[test]
fn the_gradient_is_the_slope() {
    let sizes = Sizes { batch: 1, heads: 2, key_heads: 1, queries: 3, keys: 4, width: 2, value_width: 3 };
    for layout in [Layout::HeadsFirst, Layout::HeadsLast] {
        for (causal, bias) in [(false, [2, 3, 4]), (true, [2, 1, 4]), (true, [1, 3, 1])] {
            let inputs = with(sizes.inputs(layout), "bias", check::noise(11, &bias, -1.0, 1.0));
            let options = Options { causal, layout, q_offset: Some(1), ..Options::default() };
            check::gradients_agree_with_differences::<Attention, AttentionBackward>(&options, &inputs);
        }
    }
}

/// The results and gradients of one query.
fn row(tensor: &Owned, row: usize, width: usize) -> Vec<f64> {
    tensor.view().to_f64().iter().skip(row * width).take(width).copied().collect()
}

#[test]
fn queries_that_see_nothing_have_no_result_and_no_gradient() {
    let (queries, keys, width) = (67, 66, 5);
    let inputs = Sizes::one_head(queries, keys, width).inputs(Layout::HeadsFirst);
    let spec = Spec::new(DType::U8, &[queries, keys]).unwrap();
    let blind = [0, 40, 66];
    let hidden = Owned::from_fn(spec, |i| if blind.contains(&(i / keys)) { 0.0 } else { 1.0 });
    let inputs = with(inputs, "mask", hidden);
    agrees(&Options::default(), &inputs);
    let backward = check::backward_inputs::<Attention, AttentionBackward>(&Options::default(), &inputs);
    for level in levels() {
        let exec = Exec { level, threads: 2 };
        let outputs = run::<Attention>(&Options::default(), &inputs, &exec).unwrap();
        let gradients = run::<AttentionBackward>(&Options::default(), &backward, &exec).unwrap();
        for query in blind {
            assert_eq!(row(outputs.get("y").unwrap(), query, width), [0.0; 5]);
            assert_eq!(row(outputs.get("lse").unwrap(), query, 1), [f64::NEG_INFINITY]);
            assert_eq!(row(gradients.get("dq").unwrap(), query, width), [0.0; 5]);
        }
    }
}

/// A bias of minus infinity masks a key as the mask does.
#[test]
fn minus_infinity_hides() {
    let (queries, keys) = (5, 70);
    let inputs = Sizes::one_head(queries, keys, 4).inputs(Layout::HeadsFirst);
    let hides = |i: usize| i / keys == 2 || i.is_multiple_of(3);
    let yes = Owned::from_fn(Spec::new(DType::U8, &[queries, keys]).unwrap(), |i| f64::from(!hides(i)));
    let of = |i| if hides(i) { f64::NEG_INFINITY } else { 0.0 };
    let bias = Owned::from_fn(Spec::new(DType::F32, &[queries, keys]).unwrap(), of);
    for level in levels() {
        let results = |inputs| run::<Attention>(&causal(None), &inputs, &Exec { level, threads: 1 }).unwrap();
        let masked = results(with(inputs.clone(), "mask", yes.clone()));
        assert_eq!(bits(&results(with(inputs.clone(), "bias", bias.clone()))), bits(&masked), "{}", level.name());
    }
}

/// Logits of thousands, for which an f32 score is off by 1e-4, and so is its weight.
#[test]
fn big_logits_stay_finite_and_near() {
    let sizes = Sizes { batch: 1, heads: 2, key_heads: 1, queries: 70, keys: 130, width: 16, value_width: 16 };
    for queries in [1, 70] {
        let inputs = Sizes { queries, ..sizes }.inputs(Layout::HeadsFirst);
        for scale in [30.0, 600.0] {
            let options = Options { scale: Some(scale), ..causal(None) };
            let backward = check::backward_inputs::<Attention, AttentionBackward>(&options, &inputs);
            for level in levels() {
                let exec = Exec { level, threads: 2 };
                near::<Attention>(&options, &inputs, &exec, 3e-3);
                near::<AttentionBackward>(&options, &backward, &exec, 3e-2);
            }
        }
    }
}

fn near<O: Op>(options: &O::Options, inputs: &Named<Owned>, exec: &Exec, of_largest: f64) {
    let (got, expected) = (run::<O>(options, inputs, exec).unwrap(), reference::<O>(options, inputs));
    for (name, expected) in expected.iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let off = common::worst(got.get(name).unwrap(), expected, 0.0, of_largest * largest);
        assert!(off <= 1.0, "{name} off by {off}: {} {options:?}", exec.level.name(), options = op::specs(inputs));
    }
}

/// Which elements are NaN.
fn nans(tensor: &Owned) -> Vec<bool> {
    tensor.view().to_f64().iter().map(|v| v.is_nan()).collect()
}

/// A NaN reaches exactly the results that depend on it, although tiles hold masked keys next to visible ones.
#[test]
fn nan_goes_where_it_is_seen() {
    let (queries, keys, width) = (70, 75, 6);
    for queries in [2, queries] {
        let plain = Sizes::one_head(queries, keys, width).inputs(Layout::HeadsFirst);
        let plain = with(plain, "bias", check::noise(12, &[queries, keys], -1.0, 1.0));
        let masked = with(plain.clone(), "mask", mask(13, &[queries, keys], 0.8));
        let backward = |inputs| check::backward_inputs::<Attention, AttentionBackward>(&causal(None), inputs);
        for (inputs, options) in [(&plain, causal(None)), (&masked, Options::default()), (&masked, causal(Some(1)))] {
            for (name, at) in [("q", 3), ("k", 73 * width), ("k", 5), ("v", 74 * width + 1), ("v", 8), ("bias", 100)] {
                let (poisoned, what) = (poison(inputs, name, at), format!("{name}[{at}] {options:?}"));
                same_nans::<Attention>(&options, &poisoned, &what);
                let gradients = with_outputs(&options, &poisoned, &backward(inputs));
                same_nans::<AttentionBackward>(&options, &gradients, &what);
                let gradients = with_outputs(&options, inputs, &gradients);
                same_nans::<AttentionBackward>(&options, &poison(&gradients, "dy", queries * width - 1), "dy");
            }
        }
    }
}

fn poison(inputs: &Named<Owned>, name: &'static str, at: usize) -> Named<Owned> {
    let tensor = inputs.get(name).unwrap();
    let values = tensor.view().to_f64();
    let mut values = values.iter().enumerate().map(|(i, &v)| if i == at { f64::NAN } else { v });
    with(inputs.clone(), name, Owned::from_fn(tensor.spec(), |_| values.next().unwrap()))
}

/// The inputs of the gradient, with attention's outputs for these inputs.
fn with_outputs(options: &Options, inputs: &Named<Owned>, backward: &Named<Owned>) -> Named<Owned> {
    let outputs = run::<Attention>(options, inputs, &Exec { level: Level::Reference, threads: 1 }).unwrap();
    let cotangents = backward.iter().filter(|(name, _)| ["dy", "dlse"].contains(&name.as_ref()));
    let all = inputs.iter().chain(outputs.iter()).chain(cotangents);
    all.map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
}

fn same_nans<O: Op<Options = Options>>(options: &Options, inputs: &Named<Owned>, what: &str) {
    let expected = reference::<O>(options, inputs);
    for level in levels() {
        let got = run::<O>(options, inputs, &Exec { level, threads: 1 }).unwrap();
        for (name, expected) in expected.iter() {
            let (got, expected) = (nans(got.get(name).unwrap()), nans(expected));
            let apart = (0..got.len()).find(|&i| got[i] != expected[i]);
            assert_eq!(apart, None, "{name} of {} {}: {what}", O::NAME, level.name());
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, tensor: Owned| -> Error {
        let inputs = with(SMALL.inputs(Layout::HeadsFirst), name, tensor);
        run::<Attention>(&Options::default(), &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [
        ("q", &[2, 4, 5][..]),
        ("k", &[2, 3, 7, 3]),
        ("k", &[2, 0, 7, 3]),
        ("k", &[1, 2, 7, 3]),
        ("k", &[2, 2, 7, 4]),
        ("v", &[2, 2, 8, 6]),
        ("v", &[2, 4, 7, 6]),
        ("bias", &[2, 4, 5, 6]),
        ("bias", &[1, 2, 4, 5, 7]),
        ("bias", &[3, 1, 1, 1]),
    ] {
        let error = refused(name, check::noise(1, dims, 0.0, 1.0));
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "attention"), "{error}");
    }
    let error = refused("mask", mask(1, &[5, 6], 0.5));
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "mask"), "{error}");
    let error = refused("mask", check::noise(1, &[5, 7], 0.0, 1.0));
    assert_eq!((error.kind, &*error.argument), (Kind::DType, "mask"), "{error}");
    let error = refused("v", check::noise(1, &[2, 2, 7, 6], 0.0, 1.0).cast(DType::F16));
    assert_eq!((error.kind, &*error.argument), (Kind::DType, "v"), "{error}");
    let endless = Options { scale: Some(f64::NAN), ..Options::default() };
    let error = run::<Attention>(&endless, &SMALL.inputs(Layout::HeadsFirst), &Exec::default()).err().unwrap();
    assert_eq!((error.kind, &*error.argument), (Kind::Option, "scale"), "{error}");
    assert!(serde_json::from_str::<Options>(r#"{"window": 5}"#).is_err());
    assert!(serde_json::from_str::<Options>(r#"{"layout": "heads_between"}"#).is_err());
}

#[test]
fn wrong_gradients_say_what_is_wrong() {
    let inputs = SMALL.inputs(Layout::HeadsFirst);
    let inputs = check::backward_inputs::<Attention, AttentionBackward>(&Options::default(), &inputs);
    for (name, dims) in [("dy", &[2, 4, 5, 3][..]), ("y", &[2, 4, 6, 6]), ("lse", &[2, 4, 6]), ("dlse", &[2, 5, 4])] {
        let inputs = with(inputs.clone(), name, check::noise(1, dims, 0.0, 1.0));
        let error = run::<AttentionBackward>(&Options::default(), &inputs, &Exec::default()).err().unwrap();
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "attention_backward"), "{error}");
    }
}
