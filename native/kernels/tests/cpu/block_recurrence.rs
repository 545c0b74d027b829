//! The recurrence of the MM-Rec block and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::recurrences::{guarded, inputs, options};
use crate::common::{assert_close, bits, part};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::mm_rec::block_recurrence::{BlockRecurrence, BlockRecurrenceBackward, Options};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<BlockRecurrence>(options, inputs);
    let backward = check::backward_inputs::<BlockRecurrence, BlockRecurrenceBackward>(options, inputs);
    check::agrees_everywhere::<BlockRecurrenceBackward>(options, &backward);
}

fn run(options: &Options, inputs: &Named<Owned>, exec: &Exec) -> Named<Owned> {
    common::run::<BlockRecurrence>(options, inputs, exec).unwrap()
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let sizes = [[1, 1, 1], [2, 3, 5], [1, 17, 16], [3, 9, 31], [5, 12, 67], [2, 9, 130], [17, 2, 3], [1, 20, 3]];
    for size in sizes.into_iter().chain([[0, 3, 4], [2, 0, 5], [2, 3, 0]]) {
        for (mixed, initial) in [(true, true), (true, false), (false, true)] {
            agrees(&options(mixed), &inputs(size, mixed, initial));
        }
    }
}

#[test]
fn guards_agree_with_the_reference() {
    for size in [[2, 3, 5], [3, 11, 67], [1, 0, 2]] {
        for state_norm in [false, true] {
            agrees(&guarded(state_norm), &inputs(size, true, true));
            let norm = Options { mix: None, state_clip: None, state_norm };
            agrees(&norm, &inputs(size, false, true));
        }
    }
}

/// Decays that keep nothing, or everything, in which case the state grows.
#[test]
fn decays_of_0_and_1_agree() {
    for gamma in [0.0, 1.0] {
        let mut inputs = inputs([2, 9, 19], true, true);
        *inputs.get_mut("gamma").unwrap() = Owned::from_fn(Spec::new(DType::F32, &[2, 9, 19]).unwrap(), |_| gamma);
        agrees(&options(true), &inputs);
        agrees(&guarded(true), &inputs);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let cases = [(options(true), true), (options(false), false), (guarded(false), true), (guarded(true), true)];
    for (options, mixed) in cases {
        for size in [[1, 1, 1], [2, 4, 3]] {
            let inputs = inputs(size, mixed, true);
            check::gradients_agree_with_differences::<BlockRecurrence, BlockRecurrenceBackward>(&options, &inputs);
        }
    }
}

/// The examples of the formula, with all weights 0, for which both gates are 1/2.
#[test]
fn the_examples_of_the_formula_come_out() {
    let of = |dims: &[usize], value: f64| Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |_| value);
    let mut inputs: Named<Owned> = [
        ("z", of(&[1, 3, 1], 1.0)),
        ("gamma", of(&[1, 3, 1], 0.5)),
        ("w_gate", of(&[1, 1], 0.0)),
        ("b_gate", of(&[1], 0.0)),
    ]
    .into_iter()
    .collect();
    let states = |options: &Options, inputs: &Named<Owned>| {
        let h = run(options, inputs, &Exec::default()).take("h").unwrap();
        h.view().to_f64().iter().map(|h| (h * 1e6).round() / 1e6).collect::<Vec<_>>()
    };
    assert_eq!(states(&options(false), &inputs), [0.5, 0.75, 0.875]);
    inputs.push("w_mix", of(&[1, 2], 0.0));
    inputs.push("b_mix", of(&[1], 0.0));
    assert_eq!(states(&options(true), &inputs), [0.55, 0.88, 1.078]);
    // A second gate with `mix` = 0 changes nothing.
    assert_eq!(states(&options(false), &inputs), [0.5, 0.75, 0.875]);
}

/// Covers steps with packed matrices as well as with matrices as stored.
#[test]
fn parts_of_a_sequence_go_on_where_the_last_one_ended() {
    for mixed in [false, true] {
        let (options, whole) = (options(mixed), inputs([3, 40, 33], mixed, true));
        for level in common::levels() {
            let exec = Exec { level, threads: 2 };
            let expected = run(&options, &whole, &exec);
            let (mut state, mut first) = (whole.find("initial_state").cloned(), 0);
            for end in [1, 4, 17, 40] {
                let mut inputs: Named<Owned> = whole.clone();
                for name in ["z", "gamma"] {
                    *inputs.get_mut(name).unwrap() = part(whole.get(name).unwrap(), 1, first..end);
                }
                *inputs.get_mut("initial_state").unwrap() = state.take().unwrap();
                let mut got = run(&options, &inputs, &exec);
                let of_whole = part(expected.get("h").unwrap(), 1, first..end);
                let of_whole = [("h", of_whole)].into_iter().collect();
                assert_close(&got, &of_whole, &format!("from {first} to {end} on {}", level.name()));
                (state, first) = (got.take("last_state"), end);
            }
            let last = [("last_state", expected.get("last_state").unwrap().clone())].into_iter().collect();
            assert_close(&[("last_state", state.unwrap())].into_iter().collect(), &last, level.name());
        }
    }
}

