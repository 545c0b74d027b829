//! The scan against the f64 reference on every level, in every element type and for odd shapes, and its other
//! documented properties.

use crate::common;
use crate::common::scans::{Call, Varies, calls};
use crate::common::{assert_close, assert_close_for, bits, levels, reference};
use proptest::prelude::*;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops::scan::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::ops::scan::selective_state_update::SelectiveStateUpdate;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View};

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn every_level_and_type_agrees_with_the_reference(call in calls()) {
        for dtype in DType::FLOATS {
            let inputs = common::cast(op::about::<SelectiveScan>(), &call.inputs(), dtype);
            let expected = reference::<SelectiveScan>(&call.options, &inputs);
            let sizes = call.sizes::<SelectiveScan>(&inputs, &expected, &["x", "initial_state"]);
            for level in levels() {
                for threads in [1, 3, 16] {
                    let exec = Exec { level, threads };
                    let got = common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap();
                    assert_close_for(&sizes, &got, &expected, &format!("{call:?} {dtype} {exec:?}"));
                }
            }
        }
    }
}

#[test]
fn long_sequences_in_chunks_agree_and_repeat_to_the_bit() {
    for (channels, state, b) in [(1, 16, Varies::PerStep), (3, 5, Varies::PerGroup(3)), (20, 4, Varies::Constant)] {
        let call = Call { b, optional: [true; 4], ..Call::plain(1, 1500, channels, state) };
        let inputs = call.inputs();
        let expected = reference::<SelectiveScan>(&call.options, &inputs);
        for level in levels() {
            for threads in [1, 2, 7, 16] {
                let exec = Exec { level, threads };
                let first = common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap();
                let second = common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap();
                assert_close(&first, &expected, &format!("{exec:?}"));
                assert_eq!(bits(&first), bits(&second), "{exec:?}");
            }
        }
    }
}

#[test]
fn length_65536_keeps_its_accuracy() {
    let call = Call { optional: [true; 4], ..Call::plain(1, 65536, 2, 16) };
    let inputs = call.inputs();
    let expected = reference::<SelectiveScan>(&call.options, &inputs);
    for level in levels() {
        for threads in [1, 8] {
            let exec = Exec { level, threads };
            assert_close(
                &common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap(),
                &expected,
                level.name(),
            );
        }
    }
}

#[test]
fn large_states_agree() {
    for state in [64, 128, 256, 300] {
        let call = Call::plain(2, 9, 19, state);
        let inputs = call.inputs();
        let expected = reference::<SelectiveScan>(&call.options, &inputs);
        for level in levels() {
            let exec = Exec { level, threads: 2 };
            assert_close(
                &common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap(),
                &expected,
                level.name(),
            );
        }
    }
}

/// Rows `range` of the second axis.
fn cut(tensor: &Owned, range: std::ops::Range<usize>) -> Owned {
    let spec = tensor.spec();
    let values = tensor.view().to_f64();
    let part = values.slice_axis(ndarray::Axis(1), ndarray::Slice::from(range));
    let values: Vec<f64> = part.iter().copied().collect();
    Owned::from_fn(Spec::new(spec.dtype, part.shape()).unwrap(), |i| values[i])
}

#[test]
fn a_sequence_split_anywhere_carries_its_state() {
    let call = Call { optional: [true; 4], ..Call::plain(2, 17, 21, 5) };
    let inputs = call.inputs();
    let timed = ["x", "dt", "B", "C", "z"];
    for level in levels() {
        let exec = Exec { level, threads: 1 };
        let run = |inputs: &Named<Owned>| common::run::<SelectiveScan>(&call.options, inputs, &exec).unwrap();
        let whole = run(&inputs);
        for at in 0..=17 {
            let part = |range: std::ops::Range<usize>| -> Named<Owned> {
                let cut = |name: &op::Name, t: &Owned| {
                    if timed.contains(&name.as_ref()) { cut(t, range.clone()) } else { t.clone() }
                };
                inputs.iter().map(|(name, t)| (name.clone(), cut(name, t))).collect()
            };
            let first = run(&part(0..at));
            let mut rest = part(at..17);
            rest.take("initial_state");
            rest.push("initial_state", first.get("last_state").unwrap().clone());
            let second = run(&rest);
            let expected: Named<Owned> = [
                ("y", cut(whole.get("y").unwrap(), at..17).cast(DType::F64)),
                ("last_state", whole.get("last_state").unwrap().cast(DType::F64)),
            ]
            .into_iter()
            .collect();
            assert_close(&second, &expected, &format!("split at {at} on {}", level.name()));
        }
    }
}

