//! The linear recurrence and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::linear_scan::{LinearScan, LinearScanBackward, Options};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

const RETURN: Options = Options { return_state: true };

fn inputs(batch: usize, length: usize, channels: usize, initial: bool) -> Named<Owned> {
    let mut inputs: Named<Owned> = [
        ("a", noise(1, &[batch, length, channels], -1.1, 1.0)),
        ("b", noise(2, &[batch, length, channels], -1.0, 1.0)),
    ]
    .into_iter()
    .collect();
    if initial {
        inputs.push("initial_state", noise(3, &[batch, channels], -2.0, 2.0));
    }
    inputs
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for (batch, length, channels) in
        [(1, 1, 1), (2, 3, 5), (1, 17, 16), (3, 33, 31), (2, 8, 97), (1, 40, 2051), (0, 3, 4), (2, 0, 5), (2, 3, 0)]
    {
        for initial in [false, true] {
            let inputs = inputs(batch, length, channels, initial);
            check::agrees_everywhere::<LinearScan>(&RETURN, &inputs);
            let backward = check::backward_inputs::<LinearScan, LinearScanBackward>(&RETURN, &inputs);
            check::agrees_everywhere::<LinearScanBackward>(&RETURN, &backward);
        }
    }
}

#[test]
fn without_the_cotangent_of_the_state_it_is_zero() {
    let inputs = inputs(2, 7, 19, true);
    let backward = check::backward_inputs::<LinearScan, LinearScanBackward>(&Options::default(), &inputs);
    assert!(backward.find("dlast_state").is_none());
    check::agrees_everywhere::<LinearScanBackward>(&Options::default(), &backward);
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (batch, length, channels, initial) in [(1, 1, 1, true), (2, 5, 3, true), (1, 9, 2, false)] {
        let inputs = inputs(batch, length, channels, initial);
        check::gradients_agree_with_differences::<LinearScan, LinearScanBackward>(&RETURN, &inputs);
    }
}

/// Decays within 1e-4 of 1 over 65536 steps, so that states are sums over thousands of steps.
#[test]
fn length_65536_keeps_its_accuracy() {
    let (length, channels) = (65536, 3);
    let mut inputs = inputs(1, length, channels, true);
    inputs.take("a");
    inputs.push("a", noise(4, &[1, length, channels], 0.9999, 1.0));
    let backward = check::backward_inputs::<LinearScan, LinearScanBackward>(&RETURN, &inputs);
    let forward_truth = common::reference::<LinearScan>(&RETURN, &inputs);
    let backward_truth = common::reference::<LinearScanBackward>(&RETURN, &backward);
    for level in common::levels() {
        let exec = Exec { level, threads: 8 };
        let forward = common::run::<LinearScan>(&RETURN, &inputs, &exec).unwrap();
        common::assert_close(&forward, &forward_truth, level.name());
        let backward = common::run::<LinearScanBackward>(&RETURN, &backward, &exec).unwrap();
        common::assert_close(&backward, &backward_truth, level.name());
    }
}

#[test]
fn the_example_of_the_formula_is_exact() {
    let row = |values: [f64; 4]| Owned::from_fn(Spec::new(DType::F32, &[1, 4, 1]).unwrap(), |i| values[i]);
    let given = [("a", row([0.5; 4])), ("b", row([1.0; 4]))].into_iter().collect();
    let inputs = [
        ("a", row([0.5; 4])),
        ("h", row([1.0, 1.5, 1.75, 1.875])),
        ("initial_state", Owned::from_fn(Spec::new(DType::F32, &[1, 1]).unwrap(), |_| 0.0)),
        ("dh", row([1.0; 4])),
    ];
    for &level in Level::available() {
        let exec = Exec { level, threads: 1 };
        let forward = common::run::<LinearScan>(&Options::default(), &given, &exec).unwrap();
        let inputs = inputs.iter().map(|(name, tensor)| (*name, tensor.clone())).collect();
        let backward = common::run::<LinearScanBackward>(&Options::default(), &inputs, &exec).unwrap();
        let values = |of: &Named<Owned>, name| of.get(name).unwrap().view().to_f64().into_raw_vec_and_offset().0;
        assert_eq!(values(&forward, "h"), [1.0, 1.5, 1.75, 1.875]);
        assert_eq!(values(&backward, "da"), [0.0, 1.75, 2.25, 1.75]);
        assert_eq!(values(&backward, "db"), [1.875, 1.75, 1.5, 1.0]);
        assert_eq!(values(&backward, "dinitial_state"), [0.9375]);
    }
}

#[test]
fn nan_stays_in_its_channel_and_batch() {
    let mut inputs = inputs(2, 9, 37, true);
    let a = inputs.take("a").unwrap().view().to_f64();
    let mut values = a.indexed_iter().map(|(at, &v)| if (at[0], at[1], at[2]) == (1, 4, 18) { f64::NAN } else { v });
    inputs.push("a", Owned::from_fn(Spec::new(DType::F32, &[2, 9, 37]).unwrap(), |_| values.next().unwrap()));
    for level in common::levels() {
        let got = common::run::<LinearScan>(&RETURN, &inputs, &Exec { level, threads: 1 }).unwrap();
        for (at, value) in got.get("h").unwrap().view().to_f64().indexed_iter() {
            assert_eq!(value.is_nan(), at[0] == 1 && at[2] == 18 && at[1] >= 4, "{at:?} on {}", level.name());
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, dims: &[usize]| -> Error {
        let mut inputs = inputs(2, 3, 4, true);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<LinearScan>(&RETURN, &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in
        [("a", &[2, 3][..]), ("b", &[2, 3, 5]), ("b", &[2, 3]), ("initial_state", &[2, 5]), ("initial_state", &[4])]
    {
        let error = refused(name, dims);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "linear_scan"), "{error}");
    }
    assert_eq!(refused("c", &[1]).kind, Kind::Argument);
    assert!(serde_json::from_str::<Options>(r#"{"return_states": true}"#).is_err());
}
