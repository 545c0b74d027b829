//! The CUDA side: the scan against the f64 reference in every form, type and layout, and what must
//! hold when things go wrong. Without a GPU each test says so and passes, unless
//! `SIDEWINDER_REQUIRE_CUDA=1`.

mod common;

use common::{gpu, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{self, Buffer, Declared, Device, Lane, Source};
use sidewinder_kernels::error::{Kind, Result};
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::activations::{self, Activation, Activations};
use sidewinder_kernels::ops::products::matmul::{self, Matmul};
use sidewinder_kernels::ops::scan::selective_scan::backward::SelectiveScanBackward;
use sidewinder_kernels::ops::scan::selective_scan::cuda::{BackwardPlan, Plan, backward_as, forward_as};
use sidewinder_kernels::ops::scan::selective_scan::{ClampGrad, Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::process::Command;

/// How B or C comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Shared,
    Groups(usize),
    Constant,
}

/// A call to be made up: sizes, forms, and which optional parts it has.
#[derive(Clone, Debug)]
struct Call {
    sizes: [usize; 4],
    b: Form,
    c: Form,
    optional: bool,
    options: Options,
}

impl Call {
    fn new(sizes: [usize; 4]) -> Call {
        let options = Options { return_state: true, ..Options::default() };
        Call { sizes, b: Form::Shared, c: Form::Shared, optional: false, options }
    }

    /// With D, z, dt_bias, initial_state and softplus.
    fn full(sizes: [usize; 4]) -> Call {
        let mut call = Call { optional: true, ..Call::new(sizes) };
        call.options.dt_softplus = true;
        call
    }

    fn forms(self, b: Form, c: Form) -> Call {
        Call { b, c, ..self }
    }

    fn clamped(mut self) -> Call {
        self.options.dt_clamp = Some((0.0625, 0.5));
        self
    }

    fn inputs(&self, storage: DType) -> Named<Owned> {
        let [b, l, d, n] = self.sizes;
        let varying = |form| match form {
            Form::Shared => vec![b, l, n],
            Form::Groups(groups) => vec![b, l, groups, n],
            Form::Constant => vec![d, n],
        };
        // Softplus brings steps of any sign into range; without it they are small and positive.
        let (least, most) = if self.options.dt_softplus { (-4.0, 1.0) } else { (0.0, 0.7) };
        let mut inputs = Named::default();
        inputs.push("x", noise(1, storage, &[b, l, d], -1.0, 1.0));
        inputs.push("dt", noise(2, storage, &[b, l, d], least, most));
        inputs.push("A", noise(3, storage.wide(), &[d, n], -4.0, -0.05));
        inputs.push("B", noise(4, storage, &varying(self.b), -1.0, 1.0));
        inputs.push("C", noise(5, storage, &varying(self.c), -1.0, 1.0));
        if self.optional {
            inputs.push("D", noise(6, storage.wide(), &[d], -1.0, 1.0));
            inputs.push("z", noise(7, storage, &[b, l, d], -3.0, 3.0));
            inputs.push("dt_bias", noise(8, storage.wide(), &[d], -0.5, 0.5));
            inputs.push("initial_state", noise(9, storage.wide(), &[b, d, n], -1.0, 1.0));
        }
        inputs
    }

    /// Runs it on the device, outputs poisoned, and compares with the reference in f64.
    fn check(&self, device: &Device, storage: DType, plan: Option<Plan>) {
        let inputs = self.inputs(storage);
        let got = on_device(device, &self.options, &inputs, plan).unwrap();
        let exact = inputs.map(|tensor| tensor.cast(DType::F64));
        let level = Exec { level: Level::Reference, threads: 1 };
        let expected = common::run::<SelectiveScan>(&self.options, &exact, &level).unwrap();
        for (name, expected) in expected.iter() {
            let rounding = if name == "y" { storage } else { storage.wide() };
            let (rtol, atol) = match rounding {
                DType::F64 => (1e-12, 1e-12),
                DType::F32 => (1e-5, 4e-6),
                DType::F16 => (6e-4, 4e-6),
                DType::Bf16 => (4.1e-3, 4e-6),
                _ => (0.0, 0.0),
            };
            let largest = expected.view().to_f64().fold(1.0f64, |m, v| m.max(v.abs()));
            let worst = worst(got.get(name).unwrap(), expected, rtol, atol * largest);
            assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {self:?} {storage} {plan:?}");
        }
    }
}

fn noise(seed: u64, dtype: DType, dims: &[usize], from: f64, to: f64) -> Owned {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Owned::from_fn(Spec::new(dtype, dims).unwrap(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        from + (to - from) * (state >> 33) as f64 / (1u64 << 31) as f64
    })
}

fn uploaded(lane: &Lane, tensors: &Named<Owned>) -> Result<Named<Buffer>> {
    let buffers = tensors.iter().map(|(name, t)| Ok((name.clone(), Buffer::new(lane.device(), t.spec())?)));
    let buffers = buffers.collect::<Result<Named<_>>>()?;
    for (name, tensor) in tensors.iter() {
        lane.upload(tensor.view().bytes(), buffers.get(name)?)?;
    }
    Ok(buffers)
}

fn refs(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.iter().map(|(name, buffer)| (name.clone(), buffer)).collect()
}

fn on_device(device: &Device, options: &Options, inputs: &Named<Owned>, plan: Option<Plan>) -> Result<Named<Owned>> {
    let lane = device.lane()?;
    into_poisoned::<SelectiveScan>(&lane, options, inputs, |problem, inputs, outputs| {
        forward_as(problem, inputs, outputs, &lane, plan)
    })
}

/// Runs an op from host memory into poisoned outputs on the device, and back.
fn into_poisoned<O: Op>(
    lane: &Lane,
    options: &O::Options,
    inputs: &Named<Owned>,
    run: impl Fn(&O::Problem, &Named<&Buffer>, &Named<&Buffer>) -> Result<()>,
) -> Result<Named<Owned>> {
    let (problem, outputs) = op::check::<O>(&op::specs(inputs), options)?;
    let sources = uploaded(lane, inputs)?;
    let outputs = outputs.try_map(|&spec| Buffer::new(lane.device(), spec))?;
    for (_, output) in outputs.iter() {
        lane.poison(output)?;
    }
    run(&problem, &refs(&sources), &refs(&outputs))?;
    let mut results = Named::default();
    for (name, output) in outputs.iter() {
        let mut result = Owned::poisoned(output.spec());
        lane.download(output, result.view_mut().bytes())?;
        results.push(name.clone(), result);
    }
    Ok(results)
}

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
            // What 2^v is off near v = 0, a quarter of an ulp, adds up over thousands of steps.
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
    /// The inputs of the gradient, with those optional ones whose bit is set.
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
        // The bounds of the clamp are those of the arithmetic.
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

/// Chunks hand on products of decays, which overflow where A is positive, to times without a cotangent.
#[test]
fn gradient_of_growing_states_that_nobody_asks_for() {
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
    /// NaN exactly where the reference has it.
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
    in_child("gradient_takes_little_memory_child", &[]);
}

#[test]
#[ignore = "run by gradient_takes_little_memory"]
fn gradient_takes_little_memory_child() {
    let device = gpu().unwrap();
    for sizes in [[8, 512, 2048, 16], [1, 2048, 1536, 16], [64, 60, 512, 16], [512, 5, 1024, 16], [2, 512, 512, 128]] {
        let call = Call::new(sizes);
        let inputs = call.gradient_inputs(DType::F32, 0);
        device.trim().unwrap();
        let lane = device.lane().unwrap();
        into_poisoned::<SelectiveScanBackward>(&lane, &call.options, &inputs, |problem, inputs, outputs| {
            backward_as(&problem.of, inputs, outputs, &lane, None)
        })
        .unwrap();
        let (taken, all) = (lane.scratch_bytes(), sizes.iter().product::<usize>() * 4);
        println!("{sizes:?}: {taken} bytes, 1/{:.1} of all states", all as f64 / taken as f64);
        assert!(taken > 0 && taken * 16 < all, "{sizes:?}: {taken} bytes are too many");
    }
}

/// In a process of its own, so that other tests' buffers do not count.
#[test]
fn memory_comes_back() {
    in_child("memory_comes_back_child", &[]);
}

#[test]
#[ignore = "run by memory_comes_back"]
fn memory_comes_back_child() {
    let Some(device) = gpu() else { return };
    let call = Call::full([2, 100, 64, 300]);
    let inputs = call.inputs(DType::F32);
    for chunks in [1, 2, 3] {
        let plan = Plan { lanes: 8, owned: 1, warps: 1, chunks };
        on_device(&device, &call.options, &inputs, Some(plan)).unwrap();
        assert_eq!(device.live_bytes(), 0);
    }
    let buffer = Buffer::new(&device, Spec::new(DType::F32, &[1000]).unwrap()).unwrap();
    assert_eq!(device.live_bytes(), 4000);
    std::thread::spawn(move || drop(buffer)).join().unwrap();
    assert_eq!(device.live_bytes(), 0);
    assert!(device.kept_bytes().unwrap() > 0);
    device.trim().unwrap();
    assert_eq!(device.kept_bytes().unwrap(), 0);
    let huge = Buffer::new(&device, Spec::new(DType::F32, &[1 << 50]).unwrap()).unwrap_err();
    assert_eq!(huge.kind, Kind::Memory, "{huge}");
    println!("{huge}");
    on_device(&device, &call.options, &inputs, None).unwrap();
}

#[test]
fn lanes_wait_for_each_other() {
    let Some(device) = gpu() else { return };
    let spec = Spec::new(DType::F32, &[1 << 22]).unwrap();
    for round in 0..20 {
        let data = noise(round, DType::F32, &spec.shape, -1.0, 1.0);
        let (one, two) = (device.lane().unwrap(), device.lane().unwrap());
        let buffer = Buffer::new(&device, spec).unwrap();
        one.poison(&buffer).unwrap();
        one.upload(data.view().bytes(), &buffer).unwrap();
        let mut back = Owned::poisoned(spec);
        two.download(&buffer, back.view_mut().bytes()).unwrap();
        assert!(back.view().bytes() == data.view().bytes(), "a lane did not wait for another");
        // Dropped with work in flight; the next buffer in this memory must not see that work.
        one.upload(data.view().bytes(), &buffer).unwrap();
        drop(buffer);
    }
}

#[test]
fn copies_of_every_size() {
    let Some(device) = gpu() else { return };
    let lane = device.lane().unwrap();
    for bytes in [0, 1, 255, 256, 257, 262143, 262144, 262145, 1 << 20, (5 << 20) + 3, (150 << 20) + 7] {
        let data: Vec<u8> = (0..bytes * 2).map(|i| ((i * 2654435761) >> 13) as u8).collect();
        let spec = Spec::new(DType::F16, &[bytes]).unwrap();
        let buffers = [Buffer::new(&device, spec).unwrap(), Buffer::new(&device, spec).unwrap()];
        lane.upload_all(&[(&data, &buffers[0]), (&data, &buffers[1])]).unwrap();
        let (mut one, mut two) = (vec![0; bytes * 2], vec![0; bytes * 2]);
        lane.download_all(&mut [(&buffers[0], &mut one), (&buffers[1], &mut two)]).unwrap();
        assert!(one == data && two == data, "{bytes}");
    }
    let short = lane.upload(&[0; 3], &Buffer::new(&device, Spec::new(DType::F32, &[1]).unwrap()).unwrap());
    assert_eq!(short.unwrap_err().kind, Kind::Size);
}

/// Runs an ignored test of this file in a process of its own.
fn in_child(test: &str, environment: &[(&str, &str)]) {
    if gpu().is_none() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_lost_device_says_so() {
    in_child("a_lost_device_says_so_child", &[]);
}

#[test]
#[ignore = "run by a_lost_device_says_so"]
fn a_lost_device_says_so_child() {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Params(u64);
    // SAFETY: an address.
    unsafe impl Declared for Params {
        type Any = Params;
        const TEXT: &'static str = "struct Params { float* to; };";
    }
    const BAD: Source<Params> = Source::new(
        "write_to_nowhere",
        "extern \"C\" __global__ void write_to_nowhere(const __grid_constant__ Params p) { *p.to = 1; }",
    );
    let device = gpu().unwrap();
    let buffer = Buffer::new(&device, Spec::new(DType::F32, &[10]).unwrap()).unwrap();
    let lane = device.lane().unwrap();
    let kernel = device.kernel(&BAD, "").unwrap();
    // SAFETY: none: this is the illegal access that the test is about.
    unsafe { lane.launch(&kernel, [1, 1, 1], 1, &Params(64)).unwrap() };
    let error = lane.synchronize().unwrap_err();
    assert_eq!(error.kind, Kind::DeviceLost, "{error}");
    println!("{error}");
    drop(buffer);
    assert_eq!(lane.synchronize().unwrap_err(), error);
    assert_eq!(device.lane().map(drop).unwrap_err(), error);
    assert_eq!(Device::get(0).unwrap_err(), error);
    assert_eq!(Buffer::new(&device, Spec::new(DType::F32, &[1]).unwrap()).unwrap_err(), error);
    assert_eq!(cuda::devices().unwrap()[0].lost, Some(error));
    common::run::<SelectiveScan>(&Options::default(), &Call::new([1, 4, 3, 2]).inputs(DType::F32), &Exec::default())
        .expect("the CPU goes on");
}

#[test]
fn a_trial_tells_what_graphs_of_others_hold() {
    let Some(device) = gpu() else { return };
    let spec = Spec::new(DType::F32, &[4, 64]).unwrap();
    let options = activations::Options { function: Some(Activation::Relu), ..Default::default() };
    let call = op::Call::new::<Activations>(Named::from_iter([(op::Name::from("x"), spec)]), &options).unwrap();
    let fits = device.fits_graph(|lane| {
        // SAFETY: nothing runs that would read or write there.
        let [x, y] = [4096, 8192].map(|address| unsafe { lane.lent(spec, address) });
        call.cuda(&Named::from_iter([(op::Name::from("x"), &x)]), &Named::from_iter([(op::Name::from("y"), &y)]), &lane)
    });
    assert_eq!(fits, Ok(true));
    assert_eq!(device.fits_graph(|lane| lane.scratch(0).map(drop)), Ok(true));
    assert_eq!(device.fits_graph(|lane| lane.scratch(16).map(drop)), Ok(false));
    assert_eq!(device.fits_graph(|lane| lane.temporary(spec).map(drop)), Ok(false));
    let lane = device.lane().unwrap();
    lane.scratch(16).expect("lanes after a trial are as before");
    lane.synchronize().unwrap();
}

#[test]
fn a_device_marked_lost_says_so() {
    in_child("a_device_marked_lost_says_so_child", &[]);
}

#[test]
#[ignore = "run by a_device_marked_lost_says_so"]
fn a_device_marked_lost_says_so_child() {
    let device = gpu().unwrap();
    let lane = device.lane().unwrap();
    device.lose("a test said so");
    assert_eq!(lane.synchronize().unwrap_err().kind, Kind::DeviceLost);
    assert_eq!(Device::get(0).unwrap_err().kind, Kind::DeviceLost);
}

#[test]
fn a_missing_compiler_is_named() {
    in_child("a_missing_compiler_is_named_child", &[("SIDEWINDER_NVRTC", "/nowhere/libnvrtc.so")]);
}

#[test]
#[ignore = "run by a_missing_compiler_is_named"]
fn a_missing_compiler_is_named_child() {
    let device = gpu().unwrap();
    let call = Call::new([1, 4, 3, 2]);
    let error = on_device(&device, &call.options, &call.inputs(DType::F32), None).map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.to_string().contains("/nowhere/libnvrtc.so"), "{error}");
    println!("{error}");
    assert_eq!(cuda::devices().unwrap()[0].compiler, Err(error));
}

#[test]
fn a_missing_library_of_products_is_named() {
    in_child("a_missing_library_of_products_is_named_child", &[("SIDEWINDER_CUBLASLT", "/nowhere/libcublasLt.so")]);
}

#[test]
#[ignore = "run by a_missing_library_of_products_is_named"]
fn a_missing_library_of_products_is_named_child() {
    let device = gpu().unwrap();
    let inputs = common::check::inputs(&[("a", &[2, 3]), ("b", &[3, 4])]);
    let error = common::run_cuda::<Matmul>(&matmul::Options {}, &inputs, &device).map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.to_string().contains("/nowhere/libcublasLt.so"), "{error}");
    println!("{error}");
}

