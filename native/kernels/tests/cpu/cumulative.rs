//! Cumulative products, sums and log-sums and their gradients, against their f64 references, finite differences, the
//! formulas' examples, and against themselves run in pieces.

use crate::common;
use crate::common::check::{self, noise};
use crate::common::cumulative::{SIZES, column, flipped, inputs};
use crate::common::part;
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{Named, Op};
use sidewinder_kernels::ops::scan::cumulative::{
    CumSum, CumSumBackward, CumprodScan, CumprodScanBackward, ExpProductOptions, ExpProductScan,
    ExpProductScanBackward, LogCumSumExp, LogCumSumExpBackward, Options, ReverseCumSum, ReverseCumSumBackward,
    SumOptions,
};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

const SUM: SumOptions = SumOptions { return_state: true };

fn plain(reverse: bool) -> Options {
    Options { reverse, return_state: true }
}

fn exp_product(reverse: bool) -> ExpProductOptions {
    ExpProductOptions { reverse, return_state: true, ..Default::default() }
}

fn both<F: Op, B: Op<Options = F::Options>>(options: &F::Options, inputs: &Named<Owned>) {
    check::agrees_everywhere::<F>(options, inputs);
    check::agrees_everywhere::<B>(options, &check::backward_inputs::<F, B>(options, inputs));
}

#[test]
fn the_product_agrees_with_the_reference() {
    for sizes in SIZES {
        for (reverse, start) in [(false, None), (true, Some(2.0))] {
            both::<CumprodScan, CumprodScanBackward>(&plain(reverse), &inputs("gamma", sizes, (-1.3, 1.4), 0.0, start));
            both::<CumprodScan, CumprodScanBackward>(&plain(reverse), &inputs("gamma", sizes, (0.9, 1.0), 1.0, start));
        }
    }
}

#[test]
fn the_product_by_logarithms_agrees_with_the_reference() {
    for sizes in SIZES {
        for (reverse, start) in [(true, None), (false, Some(2.0))] {
            let inputs = inputs("gamma", sizes, (-0.02, 1.1), 1.0, start);
            // Without a floor some of the logarithms are minus infinity, and are clamped from below.
            for (eps, log_min) in [(0.03, -50.0), (0.0, -3.0)] {
                let options = ExpProductOptions { eps, log_min, ..exp_product(reverse) };
                both::<ExpProductScan, ExpProductScanBackward>(&options, &inputs);
            }
        }
    }
}

#[test]
fn the_log_sum_exp_agrees_with_the_reference() {
    for sizes in SIZES {
        for (reverse, start) in [(false, None), (true, Some(3.0))] {
            let inputs = inputs("x", sizes, (-9.0, 9.0), f64::NEG_INFINITY, start);
            both::<LogCumSumExp, LogCumSumExpBackward>(&plain(reverse), &inputs);
        }
    }
}

#[test]
fn the_sums_agree_with_the_reference() {
    for sizes in SIZES {
        for start in [None, Some(2.0)] {
            let inputs = inputs("x", sizes, (-0.5, 1.0), 0.0, start);
            both::<CumSum, CumSumBackward>(&SUM, &inputs);
            both::<ReverseCumSum, ReverseCumSumBackward>(&SUM, &inputs);
        }
    }
}

