//! Mamba-2's scan and its gradient against their f64 references, other formulations and finite differences.

#[path = "../../src/ops/scan/ssd/cuda/chunks/shares.rs"]
mod shares;

use crate::common;
use crate::common::check::{self, noise};
use crate::common::ssd::{inputs, options};
use crate::common::{with, without};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{Named, named};
use sidewinder_kernels::ops::scan::selective_scan::{self, SelectiveScan};
use sidewinder_kernels::ops::scan::ssd::*;
use sidewinder_kernels::ops::scan::step_size::ClampGrad;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<Ssd>(options, inputs);
    let inputs = check::backward_inputs::<Ssd, SsdBackward>(options, inputs);
    check::agrees_everywhere::<SsdBackward>(options, &inputs);
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for sizes in [
        [1, 1, 1, 1, 1, 1],
        [2, 5, 2, 3, 1, 16],
        [1, 63, 4, 5, 2, 17],
        [2, 64, 3, 8, 3, 33],
        [1, 65, 2, 16, 1, 64],
        [1, 200, 12, 17, 2, 7],
        [1, 130, 1, 33, 1, 128],
        [1, 70, 10, 4, 1, 256],
    ] {
        agrees(&options(), &inputs(sizes));
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let all = inputs([2, 9, 4, 6, 2, 20]);
    for absent in [&["D"][..], &["z"], &["dt_bias"], &["initial_state"], &["D", "z", "dt_bias", "initial_state"]] {
        for options in [options(), Options::default()] {
            agrees(&options, &without(&all, absent));
        }
    }
    agrees(&options(), &with(&all, "D", noise(6, &[4, 6], -1.0, 1.0)));
}

#[test]
fn steps_are_clamped() {
    let all = inputs([1, 40, 3, 4, 1, 5]);
    for clamp_grad in [ClampGrad::Mask, ClampGrad::StraightThrough] {
        agrees(&Options { dt_clamp: Some((0.3, 0.8)), clamp_grad, ..options() }, &all);
    }
}

