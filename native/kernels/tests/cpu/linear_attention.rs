//! Linear attention and its gradient against their f64 references, another formulation and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::linear_attention::{by_key, calls, inputs};
use crate::common::{with, without};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::linear_attention::*;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<LinearAttention>(options, inputs);
    let inputs = check::backward_inputs::<LinearAttention, LinearAttentionBackward>(options, inputs);
    check::agrees_everywhere::<LinearAttentionBackward>(options, &inputs);
}

fn run(options: &Options, inputs: &Named<Owned>, level: Level) -> Named<Owned> {
    common::run::<LinearAttention>(options, inputs, &Exec { level, threads: 2 }).unwrap()
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for sizes in [
        [1, 1, 1, 1, 1, 1],
        [2, 5, 2, 2, 3, 16],
        [1, 63, 2, 4, 5, 17],
        [2, 64, 3, 3, 8, 33],
        [1, 65, 1, 2, 16, 64],
        [1, 200, 2, 12, 7, 5],
        [1, 130, 1, 1, 33, 70],
        [3, 17, 6, 12, 4, 48],
        [1, 20, 1, 1, 128, 128],
    ] {
        for (options, inputs) in calls(sizes) {
            agrees(&options, &inputs);
        }
    }
}

#[test]
fn a_long_sequence_agrees() {
    for (options, inputs) in calls([1, 1000, 1, 1, 2, 3]) {
        agrees(&options, &inputs);
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let normalize = Options { normalize: true, ..Default::default() };
    let scaled = Options { scale: Some(-0.3), ..Default::default() };
    let z = Options { return_z: true, ..Default::default() };
    let all = inputs([2, 19, 2, 4, 6, 20]);
    for absent in [&["initial_state"][..], &["initial_z"], &["g", "initial_state", "initial_z"]] {
        for options in [&normalize, &scaled, &z] {
            agrees(options, &without(&all, absent));
        }
    }
    agrees(&normalize, &without(&by_key([2, 19, 2, 4, 6, 20]), &["initial_state", "initial_z"]));
}

/// Decays that end a state at once, and growth.
#[test]
fn any_decay_is_taken() {
    let options = Options { return_state: true, ..Default::default() };
    let all = without(&inputs([1, 40, 1, 2, 8, 12]), &["initial_z"]);
    for dims in [&[1, 40, 2][..], &[1, 40, 2, 8]] {
        agrees(&options, &with(&all, "g", noise(7, dims, -200.0, 0.5)));
    }
}

#[test]
fn sizes_of_zero_agree() {
    for sizes in [[0, 3, 1, 2, 2, 3], [2, 0, 1, 2, 2, 3], [2, 3, 1, 0, 2, 3], [2, 3, 1, 2, 0, 3], [2, 3, 1, 2, 3, 0]] {
        for (options, inputs) in calls(sizes) {
            agrees(&options, &inputs);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (options, inputs) in calls([2, 5, 2, 4, 3, 2]) {
        check::gradients_agree_with_differences::<LinearAttention, LinearAttentionBackward>(&options, &inputs);
    }
    let bare = without(&inputs([2, 5, 2, 4, 3, 2]), &["g", "initial_state", "initial_z"]);
    let options = Options { normalize: true, scale: Some(0.7), ..Default::default() };
    check::gradients_agree_with_differences::<LinearAttention, LinearAttentionBackward>(&options, &bare);
}

/// Attention without softmax: with `l[t] = g[1] + ... + g[t]` for each key, `y` is a product with the masked matrix
///
/// ```text
/// P[t, s] = scale sum_i q[t, i] exp(l[t, i] - l[s, i]) k[s, i]       s <= t
/// ```
///
/// whose rows are divided by their sums with `normalize`.
#[test]
fn it_is_a_masked_matrix() {
    let [length, keys, values] = [90, 6, 3];
    let sizes = [1, length, 1, 1, keys, values];
    for (all, decays) in [(inputs(sizes), 1), (by_key(sizes), keys)] {
        let all = without(&all, &["initial_state", "initial_z"]).map(|tensor| tensor.cast(DType::F64));
        let numbers = |name: &str| all.get(name).unwrap().view().to_f64().iter().copied().collect::<Vec<_>>();
        let [q, k, v, g] = ["q", "k", "v", "g"].map(numbers);
        let decay = |t: usize, s: usize, i: usize| -> f64 {
            (s + 1..=t).map(|step| g[step * decays + i % decays]).sum::<f64>().exp()
        };
        let score = |t: usize, s: usize| -> f64 {
            let terms = (0..keys).map(|i| q[t * keys + i] * decay(t, s, i) * k[s * keys + i]);
            terms.sum::<f64>() / (keys as f64).sqrt()
        };
        for normalize in [false, true] {
            let expected = Owned::from_fn(Spec::new(DType::F64, &[1, length, 1, values]).unwrap(), |at| {
                let (t, j) = (at / values, at % values);
                let sum: f64 = (0..=t).map(|s| score(t, s) * v[s * values + j]).sum();
                let all = 1e-10 + (0..=t).map(|s| score(t, s)).sum::<f64>();
                if normalize { sum / all } else { sum }
            });
            for level in common::levels().chain([Level::Reference]) {
                let got = run(&Options { normalize, ..Default::default() }, &all, level);
                let off = common::worst(got.get("y").unwrap(), &expected, 1e-9, 1e-11);
                assert!(off <= 1.0, "off by {off} times the tolerance on {}", level.name());
            }
        }
    }
}

/// A decay of each key that is that of the head gives the results of the head's decay.
#[test]
fn equal_decays_of_keys_are_that_of_the_head() {
    let [length, keys] = [70, 9];
    let of_head = inputs([1, length, 1, 2, keys, 21]);
    let g = of_head.get("g").unwrap().view().to_f64();
    let spread = Owned::from_fn(Spec::new(DType::F32, &[1, length, 2, keys]).unwrap(), |at| {
        g[[0, at / keys / 2, at / keys % 2]]
    });
    for level in common::levels() {
        let options = Options { return_state: true, return_z: true, normalize: true, ..Default::default() };
        let (one, each) = (run(&options, &of_head, level), run(&options, &with(&of_head, "g", spread.clone()), level));
        assert_eq!(common::bits(&one), common::bits(&each), "{}", level.name());
    }
}

/// A sequence in two calls, the second from the first's last state; and one step at a time.
#[test]
fn a_sequence_may_be_cut_anywhere() {
    let length = 131;
    let options = Options { normalize: true, return_state: true, return_z: true, ..Default::default() };
    for (all, level) in [inputs, by_key]
        .map(|inputs| inputs([2, length, 1, 2, 18, 40]))
        .iter()
        .flat_map(|all| common::levels().map(move |level| (all, level)))
    {
        let of_time = |range: std::ops::Range<usize>| -> Named<Owned> {
            let part = |name: &str, t: &Owned| match name {
                "initial_state" | "initial_z" => t.clone(),
                _ => common::part(t, 1, range.clone()),
            };
            all.iter().map(|(name, t)| (name.clone(), part(name, t))).collect()
        };
        let whole = run(&options, all, level);
        let close = |got: &Named<Owned>, name: &str, expected: &Owned, what: &str| {
            let off = common::worst(got.get(name).unwrap(), expected, 1e-5, 1e-5);
            assert!(off <= 1.0, "{name} is off by {off} times the tolerance {what} on {}", level.name());
        };
        for cuts in [vec![1], vec![64], vec![100], vec![130], (1..length).collect()] {
            let mut states = ["initial_state", "initial_z"].map(|name| all.get(name).unwrap().clone());
            let ends = cuts.iter().copied().chain([length]);
            for range in [0].into_iter().chain(cuts.iter().copied()).zip(ends).map(|(from, to)| from..to) {
                let [state, z] = states;
                let part = with(&with(&of_time(range.clone()), "initial_state", state), "initial_z", z);
                let got = run(&options, &part, level);
                close(&got, "y", &common::part(whole.get("y").unwrap(), 1, range.clone()), &format!("at {range:?}"));
                states = ["last_state", "last_z"].map(|name| got.get(name).unwrap().clone());
                if range.end == length {
                    for name in ["last_state", "last_z"] {
                        close(&got, name, whole.get(name).unwrap(), "in the end");
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let all = inputs([2, 3, 2, 4, 5, 6]);
    let refused = |options: &Options, inputs: &Named<Owned>| {
        let error = common::run::<LinearAttention>(options, inputs, &Exec::default()).err().expect("a refusal");
        assert_eq!(&*error.op, "linear_attention");
        (error.kind, error.argument.to_string(), error.expected.to_string(), error.got.to_string())
    };
    let said = |kind, words: [&str; 3]| (kind, words[0].into(), words[1].into(), words[2].into());
    let scale = Options { scale: Some(f64::INFINITY), ..Default::default() };
    assert_eq!(refused(&scale, &all), said(Kind::Option, ["scale", "a finite number", "inf"]));
    let keys = noise(4, &[2, 3, 3, 5], -1.0, 1.0);
    let groups = with(&with(&all, "q", keys.clone()), "k", keys);
    let expected = "a number of groups that divides 4 heads";
    assert_eq!(refused(&Options::default(), &groups), said(Kind::Shape, ["q", expected, "3 groups"]));
    let expected = "shape (2, 3, 4) or (2, 3, 4, 5)";
    for (dims, got) in [(&[2, 3, 4, 6][..], "(2, 3, 4, 6)"), (&[2, 3, 5], "(2, 3, 5)"), (&[2, 3], "(2, 3)")] {
        let wrong = with(&all, "g", noise(1, dims, -1.0, -0.5));
        assert_eq!(refused(&Options::default(), &wrong), said(Kind::Shape, ["g", expected, got]));
    }
    for (name, dims) in [("k", &[2, 3, 2, 6][..]), ("initial_state", &[2, 4, 6, 5]), ("initial_z", &[2, 4, 6])] {
        let (kind, argument, ..) = refused(&Options::default(), &with(&all, name, noise(1, dims, -1.0, -0.5)));
        assert_eq!((kind, &*argument), (Kind::Shape, name));
    }
}
