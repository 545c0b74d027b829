//! Decoding over a cache of keys and values, against one causal pass over all tokens, and the layers that use it.

use crate::common;
use crate::common::check::noise;
use crate::common::{cast, part, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::attention::decode::{self, Decode};
use sidewinder_kernels::ops::attention::{self, Attention, Layout};
use sidewinder_kernels::ops::layers::mha::{self, Mha};
use sidewinder_kernels::ops::layers::transformer_block::{self, TransformerBlock};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Runs an op on a cache that it changes in place.
fn in_place<O: Op>(options: &O::Options, inputs: &Named<Owned>, cache: &mut [Owned; 2], exec: &Exec) -> Result<Owned> {
    let [keys, values] = cache;
    let mut all = op::specs(inputs);
    all.push("keys", keys.spec());
    all.push("values", values.spec());
    let mut y = Owned::poisoned(*ops::call::<O>(all, options)?.outputs().get("y")?);
    let outputs = [("y", y.view_mut()), ("keys", keys.view_mut()), ("values", values.view_mut())];
    op::run_cpu::<O>(options, &inputs.map(Owned::view), outputs.into_iter().collect(), exec)?;
    Ok(y)
}

/// A cache with a capacity of `room` rows, all NaN.
fn cache(dtype: DType, [batch, heads, room]: [usize; 3], widths: [usize; 2]) -> [Owned; 2] {
    widths.map(|width| Owned::poisoned(Spec::new(dtype, &[batch, heads, room, width]).unwrap()))
}

/// Checks results within the tolerance: rows are equal sums in another order, and each is rounded.
fn near(got: &Owned, expected: &Owned, what: &str) {
    let dtype = expected.spec().dtype;
    let relative = match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        DType::F16 => 4e-3,
        _ => 3e-2,
    };
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    let worst = worst(got, expected, 0.0, relative * largest);
    assert!(worst <= 1.0, "off by {worst} times the tolerance: {what}");
}

struct Case {
    layout: Layout,
    heads: [usize; 2],
    widths: [usize; 2],
    length: usize,
    bias: bool,
    /// Numbers of tokens per step, repeated cyclically.
    steps: &'static [usize],
}

const BATCH: usize = 2;

impl Case {
    fn rows(&self) -> usize {
        if self.layout == Layout::HeadsFirst { 2 } else { 1 }
    }

    fn inputs(&self) -> Named<Owned> {
        let tensor = |seed, heads, width| {
            let dims = match self.layout {
                Layout::HeadsFirst => [BATCH, heads, self.length, width],
                Layout::HeadsLast => [BATCH, self.length, heads, width],
            };
            noise(seed, &dims, -1.0, 1.0)
        };
        let ([heads, key_heads], [width, value_width]) = (self.heads, self.widths);
        let of = [tensor(1, heads, width), tensor(2, key_heads, width), tensor(3, key_heads, value_width)];
        let mut inputs: Named<Owned> = ["q", "k", "v"].into_iter().zip(of).collect();
        if self.bias {
            inputs.push("bias", noise(4, &[heads, 1, self.length], -1.0, 1.0));
            let mask = Spec::new(DType::U8, &[BATCH, 1, 1, self.length]).unwrap();
            inputs.push("mask", Owned::from_fn(mask, |i| f64::from(i % 5 != 1)));
        }
        inputs
    }

    /// The inputs for a range of tokens.
    fn step(&self, all: &Named<Owned>, range: std::ops::Range<usize>) -> Named<Owned> {
        let each = all.iter().map(|(name, tensor)| {
            let axis = tensor.spec().shape.len() - 1;
            let part = match &**name {
                "bias" | "mask" => part(tensor, axis, 0..range.end),
                _ => part(tensor, self.rows(), range.clone()),
            };
            (name.clone(), part)
        });
        each.collect()
    }

