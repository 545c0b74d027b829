//! The norms and their gradients against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::{Error, Kind};
use sidewinder_kernels::op::{Backward, Differentiable, Name, Named, Op};
use sidewinder_kernels::ops::norm::*;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn inputs<O: Op>(dims: &[usize], low: f64, high: f64) -> Named<Owned> {
    let width = *dims.last().unwrap();
    let mut inputs: Named<Owned> =
        [("x", noise(1, dims, low, high)), ("w", noise(2, &[width], -2.0, 2.0))].into_iter().collect();
    if O::INPUTS.iter().any(|slot| slot.name == "b") {
        inputs.push("b", noise(3, &[width], -1.0, 1.0));
    }
    inputs
}

/// Checks the op and its gradient on every level and in every type.
fn agrees<O: Differentiable>(options: &O::Options, dims: &[usize], low: f64, high: f64) {
    let inputs = inputs::<O>(dims, low, high);
    check::agrees_everywhere::<O>(options, &inputs);
    // In shorter rows the gradients' terms cancel; golden tests cover those with tolerances of their own.
    if dims.last() > Some(&2) || dims.contains(&0) {
        check::agrees_everywhere::<Backward<O>>(options, &check::backward_inputs::<O, Backward<O>>(options, &inputs));
    }
}

fn rms(eps_mode: EpsMode) -> RmsOptions {
    RmsOptions { eps_mode, ..RmsOptions::default() }
}

fn layer_gelu(gelu: Gelu) -> LayerGeluOptions {
    LayerGeluOptions { gelu, ..LayerGeluOptions::default() }
}

fn all(dims: &[usize], low: f64, high: f64) {
    for mode in [EpsMode::Inside, EpsMode::Outside] {
        agrees::<RmsNorm>(&rms(mode), dims, low, high);
    }
    agrees::<LayerNorm>(&LayerOptions::default(), dims, low, high);
    for gelu in [Gelu::Tanh, Gelu::Erf] {
        agrees::<LayerNormGelu>(&layer_gelu(gelu), dims, low, high);
    }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    for width in 1..=33 {
        all(&[3, width], -2.0, 2.0);
    }
    for dims in [&[7][..], &[0, 4], &[4, 0], &[2, 0, 3], &[2, 3, 65], &[67, 127], &[1, 4096], &[130, 1000]] {
        all(dims, -2.0, 2.0);
    }
}