#[test]
fn sequences_of_a_batch_have_nothing_to_do_with_each_other() {
    let (options, whole) = (options(true), inputs([5, 12, 19], true, true));
    let mut spoilt = whole.clone();
    let z = whole.get("z").unwrap();
    let mut values = z.view().to_f64();
    values[[3, 4, 7]] = f64::NAN;
    let mut values = values.iter().copied();
    *spoilt.get_mut("z").unwrap() =
        Owned::from_fn(Spec::new(DType::F32, &[5, 12, 19]).unwrap(), |_| values.next().unwrap());
    for level in common::levels() {
        let exec = Exec { level, threads: 2 };
        let [clean, spoilt] = [&whole, &spoilt].map(|inputs| run(&options, inputs, &exec).take("h").unwrap());
        for i in (0..5).filter(|&i| i != 3) {
            let of = |h: &Owned| bits(&[("h", part(h, 0, i..i + 1))].into_iter().collect());
            assert_eq!(of(&spoilt), of(&clean), "sequence {i} on {}", level.name());
        }
        let spoilt = part(&spoilt, 0, 3..4).view().to_f64();
        for (at, h) in spoilt.indexed_iter() {
            assert_eq!(h.is_nan(), at[1] >= 4, "{at:?} on {}", level.name());
        }
    }
}

/// 32768 steps at once and in chunks, with decays that forget.
#[test]
fn long_sequences_give_the_same_in_chunks() {
    let (length, chunk) = (32768, 8192);
    let (options, whole) = (options(true), inputs([1, length, 8], true, false));
    let exec = Exec { level: Level::best(), threads: 1 };
    let expected = run(&options, &whole, &exec).take("h").unwrap();
    let mut state = None;
    for first in (0..length).step_by(chunk) {
        let mut inputs = whole.clone();
        for name in ["z", "gamma"] {
            *inputs.get_mut(name).unwrap() = part(whole.get(name).unwrap(), 1, first..first + chunk);
        }
        state.take().into_iter().for_each(|state| inputs.push("initial_state", state));
        let mut got = run(&options, &inputs, &exec);
        state = got.take("last_state");
        let of_whole = [("h", part(&expected, 1, first..first + chunk))].into_iter().collect();
        assert_close(&got, &of_whole, &format!("from {first}"));
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |options: &Options, name: &'static str, dims: Option<&[usize]>| -> Error {
        let mut inputs = inputs([2, 3, 4], true, true);
        inputs.take(name);
        dims.into_iter().for_each(|dims| inputs.push(name, noise(1, dims, 0.0, 1.0)));
        common::run::<BlockRecurrence>(options, &inputs, &Exec::default()).err().expect("a refusal")
    };
    let shapes: [(_, &[usize]); 8] = [
        ("z", &[2, 3]),
        ("gamma", &[2, 3, 5]),
        ("w_gate", &[4, 8]),
        ("b_gate", &[3]),
        ("w_mix", &[4, 4]),
        ("w_mix", &[8, 4]),
        ("b_mix", &[8]),
        ("initial_state", &[4]),
    ];
    for (name, dims) in shapes {
        let error = refused(&options(true), name, Some(dims));
        let argument = if name == "z" { "z" } else { name };
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, argument, "block_recurrence"), "{error}");
    }
    for (missing, argument) in [("w_mix", "w_mix"), ("b_mix", "b_mix"), ("w_gate", "w_gate")] {
        let error = refused(&options(true), missing, None);
        assert_eq!((error.kind, &*error.argument), (Kind::Argument, argument), "{error}");
    }
    let clip = |clip| Options { state_clip: Some(clip), ..options(true) };
    for options in [clip(0.0), clip(-1.0), clip(f64::NAN), Options { mix: Some(f64::INFINITY), ..options(true) }] {
        assert_eq!(refused(&options, "initial_state", None).kind, Kind::Option);
    }
    let core = inputs([1, 2, 3], false, false);
    let error = common::run::<BlockRecurrence>(&options(true), &core, &Exec::default()).err().expect("a refusal");
    assert_eq!((error.kind, &*error.argument), (Kind::Option, "mix"), "{error}");
    assert!(serde_json::from_str::<Options>(r#"{"state_clamp": 1}"#).is_err());
}
