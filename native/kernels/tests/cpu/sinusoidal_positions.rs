//! Sinusoidal positions and their gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::positions::sinusoidal_positions::{
    Options, SinusoidalPositions, SinusoidalPositionsBackward,
};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn from(first_position: i64) -> Options {
    Options { first_position, ..Options::default() }
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let widths = (1..=33).map(|width| [2, 5, width]);
    let others = [[1, 300, 61], [3, 17, 127], [1, 1, 1], [0, 2, 3], [2, 0, 3], [2, 3, 0], [5, 40, 512]];
    for dims in widths.chain(others) {
        for options in [from(0), from(100_003), Options { theta: 10.0, ..from(-7) }] {
            let inputs = check::inputs(&[("x", &dims)]);
            check::agrees_everywhere::<SinusoidalPositions>(&options, &inputs);
        }
        let inputs = check::inputs(&[("x", &dims), ("dy", &dims)]);
        check::agrees_everywhere::<SinusoidalPositionsBackward>(&from(3), &inputs);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for width in [1, 2, 5] {
        check::gradients_agree_with_differences::<SinusoidalPositions, SinusoidalPositionsBackward>(
            &from(2),
            &check::inputs(&[("x", &[2, 3, width])]),
        );
    }
}

fn of_zeros(dims: &[usize], options: &Options) -> Vec<f64> {
    let inputs: Named<Owned> =
        [("x", Owned::from_fn(Spec::new(DType::F64, dims).unwrap(), |_| 0.0))].into_iter().collect();
    let results = common::run::<SinusoidalPositions>(options, &inputs, &Exec::default()).unwrap();
    results.get("y").unwrap().view().to_f64().into_raw_vec_and_offset().0
}

#[test]
fn the_examples_of_the_formula_are_met() {
    // sin and cos of p, and of p/100 in four columns, or p 10000^(-2/3) in three.
    for (dims, first, expected) in [
        ([1, 1, 4], 0, vec![0.0, 1.0, 0.0, 1.0]),
        ([1, 1, 4], 1, vec![0.84147098, 0.54030231, 0.00999983, 0.99995]),
        ([1, 2, 1], 1, vec![0.84147098, 0.90929743]),
        ([1, 1, 3], 2, vec![0.90929743, -0.41614684, 0.00430886]),
        ([2, 1, 2], -1, vec![-0.84147098, 0.54030231, -0.84147098, 0.54030231]),
    ] {
        let got = of_zeros(&dims, &from(first));
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-8, "{got}, not {expected}");
        }
    }
}

#[test]
fn a_later_first_position_goes_on_where_another_call_ended() {
    let (whole, end) = (of_zeros(&[1, 50, 7], &from(99_990)), of_zeros(&[1, 10, 7], &from(100_030)));
    assert_eq!(whole[40 * 7..], end);
}

#[test]
fn no_position_overflows() {
    for first in [i64::MIN, i64::MAX, i64::MAX - 1] {
        let waves = of_zeros(&[1, 40, 3], &from(first));
        assert!(waves.iter().all(|wave| wave.abs() <= 1.0), "{first}");
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |dims: &[usize], options: Options| {
        common::run::<SinusoidalPositions>(&options, &check::inputs(&[("x", dims)]), &Exec::default())
            .err()
            .expect("a refusal")
    };
    for dims in [&[3, 4][..], &[1, 2, 3, 4], &[]] {
        let error = refused(dims, Options::default());
        assert_eq!((error.kind, &*error.argument), (Kind::Shape, "x"), "{error}");
    }
    for theta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = refused(&[1, 2, 3], Options { theta, ..Options::default() });
        assert_eq!((error.kind, &*error.argument), (Kind::Option, "theta"), "{error}");
    }
}
