//! The gradient of the scan against the f64 reference on every level, in every element type and for odd shapes; the
//! reference against finite differences; and other documented properties.

use crate::common;
use crate::common::scans::{Call, Varies, calls};
use crate::common::{Random, assert_close_for, bits, levels, reference};
use ndarray::ArrayD;
use proptest::prelude::*;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Kind;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::scan::selective_scan::backward::SelectiveScanBackward;
use sidewinder_kernels::ops::scan::selective_scan::{ClampGrad, Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

fn inputs(call: &Call) -> Named<Owned> {
    call.inputs().into_iter().chain(call.cotangents()).collect()
}

fn run(call: &Call, inputs: &Named<Owned>, exec: &Exec) -> Named<Owned> {
    common::run::<SelectiveScanBackward>(&call.options, inputs, exec).unwrap()
}

/// Checks every level and number of threads against the reference; the number of threads must not change a bit.
fn agrees(call: &Call, dtype: DType, threads: &[usize]) {
    let inputs = common::cast(op::about::<SelectiveScanBackward>(), &inputs(call), dtype);
    let expected = reference::<SelectiveScanBackward>(&call.options, &inputs);
    let sizes = call.sizes::<SelectiveScanBackward>(&inputs, &expected, &["dy", "dlast_state", "dstates"]);
    for level in levels() {
        let alone = run(call, &inputs, &Exec { level, threads: 1 });
        assert_close_for(&sizes, &alone, &expected, &format!("{call:?} {dtype} {level:?}"));
        for &threads in threads {
            let shared = run(call, &inputs, &Exec { level, threads });
            assert_eq!(bits(&alone), bits(&shared), "{call:?} {dtype} {level:?} {threads} threads");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_level_and_type_agrees_with_the_reference(call in calls()) {
        for dtype in DType::FLOATS {
            agrees(&call, dtype, &[3]);
        }
    }

    #[test]
    fn the_reference_agrees_with_finite_differences(call in calls()) {
        // The clamp has no derivative at its bounds, and beyond them the straight-through gradient is not the
        // derivative.
        let options = Options { dt_clamp: None, return_state: true, return_states: true, ..call.options.clone() };
        let call = Call { batch: call.batch.min(2), length: call.length.min(9), channels: call.channels, options, ..call };
        differs_as_told(&call);
    }
}

/// Compares the derivative along a random direction for each input: from the gradient, and from finite differences.
fn differs_as_told(call: &Call) {
    let all = inputs(call);
    let wide: Named<ArrayD<f64>> = all.iter().map(|(name, t)| (name.clone(), t.view().to_f64())).collect();
    let specs = op::specs(&all.map(|t| t.cast(DType::F64)));
    let backward = ops::call::<SelectiveScanBackward>(specs, &call.options).unwrap();
    let gradients = backward.reference(&wide).unwrap();
    for (name, gradient) in backward.outputs().iter().map(|(name, _)| (&name[1..], gradients.get(name).unwrap())) {
        let mut random = Random(call.seed ^ 77);
        let direction = gradient.map(|_| random.next() - 0.5);
        let told = (gradient * &direction).sum();
        let step = 1e-5;
        let [below, above] = [-step, step].map(|step| {
            let moved = |(n, t): (&op::Name, &ArrayD<f64>)| match **n == *name {
                true => (n.clone(), t + &(&direction * step)),
                false => (n.clone(), t.clone()),
            };
            loss(call, &wide.iter().map(moved).collect())
        });
        let seen = (above - below) / (2.0 * step);
        let size = (gradient * &direction).mapv(f64::abs).sum();
        assert!(
            (seen - told).abs() <= 1e-6 * size + 1e-7,
            "{name}: {seen} by differences, {told} by gradient: {call:?}"
        );
    }
}

/// The function whose derivatives the gradients are, for these cotangents.
fn loss(call: &Call, inputs: &Named<ArrayD<f64>>) -> f64 {
    let forward: Named<ArrayD<f64>> = inputs
        .iter()
        .filter(|(name, _)| SelectiveScan::INPUTS.iter().any(|slot| slot.name == name.as_ref()))
        .map(|(name, t)| (name.clone(), t.clone()))
        .collect();
    let specs = forward.try_map(|t| Spec::new(DType::F64, t.shape())).unwrap();
    let outputs = ops::call::<SelectiveScan>(specs, &call.options).unwrap().reference(&forward).unwrap();
    let part = |(cotangent, output)| inputs.find(cotangent).map_or(0.0, |c| (c * outputs.get(output).unwrap()).sum());
    [("dy", "y"), ("dlast_state", "last_state"), ("dstates", "states")].map(part).iter().sum()
}

#[test]
fn a_sum_that_cancels_is_as_exact_as_what_it_is_summed_of() {
    let options = Options { dt_clamp: Some((0.001, 0.1)), return_state: true, ..Options::default() };
    let optional = [true, true, false, false];
    let call = Call { optional, options, seed: 5581305838148458573, ..Call::plain(1, 30, 1, 34) };
    agrees(&call, DType::F32, &[2]);
}

#[test]
fn panels_groups_and_parts_of_any_cut_agree() {
    let sizes = [
        (3, 150, 300, 3),
        (1, 65, 257, 16),
        (130, 2, 5, 17),
        (2, 33, 384, 1),
        (1, 31, 7, 256),
        (1, 97, 129, 33),
        (2, 70, 700, 6),
        (16, 130, 300, 4),
    ];
    for (i, (batch, length, channels, state)) in sizes.into_iter().enumerate() {
        let groups = [1, 2, 3, 5, channels].into_iter().filter(|groups| channels % groups == 0);
        for b in groups.map(Varies::PerGroup).chain([Varies::Constant]) {
            let options = Options { return_state: i % 2 == 0, dt_softplus: true, ..Options::default() };
            let c = if i % 3 == 0 { b } else { Varies::PerStep };
            let call = Call { b, c, options, optional: [true; 4], ..Call::plain(batch, length, channels, state) };
            agrees(&call, DType::F32, &[2, 7]);
        }
    }
}

#[test]
fn every_subset_of_optional_inputs_agrees() {
    for subset in 0..64u32 {
        let has = |i: u32| subset >> i & 1 == 1;
        let options = Options { return_state: has(4), return_states: has(5), ..Options::default() };
        let optional = [has(0), has(1), has(2), has(3)];
        agrees(&Call { optional, options, ..Call::plain(2, 37, 19, 5) }, DType::F32, &[2]);
    }
}

#[test]
fn length_65536_keeps_its_accuracy_and_repeats_to_the_bit() {
    let options = Options { dt_softplus: true, return_state: true, ..Options::default() };
    let call = Call { optional: [true; 4], options, ..Call::plain(1, 65536, 3, 16) };
    agrees(&call, DType::F32, &[1, 2, 8]);
}

#[test]
fn nothing_at_all_gives_zeros() {
    for (batch, length, channels, state) in [(2, 0, 5, 3), (0, 4, 5, 3), (2, 4, 0, 3), (2, 4, 5, 0)] {
        let options = Options { return_state: true, ..Options::default() };
        agrees(&Call { optional: [true; 4], options, ..Call::plain(batch, length, channels, state) }, DType::F32, &[2]);
    }
}

fn tensor(shape: &[usize], values: &[f64]) -> Owned {
    Owned::from_fn(Spec::new(DType::F32, shape).unwrap(), |i| values[i])
}

/// Two steps of one channel with one state.
fn two_steps(dt: [f64; 2], more: &[(&'static str, &[usize], &[f64])]) -> Named<Owned> {
    let mut inputs: Named<Owned> = [
        ("x", tensor(&[1, 2, 1], &[1.0, 2.0])),
        ("dt", tensor(&[1, 2, 1], &dt)),
        ("A", tensor(&[1, 1], &[-1.0])),
        ("B", tensor(&[1, 2, 1], &[1.0, 0.5])),
        ("C", tensor(&[1, 2, 1], &[1.0, 2.0])),
        ("dy", tensor(&[1, 2, 1], &[1.0, 1.0])),
    ]
    .into_iter()
    .collect();
    more.iter().for_each(|(name, shape, values)| inputs.push(*name, tensor(shape, values)));
    inputs
}

fn gives(options: &Options, inputs: &Named<Owned>, expected: &[(&str, &[f64])]) {
    for level in levels() {
        let got = common::run::<SelectiveScanBackward>(options, inputs, &Exec { level, threads: 1 }).unwrap();
        for (name, values) in expected {
            let got = got.get(name).unwrap().view().to_f64();
            for (got, value) in got.iter().zip(*values) {
                assert!((got - value).abs() <= 2e-6 * value.abs() + 1e-7, "{name}: {got}, not {value} on {level:?}");
            }
        }
    }
}

#[test]
fn examples_worked_by_hand() {
    let plain = [
        ("dx", &[0.867879441, 1.0][..]),
        ("ddt", &[1.73575888, 1.63212056]),
        ("dA", &[0.367879441]),
        ("dB", &[0.867879441, 4.0]),
        ("dC", &[0.5, 1.18393972]),
    ];
    gives(&Options::default(), &two_steps([0.5, 1.0], &[]), &plain);

    let more: [(&'static str, &[usize], &[f64]); 4] = [
        ("D", &[1], &[0.5]),
        ("z", &[1, 2, 1], &[0.0, 1.0]),
        ("dt_bias", &[1], &[0.1]),
        ("initial_state", &[1, 1, 1], &[2.0]),
    ];
    let gated = [
        ("dz", &[1.09721914, 3.79568251][..]),
        ("dD", &[1.46211716]),
        ("dx", &[0.773793975, 0.614932756]),
        ("ddt", &[0.027262854, -0.0864945977]),
        ("dA", &[1.33602927]),
        ("dB", &[0.773793975, 0.997613867]),
        ("dC", &[0.0, 1.13008054]),
        ("ddt_bias", &[-0.0592317437]),
        ("dinitial_state", &[0.493780081]),
    ];
    let softplus = Options { dt_softplus: true, ..Options::default() };
    gives(&softplus, &two_steps([0.0, -1.0], &more), &gated);

    let clamped = two_steps([0.5, 0.0005], &[]);
    let options = |clamp_grad| Options { dt_clamp: Some((0.001, 0.1)), clamp_grad, ..Options::default() };
    gives(&options(ClampGrad::Mask), &clamped, &[("ddt", &[0.0, 0.0])]);
    gives(&options(ClampGrad::StraightThrough), &clamped, &[("ddt", &[2.998001, 1.8001999])]);
    // Both bounds are inside the range.
    let at_bounds = two_steps([0.1f32 as f64, 0.001f32 as f64], &[]);
    gives(&options(ClampGrad::Mask), &at_bounds, &[("ddt", &[2.998001, 1.8001999])]);
}

#[test]
fn nan_stays_in_its_channel_and_batch() {
    let call = Call { optional: [true; 4], ..Call::plain(2, 40, 37, 16) };
    let mut inputs = inputs(&call);
    let clean: Vec<f64> = inputs.take("dy").unwrap().view().to_f64().iter().copied().collect();
    let (batch, time, channel) = (1, 27, 18);
    let at = (batch * 40 + time) * 37 + channel;
    let spec = Spec::new(DType::F32, &[2, 40, 37]).unwrap();
    inputs.push("dy", Owned::from_fn(spec, |i| if i == at { f64::NAN } else { clean[i] }));
    for level in levels() {
        let got = run(&call, &inputs, &Exec { level, threads: 1 });
        for (index, value) in got.get("dx").unwrap().view().to_f64().indexed_iter() {
            let hit = index[0] == batch && index[2] == channel && index[1] <= time;
            assert_eq!(value.is_nan(), hit, "{index:?} on {level:?}");
        }
        for (index, value) in got.get("dA").unwrap().view().to_f64().indexed_iter() {
            assert_eq!(value.is_nan(), index[0] == channel, "{index:?} on {level:?}");
        }
    }
}

#[test]
fn wrong_cotangents_say_what_is_wrong() {
    let call = Call::plain(2, 3, 4, 5);
    let refused = |change: &dyn Fn(&mut Named<Owned>)| {
        let mut inputs = inputs(&call);
        change(&mut inputs);
        common::run::<SelectiveScanBackward>(&call.options, &inputs, &Exec::default()).err().expect("a refusal")
    };
    let missing = refused(&|inputs| drop(inputs.take("dy")));
    assert_eq!((missing.kind, &*missing.argument, &*missing.op), (Kind::Argument, "dy", "selective_scan_backward"));
    for (name, shape) in [("dy", &[2, 3, 5][..]), ("dlast_state", &[2, 5, 4]), ("dstates", &[2, 3, 4])] {
        let error = refused(&|inputs| {
            inputs.take(name);
            inputs.push(name, Owned::from_fn(Spec::new(DType::F32, shape).unwrap(), |_| 0.5));
        });
        assert_eq!((error.kind, &*error.argument), (Kind::Shape, name), "{error}");
        assert!(!error.expected.is_empty() && !error.got.is_empty(), "{error}");
    }
    let mixed = refused(&|inputs| {
        let dy = inputs.take("dy").unwrap().cast(DType::Bf16);
        inputs.push("dy", dy);
    });
    assert_eq!((mixed.kind, &*mixed.argument), (Kind::DType, "dy"));
}
