//! Rotary position embedding and its gradient against their f64 references and finite differences.

use crate::common;
use crate::common::check;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::attention::Layout;
use sidewinder_kernels::ops::positions::rope::{Options, Pairing, Rope, RopeBackward};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn options(pairing: Pairing, layout: Layout) -> Options {
    Options { pairing, layout, ..Options::default() }
}

fn every_way() -> impl Iterator<Item = Options> {
    [Pairing::Half, Pairing::Interleaved]
        .into_iter()
        .flat_map(|pairing| [Layout::HeadsFirst, Layout::HeadsLast].map(|layout| options(pairing, layout)))
}

#[test]
fn every_level_and_type_agrees_with_the_reference() {
    let widths = (1..=17).map(|pairs| [2, 3, 5, 2 * pairs]);
    for dims in widths.chain([[1, 2, 300, 64], [3, 1, 1, 128], [0, 1, 2, 4], [1, 0, 2, 4], [1, 2, 0, 4], [1, 2, 3, 0]])
    {
        for mut options in every_way() {
            options.first_position = 100_003;
            let inputs = check::inputs(&[("x", &dims)]);
            check::agrees_everywhere::<Rope>(&options, &inputs);
            let backward = check::backward_inputs::<Rope, RopeBackward>(&options, &inputs);
            check::agrees_everywhere::<RopeBackward>(&options, &backward);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for options in every_way() {
        check::gradients_agree_with_differences::<Rope, RopeBackward>(
            &options,
            &check::inputs(&[("x", &[1, 2, 3, 4])]),
        );
    }
}

fn rotated(options: &Options) -> Vec<f64> {
    let x = Owned::from_fn(Spec::new(DType::F64, &[1, 1, 1, 4]).unwrap(), |i| i as f64 + 1.0);
    let inputs: Named<Owned> = [("x", x)].into_iter().collect();
    let results = common::run::<Rope>(options, &inputs, &Exec::default()).unwrap();
    results.get("y").unwrap().view().to_f64().into_raw_vec_and_offset().0
}

#[test]
fn the_examples_of_the_formula_are_met() {
    for (pairing, expected) in [
        (Pairing::Half, [-1.98411065, 1.95990067, 2.4623779, 4.01979967]),
        (Pairing::Interleaved, [-1.14263966, 1.9220756, 2.95985067, 4.0297995]),
    ] {
        let got = rotated(&Options { first_position: 1, ..options(pairing, Layout::HeadsFirst) });
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-8, "{got}, not {expected}");
        }
    }
}

/// Short wavelengths are unchanged, long ones are stretched by the factor, and those between are interpolated.
#[test]
fn the_scaling_of_llama_3_stretches_long_waves() {
    let rate_of = |scaling_factor, theta| {
        let options = Options { theta, scaling_factor, first_position: 1, ..Options::default() };
        let got = rotated(&options);
        // The second pair is (2, 4), rotated by its rate.
        got[3].atan2(got[1]) - 4f64.atan2(2.0)
    };
    for (theta, expected) in [(1e4, 0.01), (1e10, 1e-5 / 8.0)] {
        assert!((rate_of(None, theta) - theta.powf(-0.5)).abs() < 1e-12);
        assert!((rate_of(Some(8.0), theta) - expected).abs() < 1e-12, "{theta}");
    }
    // theta = 4e6: rate 5e-4, wavelength 12566 > 8192; theta = 4e5: wavelength 3974, between 2048 and 8192.
    let (rate, share) = (4e5f64.powf(-0.5), (8192.0 / (2.0 * std::f64::consts::PI * 4e5f64.sqrt()) - 1.0) / 3.0);
    let expected = (1.0 - share) * rate / 8.0 + share * rate;
    assert!((rate_of(Some(8.0), 4e5) - expected).abs() < 1e-12);
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |dims: &[usize], options: Options| {
        common::run::<Rope>(&options, &check::inputs(&[("x", dims)]), &Exec::default()).err().expect("a refusal")
    };
    for dims in [&[2, 3, 4][..], &[1, 2, 3, 5]] {
        assert_eq!(refused(dims, Options::default()).kind, Kind::Shape);
    }
    for (name, options) in [
        ("theta", Options { theta: 0.0, ..Options::default() }),
        ("scaling_factor", Options { scaling_factor: Some(f64::NAN), ..Options::default() }),
        ("high_freq_factor", Options { high_freq_factor: 0.5, ..Options::default() }),
    ] {
        let error = refused(&[1, 2, 3, 4], options);
        assert_eq!((error.kind, &*error.argument), (Kind::Option, name), "{error}");
    }
}
