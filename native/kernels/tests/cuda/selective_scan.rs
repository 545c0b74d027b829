//! The selective scan and its gradient on CUDA against the f64 reference in every form, type and layout. Without a GPU
//! each test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::scan_on_device::{Call, Form, in_child, into_poisoned, noise, on_device};
use crate::common::{gpu, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::selective_scan::backward::SelectiveScanBackward;
use sidewinder_kernels::ops::scan::selective_scan::cuda::{BackwardPlan, Plan, backward_as};
use sidewinder_kernels::ops::scan::selective_scan::{ClampGrad, Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

#[test]
fn every_type_form_and_option() {
    let Some(device) = gpu() else { return };
    let forms = [Form::Shared, Form::Groups(1), Form::Groups(2), Form::Groups(6), Form::Constant];
    for storage in DType::FLOATS {
        for b in forms {
            for c in forms {
                Call::full([2, 19, 6, 5]).forms(b, c).check(&device, storage, None);
            }
        }
        Call::new([2, 21, 70, 16]).check(&device, storage, None);
        Call::new([2, 21, 70, 16]).clamped().check(&device, storage, None);
        Call::full([1, 33, 40, 16]).clamped().check(&device, storage, None);
        let mut states = Call::full([2, 9, 35, 7]);
        states.options.return_states = true;
        states.check(&device, storage, None);
    }
}

#[test]
fn odd_sizes() {
    let Some(device) = gpu() else { return };
    for state in [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100, 128, 256, 257, 600] {
        Call::full([2, 9, 5, state]).check(&device, DType::F32, None);
        Call::new([1, 37, 3, state]).check(&device, DType::F64, None);
    }
    for length in [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 100, 127, 1000] {
        Call::full([2, length, 33, 16]).check(&device, DType::F32, None);
        Call::full([1, length, 3, 16]).check(&device, DType::Bf16, None);
    }
    for channels in [1, 2, 31, 32, 33, 127, 129, 500] {
        Call::full([3, 20, channels, 16]).check(&device, DType::F32, None);
        Call::full([1, 1, channels, 16]).check(&device, DType::F16, None);
    }
    Call::full([1, 40, 256, 16]).forms(Form::Groups(2), Form::Groups(8)).check(&device, DType::F32, None);
    Call::full([1, 40, 96, 128]).forms(Form::Groups(3), Form::Shared).check(&device, DType::Bf16, None);
}

#[test]
fn nothing_to_do() {
    let Some(device) = gpu() else { return };
    for sizes in [[0, 5, 4, 3], [2, 0, 4, 3], [2, 5, 0, 3], [2, 5, 4, 0], [2, 0, 4, 0], [0, 0, 0, 0]] {
        Call::new(sizes).check(&device, DType::F32, None);
        Call::full(sizes).check(&device, DType::Bf16, None);
    }
}

#[test]
fn every_layout() {
    let Some(device) = gpu() else { return };
    for lanes in [1, 2, 4, 8, 16, 32] {
        for (owned, warps) in [(1, 1), (2, 4), (4, 2)] {
            for chunks in [1, 2, 5] {
                let plan = Plan { lanes, owned, warps, chunks };
                let tile = 2 * lanes * owned * lanes * (16usize.div_ceil(lanes).div_ceil(2) | 1) * 16;
                if tile <= 32 << 10 {
                    Call::full([2, 150, 37, 16]).check(&device, DType::F32, Some(plan));
                    Call::new([1, 131, 20, 11]).check(&device, DType::Bf16, Some(plan));
                }
            }
        }
    }
}

#[test]
fn chunks_of_slabs() {
    let Some(device) = gpu() else { return };
    for chunks in [1, 3] {
        let plan = Plan { lanes: 8, owned: 1, warps: 2, chunks };
        Call::full([2, 100, 5, 400]).check(&device, DType::F32, Some(plan));
        Call::full([2, 100, 5, 300]).check(&device, DType::Bf16, Some(plan));
    }
}

#[test]
fn long_sums_with_slow_decay() {
    let Some(device) = gpu() else { return };
    for chunks in [1, 8] {
        let mut inputs = Call::new([1, 4096, 3, 16]).inputs(DType::F32);
        inputs.take("A");
        inputs.push("A", noise(3, DType::F32, &[3, 16], -1e-3, -1e-8));
        let options = Options { return_state: true, ..Options::default() };
        let plan = Plan { lanes: 4, owned: 4, warps: 1, chunks };
        let got = on_device(&device, &options, &inputs, Some(plan)).unwrap();
        let level = Exec { level: Level::Reference, threads: 1 };
        let expected = common::run::<SelectiveScan>(&options, &inputs.map(|t| t.cast(DType::F64)), &level).unwrap();
        for (name, expected) in expected.iter() {
            // The error of 2^v near v = 0, a quarter of an ulp, accumulates over thousands of steps.
            let largest = expected.view().to_f64().fold(1.0f64, |m, v| m.max(v.abs()));
            let worst = worst(got.get(name).unwrap(), expected, 5e-5, 2e-5 * largest);
            println!("{name} with {chunks} chunks: {worst} of the tolerance");
            assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance with {chunks} chunks");
        }
    }
}

#[test]
fn nan_stays_in_its_channel() {
    let Some(device) = gpu() else { return };
    let call = Call::full([2, 40, 37, 16]).clamped();
    for name in ["x", "dt", "z"] {
        let mut inputs = call.inputs(DType::F32);
        let clean = on_device(&device, &call.options, &inputs, None).unwrap();
        let mut values = inputs.take(name).unwrap();
        values.view_mut().slice::<f32>().unwrap()[20 * 37 + 5] = f32::NAN;
        inputs.push(name, values);
        let got = on_device(&device, &call.options, &inputs, None).unwrap();
        let (clean, got) = (clean.get("y").unwrap().view(), got.get("y").unwrap().view());
        for (i, (got, clean)) in got.slice::<f32>().unwrap().iter().zip(clean.slice::<f32>().unwrap()).enumerate() {
            let (batch, t, channel) = (i / (40 * 37), i / 37 % 40, i % 37);
            let hit = batch == 0 && channel == 5 && if name == "z" { t == 20 } else { t >= 20 };
            assert!(if hit { got.is_nan() } else { got == clean }, "{name}: {got} at {batch}, {t}, {channel}");
        }
    }
}

#[test]
fn host_to_host_from_many_threads() {
    let Some(device) = gpu() else { return };
    let call = Call::full([4, 200, 300, 16]);
    let inputs = call.inputs(DType::F32);
    let run = || common::bits(&common::run_cuda::<SelectiveScan>(&call.options, &inputs, &device).unwrap());
    let first = run();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20).for_each(|_| assert!(run() == first, "a call from another thread differs")));
        }
    });
}