#[test]
fn a_wrong_kernel_brings_the_compilers_words() {
    let Some(device) = gpu() else { return };
    const WRONG: Source<()> = Source::new("wrong", "extern \"C\" __global__ void wrong() { undeclared(); }");
    let error = device.kernel(&WRONG, "-DREAL=float").map(drop).unwrap_err();
    assert_eq!(error.kind, Kind::Cuda);
    assert!(error.got.contains("undeclared"), "{error}");
}

#[test]
fn a_damaged_cache_is_mended() {
    let folder = std::env::temp_dir().join(format!("sidewinder-cache-test-{}", std::process::id()));
    let environment = [("SIDEWINDER_CACHE", folder.to_str().unwrap())];
    let files = || {
        let entries = folder.read_dir().into_iter().flatten().flatten();
        entries.map(|entry| (entry.path(), std::fs::read(entry.path()).unwrap())).collect::<Vec<_>>()
    };
    in_child("a_damaged_cache_is_mended_child", &environment);
    let whole = files();
    for (path, content) in &whole {
        let mut damaged = content.clone();
        damaged.truncate(content.len() - 100);
        std::fs::write(path, damaged).unwrap();
    }
    in_child("a_damaged_cache_is_mended_child", &environment);
    assert!(files() == whole, "the cache was not mended");
    assert!(gpu().is_none() || !whole.is_empty());
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
#[ignore = "run by a_damaged_cache_is_mended"]
fn a_damaged_cache_is_mended_child() {
    Call::full([1, 20, 3, 16]).check(&gpu().unwrap(), DType::F32, None);
}

/// More elements than 32 bits count: the last batch must be what it is alone.
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
