//! Memory decay integration, its parts and their gradients against their f64 references, finite differences and
//! examples.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{self, Differentiable, Named, Op};
use sidewinder_kernels::ops::mm_rec::mdi::gamma::{MdiGamma, MdiGammaBackward};
use sidewinder_kernels::ops::mm_rec::mdi::update::{MdiUpdate, MdiUpdateBackward, Options};
use sidewinder_kernels::ops::mm_rec::mdi::{Mdi, MdiBackward};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

const NONE: Options = Options {};

fn update(dims: &[usize]) -> Named<Owned> {
    check::inputs(&[("z", dims), ("h_old", dims), ("gate", dims), ("gamma", dims)])
}

/// Inputs of the step, including those of the coefficient.
fn step(rows: &[usize], [width, inner]: [usize; 2], context: bool) -> Named<Owned> {
    let x = [rows, &[width]].concat();
    let of = |inputs: usize| 1.0 / (inputs.max(1) as f64).sqrt();
    let mut all: Vec<(&'static str, Vec<usize>, f64)> = vec![
        ("z", x.clone(), 1.0),
        ("h_prev", x.clone(), 1.0),
        ("wm", vec![width, 2 * width], of(2 * width)),
        ("bm", vec![width], 1.0),
    ];
    if context {
        all.push(("context", x, 1.0));
    }
    for names in [["wg1", "bg1", "wg2", "bg2"], ["wc1", "bc1", "wc2", "bc2"]].into_iter().take(1 + usize::from(context))
    {
        let shapes = [vec![inner, width], vec![inner], vec![width, inner], vec![width]];
        let bounds = [of(width), 1.0, of(inner), 1.0];
        all.extend(names.into_iter().zip(shapes).zip(bounds).map(|((name, dims), bound)| (name, dims, bound)));
    }
    all.iter().zip(1..).map(|((name, dims, bound), seed)| (*name, noise(seed, dims, -bound, *bound))).collect()
}

fn coefficient(rows: &[usize], sizes: [usize; 2], context: bool) -> Named<Owned> {
    check::known(op::about::<MdiGamma>(), &step(rows, sizes, context))
}

#[test]
fn the_update_agrees_with_the_reference_everywhere() {
    let shapes = (0..=33).map(|n| vec![n]).chain([vec![], vec![3, 5, 7], vec![2, 0, 3], vec![70001]]);
    for dims in shapes {
        check::agrees_everywhere::<MdiUpdate>(&NONE, &update(&dims));
        let backward = check::backward_inputs::<MdiUpdate, MdiUpdateBackward>(&NONE, &update(&dims));
        check::agrees_everywhere::<MdiUpdateBackward>(&NONE, &backward);
    }
}

fn composed_agree<O: Differentiable<Options = Options>, B: Op<Options = Options>>(inputs: &Named<Owned>) {
    check::steps_agree_everywhere::<O>(&NONE, inputs);
    let mut backward = check::backward_inputs::<O, B>(&NONE, inputs);
    check::steps_agree_everywhere::<B>(&NONE, &backward);
    for slot in B::INPUTS.iter().filter(|slot| slot.optional && slot.name.starts_with('d')) {
        backward.take(slot.name);
    }
    check::steps_agree_everywhere::<B>(&NONE, &backward);
}