/// The optional inputs of the gradient, by name.
const OPTIONAL: [&str; 6] = ["D", "z", "dt_bias", "initial_state", "dlast_state", "dstates"];

impl Call {
    /// The inputs of the gradient, with the optional inputs whose bits are set.
    fn gradient_inputs(&self, storage: DType, optional: u32) -> Named<Owned> {
        let [b, l, d, n] = self.sizes;
        let mut inputs = Call { optional: true, ..self.clone() }.inputs(storage);
        let wanted =
            |name: &str| OPTIONAL.iter().position(|&other| other == name).is_none_or(|i| optional & 1 << i != 0);
        for (seed, name, dtype, dims) in [
            (10, "dy", storage, &[b, l, d][..]),
            (11, "dlast_state", storage.wide(), &[b, d, n]),
            (12, "dstates", storage.wide(), &[b, l, d, n]),
        ] {
            if wanted(name) {
                inputs.push(name, noise(seed, dtype, dims, -1.0, 1.0));
            }
        }
        inputs.into_iter().filter(|(name, _)| wanted(name)).collect()
    }

    /// Computes the gradient on the device, outputs poisoned, and compares it with the reference in f64.
    fn check_gradient(&self, device: &Device, storage: DType, optional: u32, plan: Option<BackwardPlan>) {
        let inputs = self.gradient_inputs(storage, optional);
        let got = gradient(device, &self.options, &inputs, plan).unwrap();
        self.agrees_with_reference(storage, &inputs, &got, &format!("{self:?} {storage} {optional:b} {plan:?}"));
    }

