//! The gated norm and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::norm::gated::*;
use sidewinder_kernels::ops::norm::{RmsNorm, RmsOptions};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn inputs(dims: &[usize]) -> Named<Owned> {
    let width = *dims.last().unwrap();
    [("x", noise(1, dims, -2.0, 2.0)), ("z", noise(2, dims, -4.0, 4.0)), ("w", noise(3, &[width], -2.0, 2.0))]
        .into_iter()
        .collect()
}

/// Both orders of gate and norm. The gradient of a short part is a difference that grows with eps: with a small eps it
/// would be mostly rounding error.
fn options(groups: usize, columns: usize) -> [Options; 2] {
    let eps = if columns < 3 { 0.5 } else { 1e-5 };
    [false, true].map(|norm_before_gate| Options { eps, groups, norm_before_gate })
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for (width, groups) in [
        (1, &[1][..]),
        (2, &[1, 2]),
        (3, &[1, 3]),
        (31, &[1, 31]),
        (64, &[1, 2, 4, 64]),
        (65, &[1, 5, 13]),
        (257, &[1]),
        (1536, &[1, 3, 8, 512]),
    ] {
        for (&groups, rows) in groups.iter().flat_map(|groups| [1, 3, 40].map(|rows| (groups, rows))) {
            for options in options(groups, width / groups) {
                let inputs = inputs(&[rows, width]);
                check::agrees_everywhere::<GatedRmsNorm>(&options, &inputs);
                let inputs = check::backward_inputs::<GatedRmsNorm, GatedRmsNormBackward>(&options, &inputs);
                check::agrees_everywhere::<GatedRmsNormBackward>(&options, &inputs);
            }
        }
    }
}