    fn check(&self, dtype: DType, exec: &Exec) {
        let inputs = cast(op::about::<Attention>(), &self.inputs(), dtype);
        let whole = attention::Options { causal: true, layout: self.layout, ..Default::default() };
        let expected = common::run::<Attention>(&whole, &inputs, exec).unwrap();
        let expected = expected.get("y").unwrap();
        let mut held = cache(dtype, [BATCH, self.heads[1], self.length + 3], self.widths);
        let mut cached = 0;
        for &new in self.steps.iter().cycle() {
            let range = cached..self.length.min(cached + new);
            let options = decode::Options { cached, layout: self.layout, ..Default::default() };
            let given = self.step(&inputs, range.clone());
            let mut with_cache = given.clone();
            with_cache.push("keys", held[0].clone());
            with_cache.push("values", held[1].clone());
            let pure = common::run::<Decode>(&options, &with_cache, exec).unwrap();
            let y = in_place::<Decode>(&options, &given, &mut held, exec).unwrap();
            let what = format!("{dtype} {exec:?} rows {range:?} of {}", self.length);
            near(&y, &part(expected, self.rows(), range.clone()), &what);
            for (name, held) in [("y", &y), ("keys", &held[0]), ("values", &held[1])] {
                let bytes = |tensor: &Owned| tensor.view().bytes().to_vec();
                assert_eq!(bytes(pure.get(name).unwrap()), bytes(held), "{name}, {what}");
            }
            cached = range.end;
            if cached == self.length {
                break;
            }
        }
        let kept = if self.layout == Layout::HeadsFirst { inputs.get("k").unwrap().clone() } else { return };
        assert_eq!(part(&held[0], 2, 0..self.length).view().bytes(), kept.view().bytes());
    }
}

#[test]
fn tokens_one_by_one_equal_one_causal_pass() {
    let (first, last) = (Layout::HeadsFirst, Layout::HeadsLast);
    for case in [
        Case { layout: first, heads: [4, 2], widths: [16, 16], length: 37, bias: false, steps: &[1] },
        Case { layout: last, heads: [3, 3], widths: [7, 5], length: 29, bias: false, steps: &[5, 1, 1] },
        Case { layout: first, heads: [6, 1], widths: [33, 17], length: 75, bias: true, steps: &[70, 1] },
        Case { layout: last, heads: [2, 2], widths: [64, 64], length: 131, bias: true, steps: &[64, 1, 3] },
        Case { layout: first, heads: [1, 1], widths: [1, 1], length: 1, bias: false, steps: &[1] },
    ] {
        for dtype in DType::FLOATS {
            for level in common::levels() {
                case.check(dtype, &Exec { level, threads: 2 });
            }
        }
        case.check(DType::F32, &Exec { level: Level::Reference, threads: 1 });
    }
}

/// Inputs of a layer over `length` tokens, in f32.
fn layer<O: Op>(length: usize, width: usize, hidden: usize) -> Named<Owned> {
    let slots = O::INPUTS.iter().filter(|slot| !["mask", "keys", "values"].contains(&slot.name));
    let each = slots.zip(1..).map(|(slot, seed)| {
        let dims = match slot.shape.words {
            "(B, L, D)" => vec![BATCH, length, width],
            "(3D, D)" => vec![3 * width, width],
            "(D, D)" => vec![width, width],
            "(F, D)" => vec![hidden, width],
            "(D, F)" => vec![width, hidden],
            "(D)" => vec![width],
            other => panic!("no sizes for {other}"),
        };
        let bound = if dims.len() == 2 { 1.0 / (dims[1] as f64).sqrt() } else { 1.0 };
        (slot.name, noise(seed, &dims, -bound, bound))
    });
    each.collect()
}

const LENGTH: usize = 21;
const HEADS: usize = 4;