    fn agrees_with_reference(&self, storage: DType, inputs: &Named<Owned>, got: &Named<Owned>, what: &str) {
        let level = Exec { level: Level::Reference, threads: 1 };
        let exact = inputs.map(|tensor| tensor.cast(DType::F64));
        // Bounds of the clamp are rounded to the type of the arithmetic.
        let mut options = self.options.clone();
        if storage != DType::F64 {
            options.dt_clamp = options.dt_clamp.map(|(lo, hi)| (lo as f32 as f64, hi as f32 as f64));
        }
        let expected = common::run::<SelectiveScanBackward>(&options, &exact, &level).unwrap();
        assert_eq!(got.iter().count(), expected.iter().count());
        for (name, expected) in expected.iter() {
            let got = got.get(name).unwrap();
            let (rtol, atol) = match got.spec().dtype {
                DType::F64 => (1e-11, 1e-12),
                DType::F32 => (5e-5, 1e-5),
                DType::F16 => (1e-3, 1e-5),
                DType::Bf16 => (4.2e-3, 1e-5),
                _ => (0.0, 0.0),
            };
            let largest = expected.view().to_f64().fold(1.0f64, |m, v| m.max(v.abs()));
            let worst = worst(got, expected, rtol, atol * largest);
            assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {what}");
        }
    }
}

fn gradient(
    device: &Device,
    options: &Options,
    inputs: &Named<Owned>,
    plan: Option<BackwardPlan>,
) -> Result<Named<Owned>> {
    let lane = device.lane()?;
    into_poisoned::<SelectiveScanBackward>(&lane, options, inputs, |problem, inputs, outputs| {
        backward_as(&problem.of, inputs, outputs, &lane, plan)
    })
}

#[test]
fn gradient_of_every_type_form_and_option() {
    let Some(device) = gpu() else { return };
    let forms = [Form::Shared, Form::Groups(1), Form::Groups(2), Form::Groups(6), Form::Constant];
    for storage in DType::FLOATS {
        for b in forms {
            for c in forms {
                Call::full([2, 39, 6, 5]).forms(b, c).check_gradient(&device, storage, 63, None);
            }
        }
        Call::new([2, 45, 70, 16]).check_gradient(&device, storage, 0, None);
        Call::new([2, 45, 70, 16]).clamped().check_gradient(&device, storage, 16, None);
        let mut call = Call::full([1, 70, 40, 16]).clamped();
        call.check_gradient(&device, storage, 31, None);
        call.options.clamp_grad = ClampGrad::StraightThrough;
        call.check_gradient(&device, storage, 63, None);
        call.options.dt_softplus = false;
        call.check_gradient(&device, storage, 5, None);
    }
}

#[test]
fn gradient_with_every_subset_of_inputs() {
    let Some(device) = gpu() else { return };
    for optional in 0..64 {
        Call::full([2, 38, 5, 16]).check_gradient(&device, DType::F32, optional, None);
        let plan = BackwardPlan { channels: 2, warps: 1, chunks: 2 };
        Call::new([1, 50, 3, 7]).clamped().check_gradient(&device, DType::F64, optional, Some(plan));
    }
}

#[test]
fn gradient_of_odd_sizes() {
    let Some(device) = gpu() else { return };
    for state in [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100, 128, 129, 256, 300] {
        Call::full([2, 37, 5, state]).check_gradient(&device, DType::F32, 63, None);
        Call::new([1, 37, 3, state]).check_gradient(&device, DType::F64, 8, None);
        Call::full([1, 100, 33, state]).check_gradient(&device, DType::Bf16, 31, None);
    }
    for length in [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 100, 257, 1000] {
        for channels in [1, 5, 33] {
            Call::full([2, length, channels, 16]).check_gradient(&device, DType::F32, 31, None);
            Call::new([1, length, channels, 16]).check_gradient(&device, DType::F16, 0, None);
        }
    }
    for channels in [2, 31, 32, 64, 127, 128, 129, 257, 500] {
        Call::full([3, 20, channels, 16]).check_gradient(&device, DType::F32, 31, None);
        Call::new([2, 40, channels, 4]).check_gradient(&device, DType::F32, 0, None);
    }
    Call::full([300, 2, 33, 16]).check_gradient(&device, DType::F32, 31, None);
    Call::full([1, 40, 256, 16]).forms(Form::Groups(2), Form::Groups(8)).check_gradient(&device, DType::F32, 31, None);
    Call::full([1, 40, 96, 128]).forms(Form::Groups(3), Form::Shared).check_gradient(&device, DType::Bf16, 31, None);
    Call::full([1, 40, 300, 8]).forms(Form::Constant, Form::Shared).check_gradient(&device, DType::F32, 63, None);
}