#[test]
fn any_leading_axes_and_nothing_at_all_agree() {
    for dims in [&[6][..], &[0, 6], &[4, 0], &[2, 0, 6], &[2, 3, 6], &[2, 1, 3, 6]] {
        for options in options(3, 2) {
            let inputs = inputs(dims);
            check::agrees_everywhere::<GatedRmsNorm>(&options, &inputs);
            let inputs = check::backward_inputs::<GatedRmsNorm, GatedRmsNormBackward>(&options, &inputs);
            check::agrees_everywhere::<GatedRmsNormBackward>(&options, &inputs);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for groups in [1, 2] {
        for options in options(groups, 6 / groups) {
            let inputs = inputs(&[2, 6]);
            check::gradients_agree_with_differences::<GatedRmsNorm, GatedRmsNormBackward>(&options, &inputs);
        }
    }
}

/// `silu(z)` is `z` for large `z`, so a constant large gate only scales the norm of `x`.
#[test]
fn a_gate_that_is_a_number_scales_the_norm() {
    let dims = [5, 40];
    let mut all = inputs(&dims);
    all.take("z");
    all.push("z", Owned::from_fn(Spec::new(DType::F32, &dims).unwrap(), |_| 64.0));
    let norm: Named<Owned> = ["x", "w"].map(|name| (name, all.find(name).unwrap().clone())).into_iter().collect();
    for level in common::levels() {
        let exec = Exec { level, threads: 1 };
        let expected = common::run::<RmsNorm>(&RmsOptions { eps: 1e-30, ..Default::default() }, &norm, &exec).unwrap();
        for (norm_before_gate, factor) in [(false, 1.0), (true, 64.0)] {
            let options = Options { eps: 1e-30, norm_before_gate, ..Default::default() };
            let got = common::run::<GatedRmsNorm>(&options, &all, &exec).unwrap();
            let mut values = expected.get("y").unwrap().view().to_f64().into_iter();
            let scaled = Owned::from_fn(Spec::new(DType::F64, &dims).unwrap(), |_| factor * values.next().unwrap());
            let off = common::worst(got.get("y").unwrap(), &scaled, 1e-6, 1e-6);
            assert!(off <= 1.0, "off by {off} times the tolerance on {}", level.name());
        }
    }
}

#[test]
fn large_numbers_keep_their_digits() {
    let dims = [2, 4096];
    let mut huge = inputs(&dims);
    huge.take("x");
    huge.push("x", Owned::from_fn(Spec::new(DType::F32, &dims).unwrap(), |i| if i % 2 == 0 { 1e18 } else { -1e18 }));
    for options in options(2, 2048) {
        let truth = common::reference::<GatedRmsNorm>(&options, &huge);
        for level in common::levels() {
            let got = common::run::<GatedRmsNorm>(&options, &huge, &Exec { level, threads: 1 }).unwrap();
            common::assert_close(&got, &truth, level.name());
        }
    }
}

#[test]
fn nan_stays_in_its_part() {
    let dims = [3, 36];
    let mut inputs = inputs(&dims);
    let z = inputs.take("z").unwrap().view().to_f64();
    let mut values = z.iter().enumerate().map(|(i, &v)| if i == 50 { f64::NAN } else { v });
    inputs.push("z", Owned::from_fn(Spec::new(DType::F32, &dims).unwrap(), |_| values.next().unwrap()));
    for level in common::levels() {
        for options in options(3, 12) {
            let got = common::run::<GatedRmsNorm>(&options, &inputs, &Exec { level, threads: 1 }).unwrap();
            for (i, value) in got.get("y").unwrap().view().slice::<f32>().unwrap().iter().enumerate() {
                let there = if options.norm_before_gate { i == 50 } else { i / 12 == 50 / 12 };
                assert_eq!(value.is_nan(), there, "{i} on {}", level.name());
            }
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |options: Options| {
        let error = common::run::<GatedRmsNorm>(&options, &inputs(&[2, 6]), &Exec::default()).err().expect("a refusal");
        let backward =
            check::backward_inputs::<GatedRmsNorm, GatedRmsNormBackward>(&Options::default(), &inputs(&[2, 6]));
        let of_gradient = common::run::<GatedRmsNormBackward>(&options, &backward, &Exec::default()).err().unwrap();
        assert_eq!((error.kind, &*error.op), (Kind::Option, "gated_rms_norm"), "{error}");
        assert_eq!((of_gradient.kind, &*of_gradient.argument), (Kind::Option, &*error.argument), "{of_gradient}");
        (error.argument.to_string(), error.expected.to_string(), error.got.to_string())
    };
    let said = |words: [&str; 3]| words.map(String::from).into();
    let groups = |groups| Options { groups, ..Default::default() };
    assert_eq!(refused(groups(4)), said(["groups", "a divisor of 6", "4"]));
    assert_eq!(refused(groups(7)), said(["groups", "a divisor of 6", "7"]));
    assert_eq!(refused(groups(0)), said(["groups", "a positive number", "0"]));
    assert_eq!(refused(Options { eps: 0.0, ..Default::default() }), said(["eps", "a positive number", "0"]));
    for (name, dims) in [("z", &[2, 5][..]), ("z", &[6]), ("w", &[5])] {
        let mut wrong = inputs(&[2, 6]);
        wrong.take(name);
        wrong.push(name, noise(1, dims, 0.0, 1.0));
        let error = common::run::<GatedRmsNorm>(&Options::default(), &wrong, &Exec::default()).err().unwrap();
        assert_eq!((error.kind, &*error.argument), (Kind::Shape, name), "{error}");
    }
}

#[test]
fn any_number_of_rows_of_nothing_is_nothing() {
    let mut all = inputs(&[0]);
    for name in ["x", "z"] {
        all.take(name);
        all.push(name, Owned::from_fn(Spec::new(DType::F32, &[1 << 45, 0]).unwrap(), |_| 0.0));
    }
    for level in common::levels().chain([Level::Reference]) {
        let options = Options { groups: 1 << 40, ..Default::default() };
        common::run::<GatedRmsNorm>(&options, &all, &Exec { level, threads: 2 }).unwrap();
    }
}