#[test]
fn the_coefficient_and_the_step_agree_with_the_reference_everywhere() {
    for (rows, sizes) in [
        (&[1][..], [1, 1]),
        (&[], [5, 2]),
        (&[2, 3], [3, 1]),
        (&[7], [17, 4]),
        (&[2, 3, 5], [8, 13]),
        (&[3, 37], [31, 7]),
        (&[0], [4, 2]),
        (&[2, 0], [4, 1]),
    ] {
        for context in [false, true] {
            composed_agree::<MdiGamma, MdiGammaBackward>(&coefficient(rows, sizes, context));
            composed_agree::<Mdi, MdiBackward>(&step(rows, sizes, context));
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    check::gradients_agree_with_differences::<MdiUpdate, MdiUpdateBackward>(&NONE, &update(&[2, 7]));
    for context in [false, true] {
        let inputs = coefficient(&[2, 3], [5, 3], context);
        check::gradients_agree_with_differences::<MdiGamma, MdiGammaBackward>(&NONE, &inputs);
        check::gradients_agree_with_differences::<Mdi, MdiBackward>(&NONE, &step(&[2], [4, 3], context));
    }
}

fn filled(values: &[(&'static str, &[usize], f64)]) -> Named<Owned> {
    let tensor = |dims: &[usize], value| Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |_| value);
    values.iter().map(|&(name, dims, value)| (name, tensor(dims, value))).collect()
}

fn one(of: &Named<Owned>, name: &str) -> f64 {
    *of.get(name).unwrap().view().to_f64().first().unwrap()
}

fn assert_near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() <= 1e-6 * expected.abs(), "{what} is {got}, not {expected}");
}

#[test]
fn the_examples_of_the_formulas_agree() {
    let core = filled(&[("z", &[1], 2.0), ("h_old", &[1], 1.0), ("gate", &[1], 0.25), ("gamma", &[1], 0.5)]);
    let mut back = core.clone();
    back.push("dh", filled(&[("dh", &[1], 1.0)]).take("dh").unwrap());
    let all = filled(&[("z", &[1, 1], 1.0), ("h_prev", &[1, 1], 0.5), ("wm", &[1, 2], 1.0), ("bm", &[1], 0.0)]);
    let context = filled(&[("context", &[1, 1], -1.0)]).take("context").unwrap();
    let networks = [
        filled(&[("wg1", &[1, 1], 1.0), ("bg1", &[1], 0.0), ("wg2", &[1, 1], 1.0), ("bg2", &[1], 0.0)]),
        filled(&[("wc1", &[1, 1], 1.0), ("bc1", &[1], 0.0), ("wc2", &[1, 1], 1.0), ("bc2", &[1], 0.0)]),
    ];
    for &level in Level::available() {
        let exec = Exec { level, threads: 1 };
        assert_eq!(one(&common::run::<MdiUpdate>(&NONE, &core, &exec).unwrap(), "h"), 1.75);
        let gradients = common::run::<MdiUpdateBackward>(&NONE, &back, &exec).unwrap();
        for (name, expected) in [("dz", 0.25), ("dh_old", 1.25), ("dgate", 1.0), ("dgamma", 1.0)] {
            assert_eq!(one(&gradients, name), expected, "{name}");
        }
        let mut inputs = all.clone();
        inputs = inputs.into_iter().chain(networks[0].clone()).collect();
        let got = common::run::<Mdi>(&NONE, &inputs, &exec).unwrap();
        for (name, expected) in [("gate", 0.817574476), ("gamma", 0.698748359), ("h_new", 1.25816142)] {
            assert_near(one(&got, name), expected, name);
        }
        inputs.push("context", context.clone());
        inputs = inputs.into_iter().chain(networks[1].clone()).collect();
        let got = common::run::<Mdi>(&NONE, &inputs, &exec).unwrap();
        for (name, expected) in [("gamma", 0.321717145), ("h_new", 1.06964581)] {
            assert_near(one(&got, name), expected, name);
        }
    }
}

/// Large biases push the coefficient beyond its bounds: it stays on them, and its gradient is 0.
#[test]
fn beyond_the_ends_nothing_changes() {
    for (bias, end) in [(30.0, 1.0 - 1e-6), (-30.0, 1e-6)] {
        for dtype in [DType::F32, DType::F64] {
            for level in Level::available().iter().copied() {
                let exec = Exec { level, threads: 1 };
                let mut inputs = coefficient(&[3], [5, 2], true);
                for name in ["bg2", "bc2"] {
                    let spec = inputs.take(name).unwrap().spec();
                    inputs.push(name, Owned::from_fn(spec, |_| bias));
                }
                let inputs = common::cast(op::about::<MdiGamma>(), &inputs, dtype);
                let gamma = common::run::<MdiGamma>(&NONE, &inputs, &exec).unwrap();
                let off = gamma.get("gamma").unwrap().view().to_f64().mapv(|v| (v - end).abs());
                assert!(off.iter().all(|&off| off <= 6e-8), "{bias} on {}", level.name());
                let backward = check::backward_inputs::<MdiGamma, MdiGammaBackward>(&NONE, &inputs);
                for (name, gradient) in common::run::<MdiGammaBackward>(&NONE, &backward, &exec).unwrap() {
                    assert!(gradient.view().to_f64().iter().all(|&v| v == 0.0), "{name} {bias} {}", level.name());
                }
            }
        }
    }
}

/// NaN appears in exactly those rows where it was put in.
#[test]
fn nan_stays_in_its_row() {
    for name in ["z", "context", "h_prev"] {
        let mut inputs = step(&[4], [5, 2], true);
        let given = inputs.take(name).unwrap();
        let mut values = given.view().to_f64().into_iter().enumerate().map(|(i, v)| if i == 7 { f64::NAN } else { v });
        inputs.push(name, Owned::from_fn(given.spec(), |_| values.next().unwrap()));
        for level in common::levels() {
            let got = common::run::<Mdi>(&NONE, &inputs, &Exec { level, threads: 1 }).unwrap();
            for (i, row) in got.get("h_new").unwrap().view().to_f64().outer_iter().enumerate() {
                let any = row.iter().any(|v| v.is_nan());
                assert_eq!(any, i == 1, "{name} row {i} on {}", level.name());
            }
        }
    }
}

fn refused<O: Op<Options = Options>>(inputs: &Named<Owned>) -> Error {
    common::run::<O>(&NONE, inputs, &Exec::default()).err().expect("a refusal")
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    for (name, dims) in [
        ("z", &[][..]),
        ("context", &[2, 3]),
        ("h_prev", &[3, 4]),
        ("wm", &[4, 4]),
        ("bm", &[8]),
        ("wg1", &[2, 3]),
        ("bg1", &[3]),
        ("wg2", &[2, 4]),
        ("bg2", &[5]),
        ("wc1", &[3, 4]),
        ("bc1", &[1, 2]),
        ("wc2", &[4, 3]),
        ("bc2", &[3]),
    ] {
        let mut inputs = step(&[2], [4, 2], true);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        let error = refused::<Mdi>(&inputs);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "mdi"), "{error}");
    }
    for missing in ["context", "wc1", "bc1", "wc2", "bc2", "bg2", "h_prev"] {
        let mut inputs = step(&[2], [4, 2], true);
        inputs.take(missing);
        let error = refused::<Mdi>(&inputs);
        assert_eq!((error.kind, &*error.argument), (Kind::Argument, missing), "{error}");
    }
    let mut inputs = update(&[3]);
    inputs.take("gate");
    inputs.push("gate", noise(1, &[2], 0.0, 1.0));
    assert_eq!(refused::<MdiUpdate>(&inputs).kind, Kind::Shape);
    let halves = inputs.map(|t| t.cast(DType::F16));
    let mixed: Named<Owned> = inputs.into_iter().take(1).chain(halves.into_iter().skip(1)).collect();
    assert_eq!(refused::<MdiUpdate>(&mixed).kind, Kind::DType);
    assert!(serde_json::from_str::<Options>(r#"{"mix": 1}"#).is_err());
}