#[test]
fn steps_one_by_one_equal_the_scan() {
    let call = Call { b: Varies::PerGroup(3), optional: [true; 4], ..Call::plain(2, 33, 21, 16) };
    let inputs = call.inputs();
    for level in levels() {
        let exec = Exec { level, threads: 1 };
        let whole = common::run::<SelectiveScan>(&call.options, &inputs, &exec).unwrap();
        let mut state = inputs.get("initial_state").unwrap().clone();
        for t in 0..33 {
            let step: Named<Owned> = inputs
                .iter()
                .filter(|(name, _)| *name != "initial_state")
                .map(|(name, tensor)| {
                    let timed = ["x", "dt", "B", "C", "z"].contains(&name.as_ref());
                    (name.clone(), if timed { without_time(&cut(tensor, t..t + 1)) } else { tensor.clone() })
                })
                .chain([("initial_state".into(), state)])
                .collect();
            let mut result = common::run::<SelectiveStateUpdate>(&Default::default(), &step, &exec).unwrap();
            let expected = without_time(&cut(whole.get("y").unwrap(), t..t + 1)).cast(DType::F64);
            let y = result.take("y").unwrap();
            assert_close(
                &[("y", y)].into_iter().collect(),
                &[("y", expected)].into_iter().collect(),
                &format!("step {t} on {}", level.name()),
            );
            state = result.take("last_state").unwrap();
        }
    }
}

fn without_time(tensor: &Owned) -> Owned {
    let spec = tensor.spec();
    let dims: Vec<usize> = spec.shape.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, &d)| d).collect();
    let values: Vec<f64> = tensor.view().to_f64().iter().copied().collect();
    Owned::from_fn(Spec::new(spec.dtype, &dims).unwrap(), |i| values[i])
}

#[test]
fn nan_stays_in_its_channel_and_batch() {
    let call = Call { optional: [true; 4], ..Call::plain(2, 40, 37, 16) };
    let mut inputs = call.inputs();
    let (batch, channel, channels) = (1, 18, 37);
    let spec = inputs.get("x").unwrap().spec();
    let clean: Vec<f64> = inputs.take("x").unwrap().view().to_f64().iter().copied().collect();
    let at = (batch * 40 + 7) * channels + channel;
    inputs.push("x", Owned::from_fn(spec, |i| if i == at { f64::NAN } else { clean[i] }));
    for level in levels() {
        let y = common::run::<SelectiveScan>(&call.options, &inputs, &Exec { level, threads: 1 }).unwrap();
        let y = y.get("y").unwrap().view().to_f64();
        for ((index, value), i) in y.indexed_iter().zip(0..) {
            let hit = index[0] == batch && index[2] == channel && index[1] >= 7;
            assert_eq!(value.is_nan(), hit, "element {i} on {}", level.name());
        }
    }
}

#[test]
fn steps_of_any_size_are_right_at_the_ends() {
    // Decays of exactly 1 and of 0, and an overflow to infinity where A is positive.
    let spec = |shape: &[usize]| Spec::new(DType::F32, shape).unwrap();
    for (dt, a, expected) in [
        (0.0, -1e30, 3.0),
        (1e30, -1e30, f64::INFINITY),
        (200.0, -1.0, 200.0),
        (100.0, 1.0, f64::INFINITY),
        (f64::INFINITY, -1.0, f64::INFINITY),
    ] {
        let inputs: Named<Owned> = [
            ("x", Owned::from_fn(spec(&[1, 8, 20]), |_| 1.0)),
            ("dt", Owned::from_fn(spec(&[1, 8, 20]), |i| if i < 20 { dt } else { 0.0 })),
            ("A", Owned::from_fn(spec(&[20, 1]), |_| a)),
            ("B", Owned::from_fn(spec(&[1, 8, 1]), |_| if dt > 1e20 { 1e20 } else { 1.0 })),
            ("C", Owned::from_fn(spec(&[1, 8, 1]), |_| 1.0)),
            ("initial_state", Owned::from_fn(spec(&[1, 20, 1]), |_| 3.0)),
        ]
        .into_iter()
        .collect();
        for level in levels() {
            let y = common::run::<SelectiveScan>(&Options::default(), &inputs, &Exec { level, threads: 1 }).unwrap();
            let last = y.get("y").unwrap().view().to_f64()[[0, 0, 19]];
            assert!(last == expected || (last - expected).abs() < 1e-5 * expected, "{dt} {a} {}: {last}", level.name());
        }
    }
}

