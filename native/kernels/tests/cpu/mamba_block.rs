//! The Mamba block and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::{cast, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops::layers::mamba_block::{MambaBlock, MambaBlockBackward, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn wanted() -> Options {
    Options { return_state: true, ..Options::default() }
}

/// The sizes of a block.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    length: usize,
    model: usize,
    inner: usize,
    state: usize,
    rank: usize,
    width: usize,
}

impl Sizes {
    fn new([batch, length, model, inner, state, rank, width]: [usize; 7]) -> Sizes {
        Sizes { batch, length, model, inner, state, rank, width }
    }

    /// Inputs in f32, with weights as at initialisation.
    fn inputs(&self, biases: bool, states: bool) -> Named<Owned> {
        let Sizes { batch, length, model, inner, state, rank, width } = *self;
        let root = |n: usize| 1.0 / (n.max(1) as f64).sqrt();
        let mut inputs: Named<Owned> = Named::default();
        let mut push = |name: &'static str, dims: &[usize], low: f64, high: f64| {
            inputs.push(name, noise(inputs.iter().count() as u64 + 1, dims, low, high));
        };
        push("x", &[batch, length, model], -2.0, 2.0);
        push("in_proj", &[2 * inner, model], -root(model), root(model));
        push("conv_w", &[inner, width], -root(width), root(width));
        push("x_proj", &[rank + 2 * state, inner], -root(inner), root(inner));
        push("dt_w", &[inner, rank], -root(rank), root(rank));
        push("dt_b", &[inner], -4.0, 0.0);
        push("A_log", &[inner, state], 0.0, 2.0);
        push("D", &[inner], 0.5, 1.5);
        push("out_proj", &[model, inner], -root(inner), root(inner));
        if biases {
            push("conv_b", &[inner], -0.5, 0.5);
            push("in_proj_b", &[2 * inner], -0.5, 0.5);
            push("out_proj_b", &[model], -0.5, 0.5);
        }
        if states {
            push("conv_state", &[batch, width - 1, inner], -1.0, 1.0);
            push("ssm_state", &[batch, inner, state], -1.0, 1.0);
        }
        inputs
    }
}

const SIZES: [[usize; 7]; 7] = [
    [1, 1, 1, 1, 1, 1, 4],
    [2, 5, 6, 12, 4, 1, 4],
    [1, 33, 8, 17, 16, 3, 3],
    [3, 2, 5, 7, 5, 2, 1],
    [0, 3, 4, 8, 4, 1, 4],
    [2, 0, 4, 8, 4, 1, 4],
    [1, 3, 4, 8, 0, 1, 4],
];