/// An output that exceeds the caches, in which each row has another offset from alignment. Few threads prefetch memory
/// before writing it, many use non-temporal stores, and neither changes a bit.
#[test]
fn large_outputs_are_those_of_their_rows() {
    let (rows, width) = (4300, 1003);
    let inputs = inputs::<LayerNorm>(&[rows, width], -2.0, 2.0);
    let options = LayerOptions::default();
    let all = |inputs: &Named<Owned>, level, threads| {
        common::bits(&common::run::<LayerNorm>(&options, inputs, &Exec { level, threads }).unwrap())
    };
    for level in common::levels() {
        let mut parts = vec![Vec::new(); 3];
        for range in [0..rows / 2, rows / 2..rows] {
            let part = |(name, t): (&Name, &Owned)| match name.as_ref() {
                "x" => (name.clone(), common::part(t, 0, range.clone())),
                _ => (name.clone(), t.clone()),
            };
            let part = all(&inputs.iter().map(part).collect(), level, 1);
            parts.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
        }
        for &threads in common::THREADS {
            assert!(all(&inputs, level, threads) == parts, "{} {threads} threads", level.name());
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    fn differences<O: Differentiable>(options: &O::Options) {
        let inputs = inputs::<O>(&[2, 5], -2.0, 2.0);
        check::gradients_agree_with_differences::<O, Backward<O>>(options, &inputs);
    }
    differences::<RmsNorm>(&rms(EpsMode::Inside));
    differences::<RmsNorm>(&rms(EpsMode::Outside));
    differences::<LayerNormGelu>(&layer_gelu(Gelu::Tanh));
    differences::<LayerNormGelu>(&layer_gelu(Gelu::Erf));
}

fn of_rows(rows: &[&[f32]]) -> Owned {
    let values = rows.concat();
    Owned::from_fn(Spec::new(DType::F32, &[rows.len(), rows[0].len()]).unwrap(), |i| values[i] as f64)
}

fn of_row(values: &[f32]) -> Owned {
    Owned::from_fn(Spec::new(DType::F32, &[values.len()]).unwrap(), |i| values[i] as f64)
}

fn run_on_every_level<O: Op>(options: &O::Options, inputs: &Named<Owned>, check: impl Fn(&str, &[f32])) {
    for level in common::levels() {
        let results = common::run::<O>(options, inputs, &Exec { level, threads: 1 }).unwrap();
        for (name, result) in results.iter() {
            check(name, result.view().slice::<f32>().unwrap());
        }
    }
}

fn near(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((*got as f64 - expected).abs() < 2e-6, "{got}, not {expected}");
    }
}

#[test]
fn the_examples_of_the_formulas_are_met() {
    let x = ("x", of_rows(&[&[3.0, 4.0]]));
    let w = ("w", of_row(&[1.0, 1.0]));
    let rms_inputs: Named<Owned> = [x, w].into_iter().collect();
    run_on_every_level::<RmsNorm>(&rms(EpsMode::Inside), &rms_inputs, |_, y| near(y, &[0.848528103, 1.1313708]));
    let mut backward = rms_inputs.clone();
    backward.push("dy", of_rows(&[&[1.0, 0.0]]));
    run_on_every_level::<RmsNormBackward>(&rms(EpsMode::Inside), &backward, |name, got| match name {
        "dx" => near(got, &[0.181019337, -0.135764486]),
        _ => near(got, &[0.848528103, 0.0]),
    });
    let layer: Named<Owned> =
        [("x", of_rows(&[&[1.0, 2.0, 3.0, 4.0]])), ("w", of_row(&[1.0; 4])), ("b", of_row(&[0.0; 4]))]
            .into_iter()
            .collect();
    run_on_every_level::<LayerNorm>(&LayerOptions::default(), &layer, |name, got| match name {
        "y" => near(got, &[-1.34163542, -0.447211807, 0.447211807, 1.34163542]),
        "mean" => near(got, &[2.5]),
        _ => near(got, &[0.894423613]),
    });
    run_on_every_level::<LayerNormGelu>(&layer_gelu(Gelu::Tanh), &layer, |_, got| {
        near(got, &[-0.120788736, -0.146411163, 0.300800644, 1.22084668])
    });
}

/// Numbers whose squares would overflow, and rows whose mean is far larger than their deviations from it.
#[test]
fn large_numbers_and_large_means_keep_their_digits() {
    let width = 4096;
    let mut huge = inputs::<RmsNorm>(&[2, width], -1.0, 1.0);
    huge.take("x");
    huge.push(
        "x",
        Owned::from_fn(Spec::new(DType::F32, &[2, width]).unwrap(), |i| if i % 2 == 0 { 1e18 } else { -1e18 }),
    );
    let truth = common::reference::<RmsNorm>(&rms(EpsMode::Inside), &huge);
    let far = inputs::<LayerNorm>(&[2, 1000], 999.0, 1001.0);
    let far_truth = common::reference::<LayerNorm>(&LayerOptions::default(), &far);
    for level in common::levels() {
        let exec = Exec { level, threads: 1 };
        let got = common::run::<RmsNorm>(&rms(EpsMode::Inside), &huge, &exec).unwrap();
        common::assert_close(&got, &truth, level.name());
        let got = common::run::<LayerNorm>(&LayerOptions::default(), &far, &exec).unwrap();
        // The inputs themselves are only exact to 6e-5.
        let worst = common::worst(got.get("y").unwrap(), far_truth.get("y").unwrap(), 1e-5, 1e-3);
        assert!(worst <= 1.0, "off by {worst} on {}", level.name());
    }
}

#[test]
fn rows_without_differences_give_the_bias() {
    for width in [1, 5, 16, 40] {
        let mut constant = inputs::<LayerNorm>(&[1, width], 0.0, 1.0);
        constant.take("x");
        constant.push("x", of_rows(&[&vec![3.25; width]]));
        let bias = constant.get("b").unwrap().view().slice::<f32>().unwrap().to_vec();
        run_on_every_level::<LayerNorm>(&LayerOptions::default(), &constant, |name, got| {
            if name == "y" {
                assert_eq!(got, bias);
            }
        });
    }
}

#[test]
fn nan_stays_in_its_row() {
    let mut inputs = inputs::<LayerNormGelu>(&[3, 37], -1.0, 1.0);
    let x = inputs.take("x").unwrap().view().to_f64();
    let mut values = x.indexed_iter().map(|(at, &v)| if (at[0], at[1]) == (1, 18) { f64::NAN } else { v });
    inputs.push("x", Owned::from_fn(Spec::new(DType::F32, &[3, 37]).unwrap(), |_| values.next().unwrap()));
    run_on_every_level::<LayerNormGelu>(&LayerGeluOptions::default(), &inputs, |_, got| {
        for (i, value) in got.iter().enumerate() {
            assert_eq!(value.is_nan(), i / 37 == 1, "{i}");
        }
    });
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, dims: &[usize]| -> Error {
        let mut inputs = inputs::<LayerNorm>(&[2, 4], 0.0, 1.0);
        inputs.take(name);
        inputs.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<LayerNorm>(&LayerOptions::default(), &inputs, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims, argument) in [("x", &[][..], "x"), ("x", &[2, 5], "w"), ("w", &[5], "w"), ("b", &[2, 4], "b")] {
        let error = refused(name, dims);
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, argument, "layer_norm"), "{error}");
    }
    for eps in [-1.0, f64::NAN, f64::INFINITY] {
        let options = LayerOptions { eps };
        let error = common::run::<LayerNorm>(&options, &inputs::<LayerNorm>(&[2, 4], 0.0, 1.0), &Exec::default());
        assert_eq!(error.err().expect("a refusal").kind, Kind::Option);
    }
}

#[test]
fn any_number_of_rows_of_nothing_is_nothing() {
    let mut inputs = inputs::<LayerNormGelu>(&[0], 0.0, 1.0);
    inputs.take("x");
    inputs.push("x", Owned::from_fn(Spec::new(DType::F32, &[1 << 45, 0]).unwrap(), |_| 0.0));
    for level in common::levels().chain([Level::Reference]) {
        let exec = Exec { level, threads: 2 };
        common::run::<LayerNormGelu>(&LayerGeluOptions::default(), &inputs, &exec).unwrap();
    }
}
