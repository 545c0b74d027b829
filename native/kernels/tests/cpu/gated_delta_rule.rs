//! The gated delta rule and its gradient against their f64 references, another formulation and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::gated_delta_rule::{inputs, options};
use crate::common::{with, without};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::gated_delta_rule::*;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn agrees(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<GatedDeltaRule>(options, inputs);
    let inputs = check::backward_inputs::<GatedDeltaRule, GatedDeltaRuleBackward>(options, inputs);
    check::agrees_everywhere::<GatedDeltaRuleBackward>(options, &inputs);
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
        agrees(&options(), &inputs(sizes));
        // A key of one number has hardly any gradient but rounding where it is divided by its length.
        if sizes[4] > 1 {
            agrees(&Options { qk_l2norm: true, ..options() }, &inputs(sizes));
        }
    }
}

#[test]
fn what_is_optional_may_be_absent() {
    let all = inputs([2, 19, 2, 4, 6, 20]);
    for absent in [&["g"][..], &["initial_state"], &["g", "initial_state"]] {
        for options in [options(), Options { scale: Some(-0.3), ..Default::default() }] {
            agrees(&options, &without(&all, absent));
        }
    }
}

/// Decays that end a state at once, and steps that turn a key's value around.
#[test]
fn any_gate_and_step_size_is_taken() {
    let sizes = [1, 40, 1, 2, 8, 12];
    let all = with(&inputs(sizes), "g", noise(7, &[1, 40, 2], -200.0, 0.5));
    let all = with(&all, "beta", noise(8, &[1, 40, 2], -1.0, 2.0));
    agrees(&Options { qk_l2norm: true, ..options() }, &all);
}