fn error(change: impl Fn(&mut Named<Owned>, &mut Options)) -> Error {
    let call = Call { optional: [true; 4], ..Call::plain(2, 3, 4, 5) };
    let (mut inputs, mut options) = (call.inputs(), call.options.clone());
    change(&mut inputs, &mut options);
    common::run::<SelectiveScan>(&options, &inputs, &Exec::default()).err().expect("a refusal")
}

fn replace(name: &'static str, shape: &'static [usize]) -> impl Fn(&mut Named<Owned>, &mut Options) {
    move |inputs, _| {
        inputs.take(name);
        inputs.push(name, Owned::from_fn(Spec::new(DType::F32, shape).unwrap(), |_| 0.5));
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let wrong: &[(&'static str, &'static [usize])] = &[
        ("x", &[2, 3]),
        ("x", &[2, 3, 5]),
        ("dt", &[2, 4, 4]),
        ("A", &[4]),
        ("A", &[5, 5]),
        ("B", &[2, 3, 4]),
        ("B", &[2, 3, 3, 5]),
        ("B", &[2, 3, 0, 5]),
        ("C", &[5]),
        ("D", &[5]),
        ("z", &[2, 3, 4, 1]),
        ("dt_bias", &[4, 1]),
        ("initial_state", &[2, 5, 4]),
    ];
    for &(name, shape) in wrong {
        let error = error(replace(name, shape));
        assert_eq!(error.kind, Kind::Shape, "{name} {shape:?}: {error}");
        assert_eq!(&*error.op, "selective_scan");
        assert!(!error.expected.is_empty() && !error.got.is_empty(), "{error}");
        assert!(*error.argument == *name || name == "x" || name == "A", "{name}: {error}");
    }
    let missing = error(|inputs, _| drop(inputs.take("dt")));
    assert_eq!((missing.kind, &*missing.argument), (Kind::Argument, "dt"));
    let extra = error(|inputs, _| inputs.push("w", inputs.get("x").unwrap().clone()));
    assert_eq!((extra.kind, &*extra.argument), (Kind::Argument, "w"));
    let mixed = error(|inputs, _| {
        let z = inputs.take("z").unwrap().cast(DType::Bf16);
        inputs.push("z", z);
    });
    assert_eq!((mixed.kind, &*mixed.argument), (Kind::DType, "z"));
    for bounds in [(0.2, 0.1), (f64::NAN, 1.0), (0.0, f64::NAN)] {
        let clamp = error(|_, options| options.dt_clamp = Some(bounds));
        assert_eq!((clamp.kind, &*clamp.argument), (Kind::Option, "dt_clamp"));
    }
}

#[test]
fn unknown_options_and_bad_bytes_are_refused() {
    assert!(serde_json::from_str::<Options>(r#"{"dt_soft_plus": true}"#).is_err());
    let spec = Spec::new(DType::F32, &[2]).unwrap();
    let words = [0u64; 2];
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    assert_eq!(View::new(spec, &bytes[..7]).err().unwrap().kind, Kind::Size);
    assert_eq!(View::new(spec, &bytes[1..9]).err().unwrap().kind, Kind::Size);
    assert!(View::new(spec, &bytes[..8]).is_ok());
    for dims in [&[usize::MAX, 2][..], &[1 << 62], &[0, usize::MAX, usize::MAX], &[1; 9]] {
        assert_eq!(Spec::new(DType::F32, dims).unwrap_err().kind, Kind::Shape);
    }
}
