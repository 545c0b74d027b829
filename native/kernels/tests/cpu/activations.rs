//! The activation functions and their gradients against their f64 references and finite differences.

use crate::common;
use crate::common::check::{self, noise};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::activations::{Activation, Activations, ActivationsBackward, Options};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn options(function: Activation) -> Options {
    Options { function: Some(function), return_derivative: true }
}

fn values(values: &[f32]) -> Named<Owned> {
    let spec = Spec::new(DType::F32, &[values.len()]).unwrap();
    [("x", Owned::from_fn(spec, |i| values[i] as f64))].into_iter().collect()
}

/// Noise that starts with a 9, because tolerances are relative to the largest value of a tensor: small values of GELU
/// are no more accurate than that.
fn with_a_large_one(dims: &[usize]) -> Owned {
    let noise = noise(1, dims, -9.0, 9.0).view().to_f64();
    let mut values = noise.iter().enumerate().map(|(i, &v)| if i == 0 { 9.0 } else { v });
    Owned::from_fn(Spec::new(DType::F32, dims).unwrap(), |_| values.next().unwrap())
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let shapes = (0..=33).map(|n| vec![n]).chain([vec![], vec![3, 5, 7], vec![2, 0, 3], vec![70001]]);
    for dims in shapes {
        for function in Activation::ALL {
            let inputs: Named<Owned> = [("x", with_a_large_one(&dims))].into_iter().collect();
            check::agrees_everywhere::<Activations>(&options(function), &inputs);
            let mut backward = inputs.clone();
            backward.push("dy", noise(2, &dims, -1.0, 1.0));
            check::agrees_everywhere::<ActivationsBackward>(&options(function), &backward);
        }
    }
}

/// An output that exceeds the caches, so that it is written by non-temporal stores, at an address that is not aligned
/// for vectors.
#[test]
fn large_outputs_agree_from_any_address() {
    let (count, skipped) = ((16 << 20) / 4 + 37, 3);
    let x = noise(5, &[count + skipped], -5.0, 5.0);
    for level in common::levels() {
        let whole: Named<Owned> = [("x", x.clone())].into_iter().collect();
        let only = Options { function: Some(Activation::Silu), return_derivative: false };
        let whole = common::run::<Activations>(&only, &whole, &Exec { level, threads: 2 }).unwrap();
        let whole = whole.get("y").unwrap().view().slice::<f32>().unwrap().to_vec();
        // Few threads prefetch memory before writing it; many threads use non-temporal stores.
        for threads in [1, 9] {
            let mut part = Owned::poisoned(Spec::new(DType::F32, &[count + skipped]).unwrap());
            let (_, to) = part.view_mut().split_rows(skipped).unwrap();
            let inputs = [("x", x.view().rows(skipped..count + skipped).unwrap())].into_iter().collect();
            let outputs = [("y", to)].into_iter().collect();
            sidewinder_kernels::op::run_cpu::<Activations>(&only, &inputs, outputs, &Exec { level, threads }).unwrap();
            let part = part.view().slice::<f32>().unwrap()[skipped..].to_vec();
            assert_eq!(part, whole[skipped..], "{} {threads} threads", level.name());
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for function in Activation::ALL {
        let inputs: Named<Owned> = [("x", noise(3, &[2, 9], -3.0, 3.0))].into_iter().collect();
        let mut options = options(function);
        options.return_derivative = false;
        check::gradients_agree_with_differences::<Activations, ActivationsBackward>(&options, &inputs);
    }
}

/// From the smallest numbers to 1e18 all results are finite and accurate.
#[test]
fn extreme_values_stay_finite() {
    let powers = (-45..=18).map(|e| 10f32.powi(e));
    let x: Vec<f32> = powers.flat_map(|v| [v, -v]).chain([88.0, -88.0, 104.0, -104.0, 3.4e38, -3.4e38, 0.0]).collect();
    for function in Activation::ALL {
        let truth = common::reference::<Activations>(&options(function), &values(&x));
        for level in common::levels() {
            let got = common::run::<Activations>(&options(function), &values(&x), &Exec { level, threads: 1 }).unwrap();
            for name in ["y", "dydx"] {
                let (got, truth) = (got.get(name).unwrap(), truth.get(name).unwrap());
                assert!(got.view().to_f64().iter().all(|v| v.is_finite()), "{function:?} {name} {}", level.name());
                let worst = common::worst(got, truth, 2e-6, 1e-6);
                assert!(worst <= 1.0, "{function:?} {name} is off by {worst} on {}", level.name());
            }
        }
    }
}

#[test]
fn nan_stays_where_it_is() {
    for function in Activation::ALL {
        for level in common::levels() {
            let mut x = vec![0.5; 37];
            x[18] = f32::NAN;
            let got = common::run::<Activations>(&options(function), &values(&x), &Exec { level, threads: 1 }).unwrap();
            for (i, v) in got.get("y").unwrap().view().to_f64().iter().enumerate() {
                assert_eq!(v.is_nan(), i == 18, "{function:?} {i} on {}", level.name());
            }
        }
    }
}

#[test]
fn the_table_of_the_formulas_is_met() {
    let x = [-2.0, -1.0, 0.0, 1.0, 2.0];
    let table = [
        (Activation::Silu, "y", [-0.238405844, -0.268941421, 0.0, 0.731058579, 1.76159416]),
        (Activation::GeluTanh, "y", [-0.0454023059, -0.158808009, 0.0, 0.841191991, 1.95459769]),
        (Activation::GeluErf, "y", [-0.0455002639, -0.158655254, 0.0, 0.841344746, 1.95449974]),
        (Activation::Silu, "dydx", [-0.0907842488, 0.0723294881, 0.5, 0.927670512, 1.09078425]),
        (Activation::GeluTanh, "dydx", [-0.0860992566, -0.0829640838, 0.5, 1.08296408, 1.08609926]),
        (Activation::GeluErf, "dydx", [-0.0852318011, -0.0833154706, 0.5, 1.08331547, 1.0852318]),
    ];
    for (function, name, expected) in table {
        let got = common::reference::<Activations>(&options(function), &values(&x));
        for (got, expected) in got.get(name).unwrap().view().to_f64().iter().zip(expected) {
            assert!((got - expected).abs() < 1e-8, "{function:?} {name}: {got}, not {expected}");
        }
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let none = Options::default();
    let error = common::run::<Activations>(&none, &values(&[1.0]), &Exec::default()).err().expect("a refusal");
    assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Option, "fn", "activations"), "{error}");
    let bytes = [("x", values(&[1.0]).get("x").unwrap().cast(DType::U8))].into_iter().collect();
    let error = common::run::<Activations>(&options(Activation::Silu), &bytes, &Exec::default()).err().unwrap();
    assert_eq!((error.kind, &*error.argument), (Kind::DType, "x"), "{error}");
    assert!(serde_json::from_str::<Options>(r#"{"fn": "swish"}"#).is_err());
}