#[test]
fn sizes_of_zero_agree() {
    for sizes in [[0, 3, 1, 2, 2, 3], [2, 0, 1, 2, 2, 3], [2, 3, 1, 0, 2, 3], [2, 3, 1, 2, 0, 3], [2, 3, 1, 2, 3, 0]] {
        agrees(&options(), &inputs(sizes));
        agrees(&Options { qk_l2norm: true, ..options() }, &inputs(sizes));
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let all = inputs([2, 5, 2, 4, 3, 2]);
    for qk_l2norm in [false, true] {
        let options = Options { qk_l2norm, ..options() };
        check::gradients_agree_with_differences::<GatedDeltaRule, GatedDeltaRuleBackward>(&options, &all);
    }
    let bare = without(&all, &["g", "initial_state"]);
    check::gradients_agree_with_differences::<GatedDeltaRule, GatedDeltaRuleBackward>(&options(), &bare);
}

/// The form of chunks (section 3.3 of the paper) with the whole sequence as one: with `l[t] = g[1] + ... + g[t]`, the
/// inputs `u[t] = beta e[t]` solve a triangular system, and `y` is a product with a masked matrix:
///
/// ```text
/// u[t] = beta[t] (v[t] - sum_{s < t} exp(l[t] - l[s]) (k[t] . k[s]) u[s])
/// y[t] = scale sum_{s <= t} exp(l[t] - l[s]) (q[t] . k[s]) u[s]
/// ```
#[test]
fn it_is_a_triangular_system_and_a_masked_matrix() {
    let [length, keys, values] = [90, 6, 3];
    let all = without(&inputs([1, length, 1, 1, keys, values]), &["initial_state"]);
    let all = all.map(|tensor| tensor.cast(DType::F64));
    let numbers = |name: &str| all.get(name).unwrap().view().to_f64().iter().copied().collect::<Vec<_>>();
    let [q, k, v, beta, g] = ["q", "k", "v", "beta", "g"].map(numbers);
    let dot = |a: &[f64], t: usize, s: usize| -> f64 { (0..keys).map(|i| a[t * keys + i] * k[s * keys + i]).sum() };
    let decay = |t: usize, s: usize| g[s + 1..=t].iter().sum::<f64>().exp();
    let mut u = vec![0.0; length * values];
    for t in 0..length {
        for j in 0..values {
            let had: f64 = (0..t).map(|s| decay(t, s) * dot(&k, t, s) * u[s * values + j]).sum();
            u[t * values + j] = beta[t] * (v[t * values + j] - had);
        }
    }
    let expected = Owned::from_fn(Spec::new(DType::F64, &[1, length, 1, values]).unwrap(), |at| {
        let (t, j) = (at / values, at % values);
        let sum: f64 = (0..=t).map(|s| decay(t, s) * dot(&q, t, s) * u[s * values + j]).sum();
        sum / (keys as f64).sqrt()
    });
    for level in common::levels().chain([Level::Reference]) {
        let got = common::run::<GatedDeltaRule>(&options(), &all, &Exec { level, threads: 1 }).unwrap();
        let off = common::worst(got.get("y").unwrap(), &expected, 1e-10, 1e-12);
        assert!(off <= 1.0, "off by {off} times the tolerance on {}", level.name());
    }
}

/// With `beta` 1 and keys of length 1 a state gives back the last value of each key, here of 4 keys in turn.
#[test]
fn a_state_gives_back_the_last_value_of_each_key() {
    let (length, keys, values) = (11, 4, 3);
    let spec = |dims: &[usize]| Spec::new(DType::F32, dims).unwrap();
    let one_of = |shift: usize| {
        Owned::from_fn(spec(&[1, length, 1, keys]), move |at| {
            f64::from(u8::from((at / keys + shift) % keys == at % keys))
        })
    };
    let v = Owned::from_fn(spec(&[1, length, 1, values]), |at| at as f64);
    let all = [("q", one_of(1)), ("k", one_of(0)), ("v", v), ("beta", Owned::from_fn(spec(&[1, length, 1]), |_| 1.0))];
    let all: Named<Owned> = all.into_iter().collect();
    let options = Options { scale: Some(1.0), ..Default::default() };
    // The key after this step's was last written three steps ago.
    let expected = Owned::from_fn(spec(&[1, length, 1, values]), |at| {
        at.saturating_sub(3 * values) as f64 * f64::from(u8::from(at >= 3 * values))
    });
    for level in common::levels().chain([Level::Reference]) {
        let got = common::run::<GatedDeltaRule>(&options, &all, &Exec { level, threads: 1 }).unwrap();
        assert_eq!(got.get("y").unwrap().view().to_f64(), expected.view().to_f64(), "{}", level.name());
    }
}

/// A sequence in two calls, the second from the first's last state; and one step at a time.
#[test]
fn a_sequence_may_be_cut_anywhere() {
    let length = 131;
    let all = inputs([2, length, 1, 2, 18, 40]);
    for level in common::levels() {
        let run = |inputs: &Named<Owned>| {
            common::run::<GatedDeltaRule>(&options(), inputs, &Exec { level, threads: 2 }).unwrap()
        };
        let of_time = |range: std::ops::Range<usize>| -> Named<Owned> {
            let part = |name: &str, t: &Owned| match name {
                "initial_state" => t.clone(),
                _ => common::part(t, 1, range.clone()),
            };
            all.iter().map(|(name, t)| (name.clone(), part(name, t))).collect()
        };
        let whole = run(&all);
        let close = |got: &Named<Owned>, name: &str, expected: &Owned, what: &str| {
            let off = common::worst(got.get(name).unwrap(), expected, 1e-6, 1e-6);
            assert!(off <= 1.0, "{name} is off by {off} times the tolerance {what} on {}", level.name());
        };
        for cuts in [vec![1], vec![64], vec![100], vec![130], (1..length).collect()] {
            let mut state = all.get("initial_state").unwrap().clone();
            let ends = cuts.iter().copied().chain([length]);
            for range in [0].into_iter().chain(cuts.iter().copied()).zip(ends).map(|(from, to)| from..to) {
                let got = run(&with(&of_time(range.clone()), "initial_state", state));
                close(&got, "y", &common::part(whole.get("y").unwrap(), 1, range.clone()), &format!("at {range:?}"));
                state = got.get("last_state").unwrap().clone();
                if range.end == length {
                    close(&got, "last_state", whole.get("last_state").unwrap(), "in the end");
                }
            }
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let all = inputs([2, 3, 2, 4, 5, 6]);
    let refused = |options: &Options, inputs: &Named<Owned>| {
        let error = common::run::<GatedDeltaRule>(options, inputs, &Exec::default()).err().expect("a refusal");
        assert_eq!(&*error.op, "gated_delta_rule");
        (error.kind, error.argument.to_string(), error.expected.to_string(), error.got.to_string())
    };
    let said = |kind, words: [&str; 3]| (kind, words[0].into(), words[1].into(), words[2].into());
    let scale = Options { scale: Some(f64::INFINITY), ..options() };
    assert_eq!(refused(&scale, &all), said(Kind::Option, ["scale", "a finite number", "inf"]));
    let groups = |groups| {
        let keys = noise(4, &[2, 3, groups, 5], -1.0, 1.0);
        with(&with(&all, "q", keys.clone()), "k", keys)
    };
    let expected = "a number of groups that divides 4 heads";
    assert_eq!(refused(&options(), &groups(3)), said(Kind::Shape, ["q", expected, "3 groups"]));
    assert_eq!(refused(&options(), &groups(0)), said(Kind::Shape, ["q", expected, "0 groups"]));
    for (name, dims) in
        [("k", &[2, 3, 2, 6][..]), ("beta", &[2, 3, 5]), ("g", &[2, 4, 4]), ("initial_state", &[2, 4, 6, 5])]
    {
        let (kind, argument, ..) = refused(&options(), &with(&all, name, noise(1, dims, -1.0, -0.5)));
        assert_eq!((kind, &*argument), (Kind::Shape, name));
    }
}