#[test]
fn without_cotangents_of_states_and_logarithms_they_are_zero() {
    let options = ExpProductOptions { return_state: false, ..exp_product(false) };
    let inputs = inputs("gamma", [2, 1, 7, 19], (0.2, 0.9), 1.0, Some(1.0));
    let mut backward = check::backward_inputs::<ExpProductScan, ExpProductScanBackward>(&options, &inputs);
    assert!(backward.find("dlast_state").is_none());
    backward.take("dlog_y").unwrap();
    check::agrees_everywhere::<ExpProductScanBackward>(&options, &backward);
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (sizes, reverse) in [([1, 1, 1, 1], false), ([1, 2, 5, 3], true), ([2, 1, 9, 1], false)] {
        let start = (sizes[2] < 9).then_some(1.0);
        let gamma = inputs("gamma", sizes, (0.2, 0.95), 0.5, start);
        check::gradients_agree_with_differences::<ExpProductScan, ExpProductScanBackward>(
            &exp_product(reverse),
            &gamma,
        );
        let gamma = inputs("gamma", sizes, (-1.5, 1.5), 0.0, start);
        check::gradients_agree_with_differences::<CumprodScan, CumprodScanBackward>(&plain(reverse), &gamma);
        let x = inputs("x", sizes, (-3.0, 3.0), 3.0, start);
        check::gradients_agree_with_differences::<LogCumSumExp, LogCumSumExpBackward>(&plain(reverse), &x);
        check::gradients_agree_with_differences::<CumSum, CumSumBackward>(&SUM, &x);
        check::gradients_agree_with_differences::<ReverseCumSum, ReverseCumSumBackward>(&SUM, &x);
    }
}

/// Runs `O` at once and in pieces, each from the last state of the previous one, on every level.
fn pieces_make_the_whole<O: Op>(options: &O::Options, inputs: &Named<Owned>, cuts: &[usize]) {
    for level in common::levels() {
        let exec = Exec { level, threads: 2 };
        let whole = common::run::<O>(options, inputs, &exec).unwrap();
        let (x_name, x) = inputs.iter().next().unwrap();
        let mut state = inputs.find("initial_state").cloned();
        for ends in cuts.windows(2) {
            let mut piece: Named<Owned> = [(x_name.clone(), part(x, 2, ends[0]..ends[1]))].into_iter().collect();
            state.iter().for_each(|state| piece.push("initial_state", state.clone()));
            let mut got = common::run::<O>(options, &piece, &exec).unwrap();
            state = got.take("last_state");
            let of_whole = |name| part(whole.get(name).unwrap(), 2, ends[0]..ends[1]);
            let expected: Named<Owned> = got.iter().map(|(name, _)| (name.clone(), of_whole(name))).collect();
            common::assert_close(&got, &expected, &format!("{} {ends:?} {}", O::NAME, level.name()));
        }
        let last = [("last_state", whole.get("last_state").unwrap().clone())].into_iter().collect();
        common::assert_close(&[("last_state", state.unwrap())].into_iter().collect(), &last, O::NAME);
    }
}

/// 3 channels and 22000 steps at once are divided into chunks of 5461; most pieces are a single chunk.
#[test]
fn results_do_not_depend_on_how_time_is_cut() {
    let sizes = [1, 1, 22000, 3];
    let cuts = [0, 1, 8, 100, 5000, 5461, 9999, 12000, 17003, 20000, 22000];
    let gamma = inputs("gamma", sizes, (0.999, 1.0), 1.0, Some(1.0));
    pieces_make_the_whole::<CumprodScan>(&plain(false), &gamma, &cuts);
    pieces_make_the_whole::<ExpProductScan>(&exp_product(false), &gamma, &cuts);
    let x = inputs("x", sizes, (-9.0, 9.0), 0.0, Some(1.0));
    pieces_make_the_whole::<LogCumSumExp>(&plain(false), &x, &cuts);
    pieces_make_the_whole::<CumSum>(&SUM, &x, &cuts);
}

#[test]
fn the_reverse_is_the_scan_of_what_is_reversed() {
    for sizes in [[2, 2, 9, 5], [1, 1, 230, 300]] {
        let there = inputs("gamma", sizes, (0.5, 1.0), 0.0, Some(1.0));
        let back: Named<Owned> = there
            .iter()
            .map(|(name, t)| (name.clone(), if name == "gamma" { flipped(t) } else { t.clone() }))
            .collect();
        for level in common::levels() {
            let exec = Exec { level, threads: 2 };
            let there = common::run::<CumprodScan>(&plain(false), &there, &exec).unwrap();
            let back = common::run::<CumprodScan>(&plain(true), &back, &exec).unwrap();
            assert_eq!(flipped(back.get("y").unwrap()).view().bytes(), there.get("y").unwrap().view().bytes());
            assert_eq!(common::bits(&back)[1], common::bits(&there)[1]);
        }
    }
}