/// Runs a layer at once, and in steps over a cache: the rows must be equal.
fn goes_on<O: Op>(options: impl Fn(usize) -> O::Options) {
    let inputs = layer::<O>(LENGTH, 24, 20);
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<O>(), &inputs, dtype);
        for level in common::levels() {
            let exec = Exec { level, threads: 2 };
            let expected = common::run::<O>(&options(0), &inputs, &exec).unwrap();
            let mut held = cache(dtype, [BATCH, HEADS, LENGTH], [6, 6]);
            for range in [0..9, 9..10, 10..11, 11..20, 20..LENGTH] {
                let mut step = inputs.clone();
                let x = step.take("x").unwrap();
                step.push("x", part(&x, 1, range.clone()));
                let y = in_place::<O>(&options(range.start), &step, &mut held, &exec).unwrap();
                let what = format!("{} {dtype} {exec:?} {range:?}", O::NAME);
                near(&y, &part(expected.get("y").unwrap(), 1, range), &what);
            }
        }
    }
}

#[test]
fn layers_go_on_where_they_stopped() {
    let of_layer =
        |cached| mha::Options { heads: HEADS, causal: true, rope_theta: Some(1e4), cached, ..Default::default() };
    goes_on::<Mha>(of_layer);
    goes_on::<TransformerBlock>(|cached| {
        let mha::Options { heads, causal, rope_theta, pairing, .. } = of_layer(cached);
        transformer_block::Options { heads, causal, rope_theta, pairing, cached, eps: 1e-5 }
    });
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let case = Case { layout: Layout::HeadsFirst, heads: [4, 2], widths: [8, 6], length: 3, bias: true, steps: &[3] };
    let refused = |cached, room, change: &dyn Fn(&mut Named<Owned>)| {
        let mut inputs = case.inputs();
        let [keys, values] = cache(DType::F32, [BATCH, 2, room], case.widths);
        inputs.push("keys", keys);
        inputs.push("values", values);
        change(&mut inputs);
        let options = decode::Options { cached, ..Default::default() };
        common::run::<Decode>(&options, &inputs, &Exec::default()).err().expect("a refusal")
    };
    let other = |name: &'static str, dims: &'static [usize]| {
        move |inputs: &mut Named<Owned>| {
            let dtype = inputs.take(name).unwrap().spec().dtype;
            inputs.push(name, Owned::poisoned(Spec::new(dtype, dims).unwrap()));
        }
    };
    for (cached, room) in [(1, 3), (0, 2), (usize::MAX, 8), (usize::MAX - 2, 8)] {
        let error = refused(cached, room, &|_| ());
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Option, "cached", "decode"), "{error}");
    }
    for (name, dims) in [
        ("k", &[2, 2, 4, 8][..]),
        ("v", &[2, 2, 3, 8]),
        ("q", &[2, 4, 3]),
        ("keys", &[2, 2, 8]),
        ("values", &[2, 2, 7, 6]),
        ("mask", &[2, 1, 1, 4]),
    ] {
        let error = refused(0, 8, &other(name, dims));
        assert_eq!((error.kind, &*error.argument), (Kind::Shape, name), "{error}");
    }
    let error = refused(0, 8, &other("q", &[2, 3, 3, 8]));
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "keys"), "{error}");
    let error = refused(0, 8, &|inputs| drop(inputs.take("values")));
    assert_eq!((error.kind, &*error.argument), (Kind::Argument, "values"), "{error}");

    let of_layer = |inputs: &Named<Owned>, cached| {
        let options = mha::Options { heads: HEADS, cached, ..Default::default() };
        common::run::<Mha>(&options, inputs, &Exec::default()).err().expect("a refusal")
    };
    let mut inputs = layer::<Mha>(3, 24, 1);
    assert_eq!(&*of_layer(&inputs, 1).argument, "cached");
    inputs.push("keys", cache(DType::F32, [BATCH, HEADS, 4], [6, 6])[0].clone());
    assert_eq!(&*of_layer(&inputs, 0).argument, "values");
}