#[test]
fn gradient_of_nothing() {
    let Some(device) = gpu() else { return };
    for sizes in [[0, 5, 4, 3], [2, 0, 4, 3], [2, 5, 0, 3], [2, 5, 4, 0], [2, 0, 4, 0], [0, 0, 0, 0]] {
        for optional in [0, 31, 63] {
            for form in [Form::Shared, Form::Groups(1), Form::Constant] {
                Call::new(sizes).forms(form, form).check_gradient(&device, DType::F32, optional, None);
                Call::full(sizes).forms(form, Form::Shared).check_gradient(&device, DType::Bf16, optional, None);
            }
        }
    }
}

#[test]
fn gradient_in_every_layout() {
    let Some(device) = gpu() else { return };
    for channels in [1, 2, 4] {
        for warps in [1, 2, 4] {
            for chunks in [1, 2, 3, 5] {
                let plan = Some(BackwardPlan { channels, warps, chunks });
                Call::full([2, 150, 37, 16]).check_gradient(&device, DType::F32, 31, plan);
                Call::new([1, 131, 140, 11]).clamped().check_gradient(&device, DType::Bf16, 0, plan);
            }
            let plan = Some(BackwardPlan { channels: channels.min(2), warps, chunks: 3 });
            Call::full([1, 100, 5, 70]).check_gradient(&device, DType::F64, 63, plan);
            Call::full([1, 100, 9, 20]).forms(Form::Constant, Form::Constant).check_gradient(
                &device,
                DType::F32,
                31,
                plan,
            );
        }
    }
}

#[test]
fn gradient_repeats_every_bit() {
    let Some(device) = gpu() else { return };
    for sizes in [[2, 300, 200, 16], [1, 1000, 65, 33], [3, 70, 300, 200]] {
        let call = Call::full(sizes);
        let inputs = call.gradient_inputs(DType::F32, 31);
        let run = || {
            let results = gradient(&device, &call.options, &inputs, None).unwrap();
            results.iter().map(|(_, t)| t.view().bytes().to_vec()).collect::<Vec<_>>()
        };
        let first = run();
        for _ in 0..20 {
            assert!(run() == first, "a repeated gradient differs: {sizes:?}");
        }
    }
}

#[test]
fn gradient_over_long_sequences() {
    let Some(device) = gpu() else { return };
    Call::full([1, 65536, 3, 4]).check_gradient(&device, DType::F32, 31, None);
    Call::new([1, 65536, 2, 16]).check_gradient(&device, DType::F32, 0, None);
}

/// Chunks pass on products of decays, which overflow where A is positive, to times without a cotangent.
#[test]
fn gradient_of_growing_states_that_are_not_asked_for() {
    let Some(device) = gpu() else { return };
    let call = Call::new([1, 256, 3, 4]);
    let mut inputs = call.gradient_inputs(DType::F32, 0);
    inputs.take("A");
    inputs.push("A", noise(3, DType::F32, &[3, 4], 2.0, 3.0));
    for (name, kept) in [("x", 240..256), ("dy", 0..16)] {
        let mut values = inputs.take(name).unwrap();
        for (i, v) in values.view_mut().slice::<f32>().unwrap().iter_mut().enumerate() {
            if !kept.contains(&(i / 3)) {
                *v = 0.0;
            }
        }
        inputs.push(name, values);
    }
    for chunks in [1, 2] {
        let plan = BackwardPlan { channels: 4, warps: 1, chunks };
        let got = gradient(&device, &call.options, &inputs, Some(plan)).unwrap();
        call.agrees_with_reference(DType::F32, &inputs, &got, &format!("{plan:?}"));
    }
}