/// 65536 steps at once and in chunks, with factors near 1 and sums that grow.
#[test]
fn long_scans_keep_their_accuracy() {
    fn agrees<F: Op, B: Op<Options = F::Options>>(options: &F::Options, inputs: &Named<Owned>) {
        let backward = check::backward_inputs::<F, B>(options, inputs);
        let (truth, gradients) = (common::reference::<F>(options, inputs), common::reference::<B>(options, &backward));
        for level in common::levels() {
            let exec = Exec { level, threads: 2 };
            common::assert_close(&common::run::<F>(options, inputs, &exec).unwrap(), &truth, F::NAME);
            // Each gradient is a product with a sum in f32 over up to all steps.
            let got = common::run::<B>(options, &backward, &exec).unwrap();
            for (name, expected) in gradients.iter() {
                let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
                let off = common::worst(got.get(name).unwrap(), expected, 2e-5, 2e-5 * largest);
                assert!(off <= 1.0, "{} {name} is off by {off} times the tolerance on {}", B::NAME, level.name());
            }
        }
    }
    let sizes = [1, 1, 65536, 3];
    let gamma = inputs("gamma", sizes, (0.9999, 1.0), 1.0, None);
    agrees::<CumprodScan, CumprodScanBackward>(&plain(false), &gamma);
    agrees::<ExpProductScan, ExpProductScanBackward>(&exp_product(false), &gamma);
    let x = inputs("x", sizes, (0.0, 1.0), 0.1, None);
    agrees::<LogCumSumExp, LogCumSumExpBackward>(&plain(false), &x);
    agrees::<CumSum, CumSumBackward>(&SUM, &x);
}

/// A logarithm near 1 keeps all its digits, and so does a compensated sum of them.
#[test]
fn decays_near_1_keep_their_distance_from_1() {
    let (length, gamma) = (4096, 1.0f32 - 1e-6);
    let x = Owned::from_fn(Spec::new(DType::F32, &[1, 1, length, 1]).unwrap(), |_| gamma as f64);
    let inputs = [("gamma", x)].into_iter().collect();
    for level in common::levels() {
        let exec = Exec { level, threads: 1 };
        let got = common::run::<ExpProductScan>(&exp_product(false), &inputs, &exec).unwrap();
        let log_y = got.get("log_y").unwrap().view().to_f64();
        for (t, &log_y) in log_y.iter().enumerate() {
            let truth = (t + 1) as f64 * (gamma as f64).ln();
            assert!((log_y - truth).abs() <= 3e-7 * truth.abs(), "{t}: {log_y}, not {truth}, on {}", level.name());
        }
    }
}

fn sequence(values: &[f64]) -> Owned {
    column(Spec::new(DType::F64, &[1, 1, values.len(), 1]).unwrap(), values)
}

fn state(value: f64) -> Owned {
    column(Spec::new(DType::F64, &[1, 1, 1]).unwrap(), &[value])
}

fn near(of: &Named<Owned>, name: &str, expected: &[f64], level: Level) {
    let got = of.get(name).unwrap().view().to_f64();
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-8 * expected.abs(), "{name}: {got}, not {expected}, on {}", level.name());
    }
}

