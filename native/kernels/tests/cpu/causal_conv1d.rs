//! The causal convolution, its gradient and its step against their f64 references and finite
//! differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::causal_conv1d::update::{self, CausalConv1dUpdate};
use sidewinder_kernels::ops::causal_conv1d::{Activation, CausalConv1d, CausalConv1dBackward, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn options(silu: bool) -> Options {
    Options { activation: silu.then_some(Activation::Silu), return_state: true }
}

/// Sizes are B, L, D and W.
fn inputs([batch, length, channels, width]: [usize; 4], bias: bool, state: bool) -> Named<Owned> {
    let mut inputs = check::inputs(&[("x", &[batch, length, channels]), ("w", &[channels, width])]);
    if bias {
        inputs.push("bias", noise(7, &[channels], -1.0, 1.0));
    }
    if state {
        inputs.push("initial_state", noise(8, &[batch, width - 1, channels], -1.0, 1.0));
    }
    inputs
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let sizes = [
        [1, 1, 1, 1],
        [2, 1, 3, 4],
        [1, 2, 17, 4],
        [2, 7, 31, 3],
        [1, 63, 16, 2],
        [2, 64, 5, 4],
        [1, 65, 33, 4],
        [1, 200, 9, 1],
        [3, 5, 19, 7],
        [1, 3, 8, 70],
        [1, 130, 3, 67],
        [1, 9, 1100, 4],
        [0, 3, 4, 4],
        [2, 0, 5, 4],
        [2, 0, 5, 1],
        [2, 3, 0, 4],
    ];
    for (i, sizes) in sizes.into_iter().enumerate() {
        for (bias, state) in [(false, false), (true, true), (i % 2 == 0, i % 2 == 1)] {
            let (options, inputs) = (options(i % 3 != 0), inputs(sizes, bias, state));
            check::agrees_everywhere::<CausalConv1d>(&options, &inputs);
            let backward = check::backward_inputs::<CausalConv1d, CausalConv1dBackward>(&options, &inputs);
            check::agrees_everywhere::<CausalConv1dBackward>(&options, &backward);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (sizes, bias, state) in [
        ([1, 1, 1, 1], true, false),
        ([2, 5, 3, 4], true, true),
        ([1, 2, 2, 4], false, true),
        ([2, 9, 2, 3], true, false),
    ] {
        for silu in [false, true] {
            check::gradients_agree_with_differences::<CausalConv1d, CausalConv1dBackward>(
                &options(silu),
                &inputs(sizes, bias, state),
            );
        }
    }
}

#[test]
fn without_the_cotangent_of_the_state_it_is_zero() {
    let inputs = inputs([2, 7, 19, 4], true, true);
    let options = Options { return_state: false, ..options(true) };
    let backward = check::backward_inputs::<CausalConv1d, CausalConv1dBackward>(&options, &inputs);
    assert!(backward.find("dlast_state").is_none());
    check::agrees_everywhere::<CausalConv1dBackward>(&options, &backward);
}

fn values(of: &Named<Owned>, name: &str) -> Vec<f64> {
    of.get(name).unwrap().view().to_f64().into_raw_vec_and_offset().0
}

fn tensor(dims: &[usize], values: &[f64]) -> Owned {
    Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |i| values[i])
}

#[test]
fn the_example_of_the_formula() {
    let w = || tensor(&[1, 4], &[0.1, 0.2, 0.3, 0.4]);
    let near = |got: &[f64], expected: &[f64]| {
        assert!(got.len() == expected.len() && got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-6), "{got:?}");
    };
    for &level in Level::available() {
        let exec = Exec { level, threads: 1 };
        let x = tensor(&[1, 3, 1], &[1.0, 2.0, 3.0]);
        let given: Named<Owned> = [("x", x.clone()), ("w", w())].into_iter().collect();
        let got = common::run::<CausalConv1d>(&options(false), &given, &exec).unwrap();
        near(&values(&got, "y"), &[0.4, 1.1, 2.0]);
        assert_eq!(values(&got, "last_state"), [1.0, 2.0, 3.0]);
        let state = got.get("last_state").unwrap().clone();
        let next = [("x", tensor(&[1, 1], &[4.0])), ("initial_state", state), ("w", w())].into_iter().collect();
        let got = common::run::<CausalConv1dUpdate>(&Default::default(), &next, &exec).unwrap();
        near(&values(&got, "y"), &[3.0]);
        assert_eq!(values(&got, "last_state"), [2.0, 3.0, 4.0]);
        let biased = [("x", x), ("w", w()), ("bias", tensor(&[1], &[0.5]))].into_iter().collect();
        let got = common::run::<CausalConv1d>(&options(true), &biased, &exec).unwrap();
        near(&values(&got, "y"), &[0.639854552, 1.33122942, 2.31035455]);
    }
}

/// Steps `range` of a tensor (B, L, D); for a single step without the time axis.
fn cut(tensor: &Owned, range: std::ops::Range<usize>) -> Owned {
    let part = tensor.view().to_f64();
    let part = part.slice_axis(ndarray::Axis(1), range.clone().into());
    let dims: Vec<usize> =
        part.shape().iter().enumerate().filter(|&(i, _)| i != 1 || range.len() != 1).map(|(_, &d)| d).collect();
    let mut values = part.iter().copied();
    Owned::from_fn(Spec::new(tensor.spec().dtype, &dims).unwrap(), |_| values.next().unwrap())
}

#[test]
fn a_prefix_and_steps_equal_the_whole() {
    let inputs = inputs([2, 13, 21, 4], true, true);
    let update = update::Options { activation: Some(Activation::Silu) };
    for (level, prefix) in common::levels().flat_map(|level| [0, 2, 5].map(|prefix| (level, prefix))) {
        let exec = Exec { level, threads: 1 };
        let whole = common::run::<CausalConv1d>(&options(true), &inputs, &exec).unwrap();
        let with = |x: Owned, state: &Owned, name: &'static str| -> Named<Owned> {
            let mut some: Named<Owned> = [("x", x), (name, state.clone())].into_iter().collect();
            some.push("w", inputs.get("w").unwrap().clone());
            some.push("bias", inputs.get("bias").unwrap().clone());
            some
        };
        let x = inputs.get("x").unwrap();
        let first = with(cut(x, 0..prefix), inputs.get("initial_state").unwrap(), "initial_state");
        let first = common::run::<CausalConv1d>(&options(true), &first, &exec).unwrap();
        let mut state = first.get("last_state").unwrap().clone();
        for t in prefix..13 {
            let step = with(cut(x, t..t + 1), &state, "initial_state");
            let step = common::run::<CausalConv1dUpdate>(&update, &step, &exec).unwrap();
            let expected = cut(whole.get("y").unwrap(), t..t + 1);
            assert_eq!(step.get("y").unwrap().view().bytes(), expected.view().bytes(), "step {t} on {}", level.name());
            state = step.get("last_state").unwrap().clone();
        }
        assert_eq!(values(&[("s", state)].into_iter().collect(), "s"), values(&whole, "last_state"));
    }
}

