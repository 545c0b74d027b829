//! The hierarchy over a memory bank and its gradient against their f64 reference and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::mm_rec::hds::{HdsConstruct, HdsConstructBackward, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

fn banks(batch: usize, slots: usize, width: usize) -> Named<Owned> {
    ["k", "v"].into_iter().zip(1..).map(|(name, seed)| (name, noise(seed, &[batch, slots, width], -1.0, 1.0))).collect()
}

fn both(options: &Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<HdsConstruct>(options, inputs);
    let backward = check::backward_inputs::<HdsConstruct, HdsConstructBackward>(options, inputs);
    check::agrees_everywhere::<HdsConstructBackward>(options, &backward);
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for ([batch, slots, width], levels, ratio, cursor) in [
        ([1, 1, 1], 3, 4, 0),
        ([2, 5, 3], 3, 4, 2),
        ([1, 10, 17], 3, 4, 7),
        ([1, 1023, 31], 4, 4, 1000),
        ([3, 37, 97], 3, 2, 38),
        ([1, 64, 300], 2, 7, 0),
        ([2, 29, 16], 5, 3, usize::MAX),
        ([1, 12, 5], 16, 2, 3),
        ([1, 50, 33], 3, usize::MAX, 0),
        ([0, 5, 3], 3, 4, 0),
        ([2, 5, 0], 3, 4, 1),
    ] {
        both(&Options { levels, ratio, cursor }, &banks(batch, slots, width));
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (slots, options) in [
        (1, Options::default()),
        (5, Options::default()),
        (10, Options { cursor: 3, ..Options::default() }),
        (11, Options { levels: 4, ratio: 2, cursor: 12 }),
    ] {
        check::gradients_agree_with_differences::<HdsConstruct, HdsConstructBackward>(&options, &banks(2, slots, 2));
    }
}

#[test]
fn a_cotangent_that_is_missing_is_zero() {
    let (options, inputs) = (Options::default(), banks(2, 21, 19));
    let mut backward = check::backward_inputs::<HdsConstruct, HdsConstructBackward>(&options, &inputs);
    for name in ["dk1", "dv2"] {
        let zeros = Owned::zeros(backward.take(name).unwrap().spec());
        let without = common::run::<HdsConstructBackward>(&options, &backward, &Exec::default()).unwrap();
        backward.push(name, zeros);
        let with = common::run::<HdsConstructBackward>(&options, &backward, &Exec::default()).unwrap();
        assert_eq!(common::bits(&without), common::bits(&with));
        backward.take(name);
    }
    check::agrees_everywhere::<HdsConstructBackward>(&options, &backward);
}

fn column(values: impl ExactSizeIterator<Item = f64>) -> Owned {
    let mut values = values;
    Owned::from_fn(Spec::new(DType::F32, &[1, values.len(), 1]).unwrap(), |_| values.next().unwrap())
}

fn levels_of(bank: Owned, options: &Options, exec: &Exec) -> Vec<Vec<f64>> {
    let inputs = [("k", bank.clone()), ("v", bank)].into_iter().collect();
    let got = common::run::<HdsConstruct>(options, &inputs, exec).unwrap();
    let values = |name: &str| got.get(name).unwrap().view().to_f64().into_raw_vec_and_offset().0;
    (1..options.levels)
        .map(|level| {
            let (k, v) = (values(&format!("k{level}")), values(&format!("v{level}")));
            assert_eq!(k, v);
            k
        })
        .collect()
}

#[test]
fn the_examples_of_the_formula_are_exact() {
    let count = |slots: u8| column((1..=slots).map(f64::from));
    for &level in Level::available() {
        let exec = Exec { level, threads: 1 };
        let of = |slots, options: &Options| levels_of(count(slots), options, &exec);
        assert_eq!(of(16, &Options::default()), [vec![2.5, 6.5, 10.5, 14.5], vec![8.5]]);
        assert_eq!(of(10, &Options::default()), [vec![3.0, 8.0], vec![5.5]]);
        assert_eq!(of(5, &Options::default()), [vec![3.0], vec![3.0]]);
        assert_eq!(of(1, &Options::default()), [vec![1.0], vec![1.0]]);
        assert_eq!(of(5, &Options { levels: 2, ratio: 2, cursor: 0 }), [vec![2.0, 4.0]]);
        // A ring whose oldest slot holds the 3: in order 3 4 5 1 2, with the windows 3 4 5 and 5 1 2.
        let ring = levels_of(count(5), &Options { levels: 2, ratio: 2, cursor: 7 }, &exec);
        assert_eq!(ring, [[4.0, f64::from(8.0f32 / 3.0)]]);
    }
}

#[test]
fn slots_that_are_equal_have_equal_averages() {
    let bank = noise(3, &[1, 1, 67], -1.0, 1.0).view().to_f64();
    let row: Vec<f64> = bank.iter().copied().collect();
    let bank = Owned::from_fn(Spec::new(DType::F32, &[1, 1024, 67]).unwrap(), |i| row[i % 67]);
    for level in common::levels() {
        let inputs = [("k", bank.clone()), ("v", bank.clone())].into_iter().collect();
        let got = common::run::<HdsConstruct>(&Options::default(), &inputs, &Exec { level, threads: 2 }).unwrap();
        for (name, level) in got.iter() {
            for slot in level.view().to_f64().as_slice().unwrap().chunks(67) {
                assert_eq!(slot, row, "{name}");
            }
        }
    }
}

#[test]
fn nan_stays_in_its_windows_and_column() {
    let mut inputs = banks(2, 37, 5);
    let k = inputs.take("k").unwrap();
    let mut values = k.view().to_f64();
    values[[1, 20, 3]] = f64::NAN;
    let mut values = values.into_iter();
    inputs.push("k", Owned::from_fn(k.spec(), |_| values.next().unwrap()));
    for level in common::levels() {
        let got = common::run::<HdsConstruct>(&Options::default(), &inputs, &Exec { level, threads: 1 }).unwrap();
        let nan = |name: &str| -> Vec<[usize; 3]> {
            let values = got.get(name).unwrap().view().to_f64();
            let found = values.indexed_iter().filter(|(_, v)| v.is_nan()).map(|(at, _)| [at[0], at[1], at[2]]);
            found.collect()
        };
        // Windows of slots 16 to 20 and 20 to 24 of 37; one level up the windows 0 to 4 and 4 to 8.
        assert_eq!(nan("k1"), [[1, 4, 3], [1, 5, 3]]);
        assert_eq!(nan("k2"), [[1, 0, 3], [1, 1, 3]]);
        assert!(nan("v1").is_empty() && nan("v2").is_empty());
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |options: Options, inputs: &Named<Owned>| {
        common::run::<HdsConstruct>(&options, inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [("k", &[2, 3][..]), ("k", &[2, 0, 3]), ("v", &[2, 5, 4]), ("v", &[1, 5, 3]), ("v", &[5, 3])] {
        let mut inputs = banks(2, 5, 3);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        let error = refused(Options::default(), &inputs);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "hds_construct"), "{error}");
    }
    for (levels, ratio, name) in
        [(0, 4, "levels"), (1, 4, "levels"), (17, 4, "levels"), (3, 0, "ratio"), (3, 1, "ratio")]
    {
        let error = refused(Options { levels, ratio, cursor: 0 }, &banks(2, 5, 3));
        assert_eq!((error.kind, &*error.argument), (Kind::Option, name), "{error}");
    }
    let mut backward =
        check::backward_inputs::<HdsConstruct, HdsConstructBackward>(&Options::default(), &banks(2, 9, 3));
    backward.push("dk3", noise(1, &[2, 1, 3], 0.0, 1.0));
    let error = common::run::<HdsConstructBackward>(&Options::default(), &backward, &Exec::default());
    assert_eq!(error.err().expect("a refusal").kind, Kind::Argument);
    assert!(serde_json::from_str::<Options>(r#"{"level": 3}"#).is_err());
    assert!(serde_json::from_str::<Options>(r#"{"cursor": -1}"#).is_err());
}