#[test]
fn the_examples_of_the_formulas_come_out() {
    for &level in Level::available() {
        let exec = Exec { level, threads: 1 };
        let given = |tensors: &[(&'static str, Owned)]| tensors.iter().cloned().collect::<Named<Owned>>();
        let gamma = sequence(&[0.5, 0.5, 1.0, 0.0]);
        let got = common::run::<ExpProductScan>(&exp_product(false), &given(&[("gamma", gamma.clone())]), &exec);
        let y = got.as_ref().unwrap().get("y").unwrap().clone();
        near(got.as_ref().unwrap(), "y", &[0.5, 0.25, 0.25, 2.5e-9], level);
        near(&got.unwrap(), "log_y", &[0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln(), 2.5e-9f64.ln()], level);
        let all = given(&[("gamma", gamma), ("y", y), ("dy", sequence(&[1.0; 4]))]);
        let got = common::run::<ExpProductScanBackward>(&exp_product(false), &all, &exec).unwrap();
        near(&got, "dgamma", &[2.000000005, 1.000000005, 0.2500000025, 0.0], level);

        let all = given(&[
            ("gamma", sequence(&[0.5, 0.8, 0.25])),
            ("initial_state", state(0.5f64.ln())),
            ("y", sequence(&[0.25, 0.2, 0.05])),
            ("dy", sequence(&[1.0, 2.0, 4.0])),
        ]);
        let got = common::run::<ExpProductScanBackward>(&exp_product(false), &all, &exec).unwrap();
        near(&got, "dgamma", &[1.7, 0.75, 0.8], level);
        near(&got, "dinitial_state", &[0.85], level);

        let gamma = sequence(&[0.5, 0.0, 0.8]);
        let got = common::run::<CumprodScan>(&plain(false), &given(&[("gamma", gamma.clone())]), &exec).unwrap();
        near(&got, "y", &[0.5, 0.0, 0.0], level);
        let all = given(&[("gamma", gamma), ("y", sequence(&[0.5, 0.0, 0.0])), ("dy", sequence(&[1.0, 2.0, 4.0]))]);
        let got = common::run::<CumprodScanBackward>(&plain(false), &all, &exec).unwrap();
        near(&got, "dgamma", &[1.0, 2.6, 0.0], level);
    }
}

/// The product over a part of a chunk of time overflows or underflows f32 here, although no result does.
#[test]
fn products_of_chunks_do_not_overflow() {
    let (length, width) = (1100, 64);
    for up in [false, true] {
        let power = |v: f64| if up { 1.0 / v } else { v };
        let value = |i: usize| match i / width {
            0..100 => power(0.25),
            100..150 => power(8.0),
            200 if i.is_multiple_of(width) => 0.0,
            150..300 => 1.0,
            300..400 => power(0.5),
            400..700 => power(1.5),
            _ => power(0.9375),
        };
        let gamma = Owned::from_fn(Spec::new(DType::F32, &[1, 1, length, width]).unwrap(), value);
        let initial_state = Owned::from_fn(Spec::new(DType::F32, &[1, 1, width]).unwrap(), |_| power(2f64.powi(100)));
        let inputs = [("gamma", gamma), ("initial_state", initial_state)].into_iter().collect();
        let truth = common::reference::<CumprodScan>(&plain(false), &inputs);
        for level in common::levels() {
            let got = common::run::<CumprodScan>(&plain(false), &inputs, &Exec { level, threads: 2 }).unwrap();
            let off = common::worst(got.get("y").unwrap(), truth.get("y").unwrap(), 3e-5, 0.0);
            assert!(off <= 1.0, "off by {off} times the tolerance on {}", level.name());
        }
    }
}

#[test]
fn infinities_and_huge_numbers_are_right() {
    let (inf, huge) = (f64::INFINITY, 3e38);
    let all: &[(&[f64], &[f64])] = &[
        (&[-inf, -inf, 1.0, -inf], &[-inf, -inf, 1.0, 1.0]),
        (&[0.0, inf, 1.0, -inf], &[0.0, inf, inf, inf]),
        (&[huge, -huge, huge, huge], &[huge, huge, huge, huge]),
        (&[-huge, -inf, -huge, 0.0], &[-huge, -huge, -huge, 0.0]),
    ];
    for level in common::levels() {
        for (x, expected) in all {
            let spec = Spec::new(DType::F32, &[1, 1, 4, 1]).unwrap();
            let inputs = [("x", column(spec, x))].into_iter().collect();
            let exec = Exec { level, threads: 1 };
            let got = common::run::<LogCumSumExp>(&plain(false), &inputs, &exec).unwrap();
            let off = common::worst(got.get("y").unwrap(), &column(spec, expected), 1e-6, 0.0);
            assert!(off <= 1.0, "{x:?} on {}: {:?}", level.name(), got.get("y").unwrap().view().to_f64());
            let dy = ("dy", column(spec, &[1.0; 4]));
            let given = inputs.into_iter().chain([(dy.0.into(), dy.1)]).collect();
            let got = common::run::<LogCumSumExpBackward>(&plain(false), &given, &exec).unwrap();
            let dx = got.get("dx").unwrap().view().to_f64();
            assert!(dx.iter().zip(*x).all(|(dx, x)| dx.is_finite() && (*x > -inf || *dx == 0.0)), "{x:?}: {dx:?}");
        }
        let x: &[f64] = &[1.0, inf, 2.0, 3.0];
        let inputs = [("x", column(Spec::new(DType::F32, &[1, 1, 4, 1]).unwrap(), x))].into_iter().collect();
        let got = common::run::<CumSum>(&SUM, &inputs, &Exec { level, threads: 1 }).unwrap();
        assert_eq!(got.get("y").unwrap().view().to_f64().into_raw_vec_and_offset().0, [1.0, inf, inf, inf]);
    }
}

#[test]
fn nan_stays_in_its_channel_and_in_what_comes_after() {
    fn stays<O: Op>(options: &O::Options, name: &'static str) {
        let sizes = [2, 1, 9, 37];
        let values = noise(1, &sizes, 0.1, 0.9).view().to_f64();
        let mut values =
            values.indexed_iter().map(|(at, &v)| if [at[0], at[2], at[3]] == [1, 4, 18] { f64::NAN } else { v });
        let x = Owned::from_fn(Spec::new(DType::F32, &sizes).unwrap(), |_| values.next().unwrap());
        let inputs = [(name, x)].into_iter().collect();
        for level in common::levels() {
            let got = common::run::<O>(options, &inputs, &Exec { level, threads: 1 }).unwrap();
            for (at, value) in got.get("y").unwrap().view().to_f64().indexed_iter() {
                let expected = at[0] == 1 && at[3] == 18 && at[2] >= 4;
                assert_eq!(value.is_nan(), expected, "{} {at:?} on {}", O::NAME, level.name());
            }
        }
    }
    stays::<ExpProductScan>(&exp_product(false), "gamma");
    stays::<CumprodScan>(&plain(false), "gamma");
    stays::<LogCumSumExp>(&plain(false), "x");
    stays::<CumSum>(&SUM, "x");
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let refused = |name: &'static str, dims: &[usize], options: &Options| {
        let mut all = inputs("gamma", [2, 3, 4, 5], (0.0, 1.0), 0.0, Some(1.0));
        all.take(name);
        all.push(name, noise(1, dims, 0.0, 1.0));
        common::run::<CumprodScan>(options, &all, &Exec::default()).err().expect("a refusal")
    };
    for (name, dims) in [("gamma", &[2, 3, 4][..]), ("initial_state", &[2, 3, 4]), ("initial_state", &[2, 15])] {
        let error = refused(name, dims, &plain(false));
        assert_eq!((error.kind, &*error.argument, &*error.op), (Kind::Shape, name, "cumprod_scan"), "{error}");
    }
    assert_eq!(refused("x", &[1], &plain(false)).kind, Kind::Argument);
    assert!(serde_json::from_str::<Options>(r#"{"eps": 0.1}"#).is_err());
    let x = inputs("gamma", [1, 1, 2, 1], (0.0, 1.0), 0.0, None);
    for (eps, log_min, argument) in
        [(-0.1, -1.0, "eps"), (f64::NAN, -1.0, "eps"), (0.1, 1.0, "log_min"), (0.1, f64::NEG_INFINITY, "log_min")]
    {
        let options = ExpProductOptions { eps, log_min, ..exp_product(false) };
        let error = common::run::<ExpProductScan>(&options, &x, &Exec::default()).err().expect("a refusal");
        assert_eq!((error.kind, &*error.argument), (Kind::Option, argument), "{error}");
    }
}