#[test]
fn gradient_keeps_nan_in_its_channel() {
    let Some(device) = gpu() else { return };
    let call = Call::full([2, 70, 37, 16]).clamped();
    for value in [f32::NAN, f32::INFINITY] {
        for name in ["x", "dt", "z", "dy"] {
            for chunks in [1, 2] {
                let plan = Some(BackwardPlan { channels: 4, warps: 1, chunks });
                let mut inputs = call.gradient_inputs(DType::F32, 15);
                let clean = gradient(&device, &call.options, &inputs, plan).unwrap();
                let mut values = inputs.take(name).unwrap();
                values.view_mut().slice::<f32>().unwrap()[20 * 37 + 5] = value;
                inputs.push(name, values);
                let got = gradient(&device, &call.options, &inputs, plan).unwrap();
                for gradient in ["dx", "ddt", "dz"] {
                    let (clean, got) = (clean.get(gradient).unwrap().view(), got.get(gradient).unwrap().view());
                    let pairs = got.slice::<f32>().unwrap().iter().zip(clean.slice::<f32>().unwrap());
                    for (i, (got, clean)) in pairs.enumerate() {
                        let hit = i / (70 * 37) == 0 && i % 37 == 5;
                        assert!(hit || got == clean, "{value} in {name}: {gradient} is {got} at {i}, not {clean}");
                    }
                }
                if value.is_nan() {
                    call.agrees_where_finite(&inputs, &got);
                }
            }
        }
    }
}

impl Call {
    /// Results must be NaN exactly where the reference is.
    fn agrees_where_finite(&self, inputs: &Named<Owned>, got: &Named<Owned>) {
        let level = Exec { level: Level::Reference, threads: 1 };
        let exact = inputs.map(|tensor| tensor.cast(DType::F64));
        let expected = common::run::<SelectiveScanBackward>(&self.options, &exact, &level).unwrap();
        for (name, expected) in expected.iter() {
            let (got, expected) = (got.get(name).unwrap().view().to_f64(), expected.view().to_f64());
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert_eq!(got.is_nan(), expected.is_nan(), "{name} is {got} at {i}, not {expected}");
            }
        }
    }
}

/// In a process of its own, so that the lane has no memory of other tests.
#[test]
fn gradient_takes_little_memory() {
    in_child(module_path!(), "gradient_takes_little_memory_child", &[]);
}

#[test]
#[ignore = "run by gradient_takes_little_memory"]
fn gradient_takes_little_memory_child() {
    let device = gpu().unwrap();
    for sizes in [[8, 512, 2048, 16], [1, 2048, 1536, 16], [64, 60, 512, 16], [512, 5, 1024, 16], [2, 512, 512, 128]] {
        let call = Call::new(sizes);
        let inputs = call.gradient_inputs(DType::F32, 0);
        device.trim().unwrap();
        device.peak_scratch_bytes().unwrap();
        let lane = device.lane().unwrap();
        into_poisoned::<SelectiveScanBackward>(&lane, &call.options, &inputs, |problem, inputs, outputs| {
            backward_as(&problem.of, inputs, outputs, &lane, None)
        })
        .unwrap();
        let (taken, all) = (device.peak_scratch_bytes().unwrap(), sizes.iter().product::<usize>() * 4);
        println!("{sizes:?}: {taken} bytes, 1/{:.1} of all states", all as f64 / taken as f64);
        assert!(taken > 0 && taken * 16 < all, "{sizes:?}: {taken} bytes are too many");
    }
}

/// More elements than 32-bit offsets can address: the last batch must equal the one computed alone.
#[test]
#[ignore = "takes 20 GB of device memory"]
fn beyond_two_to_the_31() {
    let Some(device) = gpu() else { return };
    let [b, l, d, n] = [2200, 500, 2048, 4];
    let options = Options { return_state: true, ..Options::default() };
    let call = Call { options: options.clone(), ..Call::new([1, l, d, n]) };
    let one = call.inputs(DType::Bf16);
    let mut many = Named::default();
    for (name, tensor) in one.iter() {
        let mut dims = tensor.spec().shape.to_vec();
        if name != "A" {
            dims[0] = b;
        }
        let mut repeated = Owned::poisoned(Spec::new(tensor.spec().dtype, &dims).unwrap());
        let part = tensor.view().bytes();
        repeated.view_mut().bytes().chunks_mut(part.len()).for_each(|chunk| chunk.copy_from_slice(part));
        many.push(name.clone(), repeated);
    }
    let plan = Some(Plan { lanes: 1, owned: 8, warps: 4, chunks: 1 });
    let alone = on_device(&device, &options, &one, plan).unwrap();
    let all = on_device(&device, &options, &many, plan).unwrap();
    for (name, alone) in alone.iter() {
        let part = alone.view().bytes();
        let all = all.get(name).unwrap().view().bytes();
        assert!(all.chunks(part.len()).all(|chunk| chunk == part), "{name} differs among equal batches");
    }
}