#[test]
fn sizes_of_zero_agree() {
    for sizes in [[0, 3, 2, 2, 1, 3], [2, 0, 2, 2, 1, 3], [2, 3, 0, 2, 1, 3], [2, 3, 2, 0, 1, 3], [2, 3, 2, 2, 1, 0]] {
        agrees(&options(), &inputs(sizes));
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let all = inputs([2, 5, 4, 2, 2, 3]);
    check::gradients_agree_with_differences::<Ssd, SsdBackward>(&options(), &all);
    let all = with(&all, "D", noise(6, &[4, 2], -1.0, 1.0));
    check::gradients_agree_with_differences::<Ssd, SsdBackward>(&Options { dt_softplus: false, ..options() }, &all);
}

/// Repeats each number `times` times.
fn repeated(of: &Owned, times: usize, dims: &[usize]) -> Owned {
    let values: Vec<f64> = of.view().to_f64().iter().copied().collect();
    Owned::from_fn(Spec::new(of.spec().dtype, dims).unwrap(), |i| values[i / times])
}

/// Equals Mamba's scan if all channels of a head get the head's step sizes and decays.
#[test]
fn it_is_a_selective_scan_of_channels_that_decay_alike() {
    let [batch, length, heads, width, groups, state] = [2, 70, 4, 5, 2, 9];
    let all = inputs([batch, length, heads, width, groups, state]);
    let channels = heads * width;
    let get = |name: &str| all.get(name).unwrap();
    let rows = [batch, length, channels];
    let scan = named([
        ("x", Some(repeated(get("x"), 1, &rows))),
        ("dt", Some(repeated(get("dt"), width, &rows))),
        ("A", Some(repeated(get("A"), width * state, &[channels, state]))),
        ("B", Some(get("B").clone())),
        ("C", Some(get("C").clone())),
        ("D", Some(repeated(get("D"), width, &[channels]))),
        ("z", Some(repeated(get("z"), 1, &rows))),
        ("dt_bias", Some(repeated(get("dt_bias"), width, &[channels]))),
        ("initial_state", Some(repeated(get("initial_state"), 1, &[batch, channels, state]))),
    ]);
    let of_scan = selective_scan::Options { dt_softplus: true, return_state: true, ..Default::default() };
    for level in common::levels() {
        let exec = Exec { level, threads: 1 };
        let got = common::run::<Ssd>(&options(), &all, &exec).unwrap();
        let expected = common::run::<SelectiveScan>(&of_scan, &scan, &exec).unwrap();
        for name in ["y", "last_state"] {
            let got = repeated(got.get(name).unwrap(), 1, &expected.get(name).unwrap().spec().shape);
            let off = common::worst(&got, expected.get(name).unwrap(), 2e-5, 2e-5);
            assert!(off <= 1.0, "{name} is off by {off} times the tolerance on {}", level.name());
        }
    }
}

/// The dual form: `y_i = sum_j (C_i . B_j) exp(delta_j+1 A + ... + delta_i A) delta_j x_j`, a masked matrix as in
/// attention.
#[test]
fn it_is_a_product_with_a_masked_matrix() {
    let [length, width, state] = [90, 3, 6];
    let all = without(&inputs([1, length, 1, width, 1, state]), &["D", "z", "dt_bias", "initial_state"]);
    let all = all.map(|tensor| tensor.cast(DType::F64));
    let numbers = |name: &str| all.get(name).unwrap().view().to_f64().iter().copied().collect::<Vec<_>>();
    let [x, dt, b, c] = ["x", "dt", "B", "C"].map(numbers);
    let a = numbers("A")[0];
    let delta: Vec<f64> = dt.iter().map(|v| v.exp().ln_1p()).collect();
    let expected = Owned::from_fn(Spec::new(DType::F64, &[1, length, 1, width]).unwrap(), |at| {
        let (i, p) = (at / width, at % width);
        let of_step = |j: usize| {
            let dot: f64 = (0..state).map(|n| c[i * state + n] * b[j * state + n]).sum();
            dot * (delta[j + 1..=i].iter().sum::<f64>() * a).exp() * delta[j] * x[j * width + p]
        };
        (0..=i).map(of_step).sum()
    });
    for level in common::levels().chain([Level::Reference]) {
        let got = common::run::<Ssd>(&options(), &all, &Exec { level, threads: 1 }).unwrap();
        let off = common::worst(got.get("y").unwrap(), &expected, 1e-10, 1e-12);
        assert!(off <= 1.0, "off by {off} times the tolerance on {}", level.name());
    }
}

/// A sequence in two calls, the second of which starts from the first's last state.
#[test]
fn a_sequence_may_be_cut_anywhere() {
    let length = 131;
    let all = inputs([2, length, 2, 18, 1, 40]);
    for level in common::levels() {
        let run = |inputs: &Named<Owned>| common::run::<Ssd>(&options(), inputs, &Exec { level, threads: 2 }).unwrap();
        let whole = run(&all);
        for cut in [1, 64, 100, 130] {
            let of_time = |range: std::ops::Range<usize>| -> Named<Owned> {
                let part = |name: &str, t: &Owned| match name {
                    "x" | "dt" | "B" | "C" | "z" => common::part(t, 1, range.clone()),
                    _ => t.clone(),
                };
                all.iter().map(|(name, t)| (name.clone(), part(name, t))).collect()
            };
            let first = run(&of_time(0..cut));
            let state = first.get("last_state").unwrap().clone();
            let second = run(&with(&of_time(cut..length), "initial_state", state));
            let y = whole.get("y").unwrap();
            for (got, range) in [(&first, 0..cut), (&second, cut..length)] {
                let off = common::worst(got.get("y").unwrap(), &common::part(y, 1, range), 1e-6, 1e-6);
                assert!(off <= 1.0, "y is off by {off} times the tolerance at {cut} on {}", level.name());
            }
            let (got, whole) = (second.get("last_state").unwrap(), whole.get("last_state").unwrap());
            assert!(common::worst(got, whole, 1e-6, 1e-6) <= 1.0, "last_state at {cut} on {}", level.name());
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let all = inputs([2, 3, 4, 5, 2, 6]);
    let refused = |options: &Options, inputs: &Named<Owned>| {
        let error = common::run::<Ssd>(options, inputs, &Exec::default()).err().expect("a refusal");
        assert_eq!(&*error.op, "ssd");
        (error.kind, error.argument.to_string(), error.expected.to_string(), error.got.to_string())
    };
    let said = |kind, words: [&str; 3]| (kind, words[0].into(), words[1].into(), words[2].into());
    let clamp = Options { dt_clamp: Some((1.0, 0.5)), ..options() };
    assert_eq!(refused(&clamp, &all), said(Kind::Option, ["dt_clamp", "a pair lo <= hi", "(1, 0.5)"]));
    let groups = |groups| {
        let states = noise(4, &[2, 3, groups, 6], -1.0, 1.0);
        with(&with(&all, "B", states.clone()), "C", states)
    };
    let expected = "a number of groups that divides 4 heads";
    assert_eq!(refused(&options(), &groups(3)), said(Kind::Shape, ["B", expected, "3 groups"]));
    assert_eq!(refused(&options(), &groups(0)), said(Kind::Shape, ["B", expected, "0 groups"]));
    let skip = with(&all, "D", noise(6, &[4, 6], -1.0, 1.0));
    assert_eq!(refused(&options(), &skip), said(Kind::Shape, ["D", "shape (4) or (4, 5)", "(4, 6)"]));
    for (name, dims) in [("dt", &[2, 3, 5][..]), ("A", &[5]), ("C", &[2, 3, 2, 7]), ("initial_state", &[2, 4, 6, 5])] {
        let (kind, argument, ..) = refused(&options(), &with(&all, name, noise(1, dims, -1.0, -0.5)));
        assert_eq!((kind, &*argument), (Kind::Shape, name));
    }
}

#[test]
fn blocks_of_the_gradient_fill_the_device() {
    use shares::shares;
    // Two waves of 132 blocks with all heads take less time than four with half of them.
    assert_eq!(shares([256, 1, 24], 132), [0, 24]);
    assert_eq!(shares([1, 1, 24], 132), [0, 1]);
    assert_eq!(shares([66, 1, 24], 132), [0, 12]);
    assert_eq!(shares([1, 1, 1], 132), [0, 1]);
    // What is left after two waves is divided.
    assert_eq!(shares([271, 1, 24], 132), [264, 2]);
}
