//! The search down a hierarchy and attention over the slots that it finds, against its f64 reference.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::mm_rec::hds::query::{HdsQueryTopk, Options};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn inputs([batch, length, width]: [usize; 3], of_memory: usize, slots: usize) -> Named<Owned> {
    let memory: &[usize] = &[of_memory, slots, width];
    check::inputs(&[("q", &[batch, length, width]), ("k", memory), ("v", memory)])
}

fn tensor(dims: &[usize], values: &[f64]) -> Owned {
    Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |i| values[i])
}

fn slots(of: &Named<Owned>) -> Vec<i32> {
    of.get("slots").unwrap().view().slice::<i32>().unwrap().to_vec()
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for (q, of_memory, slots, levels, ratio, top_k) in [
        ([1, 3, 4], 1, 16, 3, 4, 1),
        ([2, 5, 17], 2, 64, 3, 4, 2),
        ([2, 3, 31], 1, 48, 3, 4, 100),
        ([1, 2, 3], 1, 54, 4, 3, 5),
        ([1, 9, 33], 1, 1024, 5, 4, 7),
        ([3, 1, 8], 3, 7, 1, 4, 1),
        ([1, 4, 5], 1, 300, 2, 2, 60),
        ([0, 2, 4], 1, 16, 3, 4, 1),
        ([2, 0, 4], 2, 16, 3, 4, 1),
        ([2, 3, 0], 2, 16, 3, 4, 1),
    ] {
        check::agrees_everywhere::<HdsQueryTopk>(&Options { levels, ratio, top_k }, &inputs(q, of_memory, slots));
    }
}

#[test]
fn the_example_of_the_formula_agrees() {
    let bank: Vec<f64> = (0..32).map(|i| if i % 2 == 0 { f64::from(i / 2) } else { 0.0 }).collect();
    let inputs =
        [("q", tensor(&[1, 1, 2], &[1.0, 0.0])), ("k", tensor(&[1, 16, 2], &bank)), ("v", tensor(&[1, 16, 2], &bank))];
    for &level in Level::available() {
        let inputs = inputs.iter().cloned().collect();
        let options = Options { top_k: 1, ..Options::default() };
        let got = common::run::<HdsQueryTopk>(&options, &inputs, &Exec { level, threads: 1 }).unwrap();
        assert_eq!(slots(&got), [12, 13, 14, 15]);
        let context = got.get("context").unwrap().view().to_f64();
        assert!((context[[0, 0, 0]] - 14.2786209).abs() < 1e-5 && context[[0, 0, 1]] == 0.0, "{context}");
    }
}

/// The slots found for a query of width 1 and value 1, whose scores are the keys themselves.
fn found(keys: &[f64], options: &Options) -> Vec<Vec<i32>> {
    let inputs: Named<Owned> = [
        ("q", tensor(&[1, 1, 1], &[1.0])),
        ("k", tensor(&[1, keys.len(), 1], keys)),
        ("v", tensor(&[1, keys.len(), 1], keys)),
    ]
    .into_iter()
    .collect();
    let run =
        |&level: &Level| slots(&common::run::<HdsQueryTopk>(options, &inputs, &Exec { level, threads: 1 }).unwrap());
    Level::available().iter().map(run).collect()
}

#[test]
fn of_equal_scores_the_lower_slot_counts_more() {
    let of = |top_k| Options { levels: 2, ratio: 2, top_k };
    let check = |keys: &[f64], top_k, expected: &[i32]| {
        for found in found(keys, &of(top_k)) {
            assert_eq!(found, expected, "{keys:?}");
        }
    };
    check(&[1.0; 8], 2, &[0, 1, 2, 3]);
    check(&[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2, &[2, 3, 4, 5]);
    check(&[1.0, 1.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0], 3, &[0, 1, 2, 3, 4, 5]);
    // Both zeros rank equally.
    check(&[-0.0, -0.0, 0.0, 0.0], 1, &[0, 1]);
    // More candidates than there are slots.
    check(&[1.0, 2.0, 3.0, 4.0], 9, &[0, 1, 2, 3]);
}

#[test]
fn a_score_that_is_nan_counts_least() {
    let (nan, none, options) = (f64::NAN, f64::NEG_INFINITY, Options { levels: 2, ratio: 2, top_k: 1 });
    for found in found(&[nan, 1.0, none, none, 0.0, 0.0], &options) {
        assert_eq!(found, [4, 5]);
    }
    for found in found(&[nan, nan, none, none], &options) {
        assert_eq!(found, [2, 3]);
    }
    for found in found(&[nan, nan, nan, nan], &options) {
        assert_eq!(found, [0, 1]);
    }
    let keys = [5.0, 5.0, 1.0, nan];
    let inputs: Named<Owned> =
        [("q", tensor(&[1, 1, 1], &[1.0])), ("k", tensor(&[1, 4, 1], &keys)), ("v", tensor(&[1, 4, 1], &[1.0; 4]))]
            .into_iter()
            .collect();
    for level in common::levels() {
        let run = |top_k| {
            let options = Options { levels: 2, ratio: 2, top_k };
            let got = common::run::<HdsQueryTopk>(&options, &inputs, &Exec { level, threads: 1 }).unwrap();
            got.get("context").unwrap().view().to_f64()[[0, 0, 0]]
        };
        assert_eq!(run(1), 1.0);
        assert!(run(2).is_nan());
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |options: Options, inputs: &Named<Owned>| {
        common::run::<HdsQueryTopk>(&options, inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [
        ("q", &[2, 3][..]),
        ("q", &[2, 3, 5]),
        ("k", &[3, 16, 4]),
        ("k", &[2, 20, 4]),
        ("k", &[2, 0, 4]),
        ("v", &[2, 32, 4]),
        ("v", &[1, 16, 4]),
    ] {
        let mut inputs = inputs([2, 3, 4], 2, 16);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        let error = refused(Options::default(), &inputs);
        let of = if name == "q" && dims.len() == 3 { "k" } else { name };
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, of, "hds_query_topk"), "{error}");
    }
    for (levels, ratio, top_k, name) in
        [(0, 4, 1, "levels"), (17, 4, 1, "levels"), (3, 1, 1, "ratio"), (3, 4, 0, "top_k")]
    {
        let error = refused(Options { levels, ratio, top_k }, &inputs([2, 3, 4], 2, 16));
        assert_eq!((error.kind, &*error.argument), (Kind::Option, name), "{error}");
    }
    let error = refused(Options { levels: 16, ratio: usize::MAX, top_k: 1 }, &inputs([2, 3, 4], 2, 16));
    assert_eq!((error.kind, &*error.argument), (Kind::Shape, "k"), "{error}");
}