#[test]
fn a_step_agrees_in_every_type() {
    for (batch, channels, width) in [(1, 1, 1), (3, 17, 4), (2, 33, 2), (0, 4, 4), (2, 5, 9)] {
        let mut inputs = check::inputs(&[
            ("x", &[batch, channels]),
            ("initial_state", &[batch, width - 1, channels]),
            ("w", &[channels, width]),
        ]);
        check::agrees_everywhere::<CausalConv1dUpdate>(&Default::default(), &inputs);
        inputs.push("bias", noise(3, &[channels], -1.0, 1.0));
        let silu = update::Options { activation: Some(Activation::Silu) };
        check::agrees_everywhere::<CausalConv1dUpdate>(&silu, &inputs);
    }
}

/// An infinity past the end of a short sequence must not be multiplied by zero.
#[test]
fn infinite_samples_stay_in_their_channel() {
    let mut inputs = inputs([1, 2, 20, 4], true, true);
    let x = inputs.take("x").unwrap().view().to_f64();
    let mut of_x = x.indexed_iter().map(|(at, &v)| if at[2] == 7 { f64::INFINITY } else { v });
    inputs.push("x", Owned::from_fn(Spec::new(DType::F32, &[1, 2, 20]).unwrap(), |_| of_x.next().unwrap()));
    let backward = check::backward_inputs::<CausalConv1d, CausalConv1dBackward>(&options(false), &inputs);
    check::agrees_everywhere::<CausalConv1dBackward>(&options(false), &backward);
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, dims: &[usize]| -> Error {
        let mut inputs = inputs([2, 3, 4, 3], true, true);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<CausalConv1d>(&options(true), &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [
        ("x", &[2, 3][..]),
        ("w", &[5, 3]),
        ("w", &[4, 0]),
        ("w", &[4]),
        ("bias", &[3]),
        ("initial_state", &[2, 3, 4]),
        ("initial_state", &[1, 2, 4]),
    ] {
        let error = refused(name, dims);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "causal_conv1d"), "{error}");
    }
    let update = check::inputs(&[("x", &[2, 4]), ("initial_state", &[2, 3, 4]), ("w", &[4, 3])]);
    let error = common::run::<CausalConv1dUpdate>(&Default::default(), &update, &Exec::default()).err().unwrap();
    assert_eq!((&*error.argument, &*error.op), ("initial_state", "causal_conv1d_update"), "{error}");
    assert!(serde_json::from_str::<Options>(r#"{"activation": "gelu"}"#).is_err());
}
