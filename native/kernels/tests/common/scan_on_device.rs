//! Generates calls of the selective scan and runs them on a GPU.

use super::{gpu, worst};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::scan::selective_scan::cuda::{Plan, forward_as};
use sidewinder_kernels::ops::scan::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::process::Command;

/// The form of B or C.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Shared,
    Groups(usize),
    Constant,
}

/// A call to generate: sizes, forms, and optional inputs.
#[derive(Clone, Debug)]
pub struct Call {
    pub sizes: [usize; 4],
    pub b: Form,
    pub c: Form,
    pub optional: bool,
    pub options: Options,
}

impl Call {
    pub fn new(sizes: [usize; 4]) -> Call {
        let options = Options { return_state: true, ..Options::default() };
        Call { sizes, b: Form::Shared, c: Form::Shared, optional: false, options }
    }

    /// All optional inputs: D, z, dt_bias, initial_state; with softplus.
    pub fn full(sizes: [usize; 4]) -> Call {
        let mut call = Call { optional: true, ..Call::new(sizes) };
        call.options.dt_softplus = true;
        call
    }

    pub fn forms(self, b: Form, c: Form) -> Call {
        Call { b, c, ..self }
    }

    pub fn clamped(mut self) -> Call {
        self.options.dt_clamp = Some((0.0625, 0.5));
        self
    }

    pub fn inputs(&self, storage: DType) -> Named<Owned> {
        let [b, l, d, n] = self.sizes;
        let varying = |form| match form {
            Form::Shared => vec![b, l, n],
            Form::Groups(groups) => vec![b, l, groups, n],
            Form::Constant => vec![d, n],
        };
        // Softplus makes step sizes of any sign positive; without it they are generated small and positive.
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

    /// Runs the call on the device with poisoned outputs, and compares it with the f64 reference.
    pub fn check(&self, device: &Device, storage: DType, plan: Option<Plan>) {
        let inputs = self.inputs(storage);
        let got = on_device(device, &self.options, &inputs, plan).unwrap();
        let exact = inputs.map(|tensor| tensor.cast(DType::F64));
        let level = Exec { level: Level::Reference, threads: 1 };
        let expected = super::run::<SelectiveScan>(&self.options, &exact, &level).unwrap();
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

pub fn noise(seed: u64, dtype: DType, dims: &[usize], from: f64, to: f64) -> Owned {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Owned::from_fn(Spec::new(dtype, dims).unwrap(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        from + (to - from) * (state >> 33) as f64 / (1u64 << 31) as f64
    })
}

pub fn uploaded(lane: &Lane, tensors: &Named<Owned>) -> Result<Named<Buffer>> {
    let buffers = tensors.iter().map(|(name, t)| Ok((name.clone(), Buffer::new(lane.device(), t.spec())?)));
    let buffers = buffers.collect::<Result<Named<_>>>()?;
    for (name, tensor) in tensors.iter() {
        lane.upload(tensor.view().bytes(), buffers.get(name)?)?;
    }
    Ok(buffers)
}

pub fn refs(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.iter().map(|(name, buffer)| (name.clone(), buffer)).collect()
}

pub fn on_device(
    device: &Device,
    options: &Options,
    inputs: &Named<Owned>,
    plan: Option<Plan>,
) -> Result<Named<Owned>> {
    let lane = device.lane()?;
    into_poisoned::<SelectiveScan>(&lane, options, inputs, |problem, inputs, outputs| {
        forward_as(problem, inputs, outputs, &lane, plan)
    })
}

/// Runs an op from host memory on the device, with poisoned outputs, and copies them back.
pub fn into_poisoned<O: Op>(
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

/// Runs an ignored test of the module with this path in a process of its own.
pub fn in_child(module: &str, test: &str, environment: &[(&str, &str)]) {
    if gpu().is_none() {
        return;
    }
    // The names of tests do not contain the name of the test program.
    let test = module.split_once("::").map_or(test.to_string(), |(_, module)| format!("{module}::{test}"));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