/// Intermediate tensors are rounded to the storage type after each step, so 16-bit results may be off by several
/// roundings of the largest value of their tensor.
fn near(got: &Named<Owned>, expected: &Named<Owned>, dtype: DType, what: &str) {
    let relative = match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 3e-5,
        DType::F16 => 8e-3,
        DType::Bf16 => 6e-2,
        _ => 0.0,
    };
    for (name, expected) in expected.iter() {
        let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
        let worst = worst(got.get(name).unwrap(), expected, 0.0, relative * largest);
        assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {what}");
    }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for (sizes, biases, states) in SIZES.iter().flat_map(|s| [(s, false, false), (s, true, true), (s, true, false)]) {
        let inputs = Sizes::new(*sizes).inputs(biases, states);
        let backward = check::backward_inputs::<MambaBlock, MambaBlockBackward>(&wanted(), &inputs);
        for dtype in DType::FLOATS {
            // In a tensor of one element, cancelling terms may leave less than their rounding errors.
            if dtype.size() == 2 && sizes[3] == 1 {
                continue;
            }
            let (inputs, backward) = (
                cast(op::about::<MambaBlock>(), &inputs, dtype),
                cast(op::about::<MambaBlockBackward>(), &backward, dtype),
            );
            let expected = common::reference::<MambaBlock>(&wanted(), &inputs);
            let gradients = common::reference::<MambaBlockBackward>(&wanted(), &backward);
            for level in common::levels() {
                let runs = [1, 2, 8].map(|threads| {
                    let exec = Exec { level, threads };
                    let got = common::run::<MambaBlock>(&wanted(), &inputs, &exec).unwrap();
                    let of = common::run::<MambaBlockBackward>(&wanted(), &backward, &exec).unwrap();
                    near(&got, &expected, dtype, &format!("{sizes:?} {dtype} {exec:?}"));
                    near(&of, &gradients, dtype, &format!("{sizes:?} {dtype} {exec:?}"));
                    common::bits(&got)
                });
                assert!(runs.iter().all(|bits| *bits == runs[0]), "{sizes:?} {dtype} {}", level.name());
            }
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (sizes, biases, states) in [
        ([2, 5, 3, 4, 3, 2, 4], true, true),
        ([1, 2, 2, 3, 2, 1, 4], false, false),
        ([1, 3, 2, 2, 1, 1, 1], true, true),
    ] {
        let inputs = Sizes::new(sizes).inputs(biases, states);
        check::gradients_agree_with_differences::<MambaBlock, MambaBlockBackward>(&wanted(), &inputs);
    }
}

fn cut(tensor: &Owned, range: std::ops::Range<usize>) -> Owned {
    let part = tensor.view().to_f64();
    let part = part.slice_axis(ndarray::Axis(1), range.into());
    let mut values = part.iter().copied();
    Owned::from_fn(Spec::new(tensor.spec().dtype, part.shape()).unwrap(), |_| values.next().unwrap())
}

#[test]
fn a_prefix_and_steps_equal_the_whole() {
    let sizes = Sizes::new([2, 13, 6, 12, 5, 2, 4]);
    let inputs = sizes.inputs(true, false);
    for (level, prefix) in common::levels().flat_map(|level| [1, 2, 7].map(|prefix| (level, prefix))) {
        let exec = Exec { level, threads: 1 };
        let whole = common::run::<MambaBlock>(&wanted(), &inputs, &exec).unwrap();
        let mut from = 0;
        let mut states: Named<Owned> = Named::default();
        while from < sizes.length {
            let to = if from == 0 { prefix } else { from + 1 };
            let mut part: Named<Owned> = inputs.iter().map(|(name, t)| (name.clone(), t.clone())).collect();
            let x = part.take("x").unwrap();
            part.push("x", cut(&x, from..to));
            for (name, state) in states {
                part.push(name, state);
            }
            let mut got = common::run::<MambaBlock>(&wanted(), &part, &exec).unwrap();
            let expected = [("y", cut(whole.get("y").unwrap(), from..to).cast(DType::F64))].into_iter().collect();
            near(&got, &expected, DType::F32, &format!("steps {from} to {to} on {}", level.name()));
            states = ["conv_state", "ssm_state"].map(|name| (name, got.take(name).unwrap())).into_iter().collect();
            from = to;
        }
        let last = ["conv_state", "ssm_state"].map(|name| (name, whole.get(name).unwrap().cast(DType::F64)));
        near(&states, &last.into_iter().collect(), DType::F32, level.name());
    }
}

#[test]
fn the_example_of_the_formula() {
    let tensor = |dims: &[usize], values: &[f64]| Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |i| values[i]);
    let inputs: Named<Owned> = [
        ("x", tensor(&[1, 2, 1], &[1.0, 2.0])),
        ("in_proj", tensor(&[2, 1], &[1.0, 0.5])),
        ("conv_w", tensor(&[1, 4], &[0.0, 0.0, 0.5, 1.0])),
        ("conv_b", tensor(&[1], &[0.0])),
        ("x_proj", tensor(&[3, 1], &[1.0; 3])),
        ("dt_w", tensor(&[1, 1], &[1.0])),
        ("dt_b", tensor(&[1], &[0.0])),
        ("A_log", tensor(&[1, 1], &[0.0])),
        ("D", tensor(&[1], &[1.0])),
        ("out_proj", tensor(&[1, 1], &[2.0])),
    ]
    .into_iter()
    .collect();
    let expected: Named<Owned> = [
        ("y", tensor(&[1, 2, 1], &[0.7284246, 46.9248692])),
        ("conv_state", tensor(&[1, 3, 1], &[0.0, 1.0, 2.0])),
        ("ssm_state", tensor(&[1, 1, 1], &[12.89128])),
    ]
    .into_iter()
    .collect();
    for &level in Level::available() {
        let got = common::run::<MambaBlock>(&wanted(), &inputs, &Exec { level, threads: 1 }).unwrap();
        near(&got, &expected, DType::F32, level.name());
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let sizes = Sizes::new([2, 3, 4, 8, 5, 2, 4]);
    let refused = |name: &'static str, dims: &[usize], options: &Options| -> Error {
        let mut inputs = sizes.inputs(true, true);
        if !name.is_empty() {
            inputs.take(name);
            inputs.push(name, noise(1, dims, 0.0, 1.0));
        }
        common::run::<MambaBlock>(options, &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [
        ("x", &[2, 3][..]),
        ("in_proj", &[8, 4]),
        ("conv_w", &[8, 0]),
        ("conv_w", &[7, 4]),
        ("conv_b", &[7]),
        ("x_proj", &[11, 8]),
        ("dt_w", &[8]),
        ("dt_b", &[9]),
        ("A_log", &[8]),
        ("D", &[7]),
        ("out_proj", &[8, 4]),
        ("in_proj_b", &[8]),
        ("out_proj_b", &[8]),
        ("conv_state", &[2, 4, 8]),
        ("ssm_state", &[2, 5, 8]),
    ] {
        let error = refused(name, dims, &wanted());
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "mamba_block"), "{error}");
    }
    for (name, options) in [
        ("expand", Options { expand: Some(3), ..wanted() }),
        ("d_state", Options { d_state: Some(16), ..wanted() }),
        ("dt_rank", Options { dt_rank: Some(1), ..wanted() }),
        ("d_conv", Options { d_conv: Some(3), ..wanted() }),
    ] {
        let error = refused("", &[], &options);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Option, name, "mamba_block"), "{error}");
    }
}
