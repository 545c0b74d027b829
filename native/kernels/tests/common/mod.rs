//! Common parts of the integration tests.

#![allow(dead_code)]

pub mod blocks;
pub mod check;
pub mod composed;
pub mod cumulative;
pub mod gated_delta_rule;
pub mod linear_attention;
pub mod on_device;
pub mod packed;
pub mod parts;
pub mod quant;
pub mod recurrences;
pub mod scan_on_device;
pub mod scans;
pub mod ssd;
pub mod ternary;

use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{self, Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, About, AnyOp, Call, Configured, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View, ViewMut};

/// Inputs without those of these names.
pub fn without(inputs: &Named<Owned>, names: &[&str]) -> Named<Owned> {
    inputs.iter().filter(|(name, _)| !names.contains(&&***name)).map(|(name, t)| (name.clone(), t.clone())).collect()
}

/// Inputs with another tensor of this name.
pub fn with(inputs: &Named<Owned>, name: &'static str, tensor: Owned) -> Named<Owned> {
    let mut all = without(inputs, &[name]);
    all.push(name, tensor);
    all
}

/// Runs an op on the CPU into poisoned outputs.
pub fn run<O: Op>(options: &O::Options, inputs: &Named<Owned>, exec: &Exec) -> Result<Named<Owned>> {
    run_call(&ops::call::<O>(op::specs(inputs), options)?, inputs, exec)
}

/// Runs a call on the CPU into poisoned outputs.
pub fn run_call(call: &Call, inputs: &Named<Owned>, exec: &Exec) -> Result<Named<Owned>> {
    into_poisoned(call, inputs, |views, outputs| call.cpu(views, outputs, exec))
}

/// Runs an op on a CUDA device, from host memory into poisoned outputs.
pub fn run_cuda<O: Op>(options: &O::Options, inputs: &Named<Owned>, device: &Device) -> Result<Named<Owned>> {
    run_on::<O>(options, inputs, &device.lane()?)
}

/// Like [`run_cuda`], on a lane.
pub fn run_on<O: Op>(options: &O::Options, inputs: &Named<Owned>, lane: &Lane) -> Result<Named<Owned>> {
    run_call_on(&ops::call::<O>(op::specs(inputs), options)?, inputs, lane)
}

/// Runs a call on a lane, from host memory into poisoned outputs.
pub fn run_call_on(call: &Call, inputs: &Named<Owned>, lane: &Lane) -> Result<Named<Owned>> {
    into_poisoned(call, inputs, |views, outputs| op::run_host(call, views, outputs, lane))
}

/// The op with options in JSON, or the error of decoding them.
pub fn configured(op: &dyn AnyOp, options: serde_json::Value) -> std::result::Result<Configured, String> {
    op.with(&mut <dyn erased_serde::Deserializer>::erase(options)).map_err(|error| error.to_string())
}

/// Where an op runs.
#[derive(Debug)]
pub enum Place<'d> {
    Cpu(Exec),
    Cuda(&'d Device),
}

impl Place<'_> {
    /// Runs the op of that name.
    pub fn run(&self, op: &str, options: serde_json::Value, inputs: &Named<Owned>) -> Named<Owned> {
        let op = ops::find(op).unwrap();
        self.call(&configured(op, options).expect("options that the op knows"), inputs)
    }

    /// Runs an op with its options.
    pub fn call(&self, op: &Configured, inputs: &Named<Owned>) -> Named<Owned> {
        let call = op(op::specs(inputs)).unwrap();
        match self {
            Place::Cpu(exec) => run_call(&call, inputs, exec),
            Place::Cuda(device) => run_call_on(&call, inputs, &device.lane().unwrap()),
        }
        .unwrap()
    }
}

/// Copies of tensors on the lane's device.
pub fn uploaded(lane: &Lane, tensors: &Named<Owned>) -> Result<Named<Buffer>> {
    tensors.try_map(|tensor| {
        let buffer = Buffer::new(lane.device(), tensor.spec())?;
        lane.upload(tensor.view().bytes(), &buffer).map(|()| buffer)
    })
}

/// Milliseconds of device time per call by events, over several calls.
pub fn milliseconds(lane: &Lane, calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let begin = lane.mark()?;
    (0..calls).try_for_each(|_| call())?;
    let end = lane.mark()?;
    lane.synchronize()?;
    Ok(f64::from(end.milliseconds_since(&begin)?) / calls as f64)
}

/// The median and the least of ten such times, after two warm-up runs.
pub fn median_and_least(lane: &Lane, mut call: impl FnMut() -> Result<()>) -> Result<(f64, f64)> {
    // A single short call would be measured with the overhead of the events.
    let calls = if milliseconds(lane, 1, &mut call)? < 5.0 { 10 } else { 1 };
    let times = (0..12).map(|_| milliseconds(lane, calls, &mut call)).collect::<Result<Vec<_>>>()?;
    let mut times = times[2..].to_vec();
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[0]))
}

/// Median and least time of one call, from a CUDA graph of many. Inputs, outputs and the lane's scratch memory must
/// stay allocated.
pub fn recorded(lane: &Lane, call: impl Fn() -> Result<()>) -> Result<(f64, f64)> {
    const CALLS: usize = 50;
    let graph = lane.record(|| (0..CALLS).try_for_each(|_| call()))?;
    // SAFETY: this lane recorded it, and the caller keeps its buffers alive.
    let (ms, least) = median_and_least(lane, || unsafe { lane.replay(&graph) })?;
    Ok((ms / CALLS as f64, least / CALLS as f64))
}

fn into_poisoned(
    call: &Call,
    inputs: &Named<Owned>,
    run: impl FnOnce(&Named<View>, Named<ViewMut>) -> Result<()>,
) -> Result<Named<Owned>> {
    let mut outputs = call.outputs().map(|spec| Owned::poisoned(*spec));
    let views_mut = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
    run(&inputs.map(Owned::view), views_mut)?;
    Ok(outputs)
}

/// The inputs in another storage type, each in the precision that its slot requires.
pub fn cast(op: &About, inputs: &Named<Owned>, storage: DType) -> Named<Owned> {
    let slot = |name: &str| op.inputs.iter().find(|slot| slot.name == name).expect("a known input");
    inputs.iter().map(|(name, t)| (name.clone(), t.cast(slot(name).precision.dtype(storage)))).collect()
}

/// The largest quotient of an error and its tolerance `atol + rtol * |expected|`, so that 1 or less passes. It is
/// infinite where exactly one value is NaN, or infinities differ.
pub fn worst(got: &Owned, expected: &Owned, rtol: f64, atol: f64) -> f64 {
    let (got, expected) = (got.view().to_f64(), expected.view().to_f64());
    assert_eq!(got.shape(), expected.shape());
    let quotient = |(&got, &expected): (&f64, &f64)| match (got - expected).abs() {
        _ if got == expected || (got.is_nan() && expected.is_nan()) => 0.0,
        difference if difference.is_finite() => difference / (atol + rtol * expected.abs()),
        _ => f64::INFINITY,
    };
    got.iter().zip(&expected).map(quotient).fold(0.0, f64::max)
}

/// The first GPU, or `None` with a printed notice.
pub fn gpu() -> Option<Device> {
    let found = cuda::devices().and_then(|devices| match devices.len() {
        0 => Ok(None),
        _ => Device::get(0).map(Some),
    });
    let required = std::env::var_os("SIDEWINDER_REQUIRE_CUDA").is_some_and(|value| value == "1");
    match found {
        Ok(Some(device)) => Some(device),
        other => {
            assert!(!required, "SIDEWINDER_REQUIRE_CUDA=1, but there is no CUDA device: {other:?}");
            println!("SKIPPED for want of a CUDA device: {}", other.map_or_else(|e| e.to_string(), |_| "none".into()));
            None
        }
    }
}

/// Prints the GPUs: one line of JSON for each.
pub fn tell_gpus() -> Result<()> {
    for info in cuda::devices()? {
        let (compiler, driver) = (format!("{:?}", info.compiler), format!("{:?}", info.driver));
        println!("{}", serde_json::json!({"device": info.name, "compiler": compiler, "driver": driver}));
    }
    Ok(())
}

/// The optimised levels of this CPU.
pub fn levels() -> impl Iterator<Item = Level> {
    Level::available().iter().copied().filter(|&level| level != Level::Reference)
}

/// Numbers of threads whose results must be those of one thread, bit by bit.
pub const THREADS: &[usize] = if cfg!(fuzzing) { &[8] } else { &[2, 8] };

/// What computes expected results in f64: the reference.
///
/// Under AddressSanitizer it is the f64 kernels. The reference is safe code, but would take nine tenths of the time.
pub const EXACT: Exec = Exec { level: if cfg!(fuzzing) { Level::Scalar } else { Level::Reference }, threads: 1 };

/// The results of [`EXACT`], for inputs with the values that they have in storage.
pub fn reference<O: Op>(options: &O::Options, inputs: &Named<Owned>) -> Named<Owned> {
    let about = op::about::<O>();
    if cfg!(fuzzing) && O::STORAGE.contains(&DType::F64) {
        return run::<O>(options, &cast(about, inputs, DType::F64), &EXACT).unwrap();
    }
    // Bounds of clamps are rounded to the type of the arithmetic, so the call is checked in its own types.
    let (_, storage) = about.storage(&op::specs(inputs));
    let exact = Level::Reference.alone();
    if storage == DType::F64 {
        return run::<O>(options, inputs, exact).unwrap();
    }
    in_f64(&ops::call::<O>(op::specs(inputs), options).unwrap(), inputs).unwrap()
}

/// The reference's results in f64 of a call that is checked in its own types.
fn in_f64(call: &Call, inputs: &Named<Owned>) -> Result<Named<Owned>> {
    let results = call.reference(&inputs.map(|t| t.view().to_f64()))?;
    call.outputs()
        .iter()
        .map(|(name, spec)| {
            let mut output = Owned::poisoned(Spec { dtype: DType::F64, ..*spec });
            output.view_mut().store_f64(results.get(name)?);
            Ok((name.clone(), output))
        })
        .collect()
}

/// The tolerance of a result: relative to itself, and to the largest value of its tensor.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (1e-10, 1e-12),
        DType::F32 => (2e-5, 5e-6),
        DType::Bf16 => (1.0 / 256.0, 1e-5),
        DType::F16 => (1.0 / 2048.0, 1e-5),
        _ => (0.0, 0.0),
    }
}

/// The largest magnitude of each tensor.
pub fn sizes(of: &Named<Owned>) -> Named<f64> {
    of.map(|tensor| tensor.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs())))
}

/// Compares all tensors in `expected`, each within the tolerance of its type.
pub fn assert_close(got: &Named<Owned>, expected: &Named<Owned>, what: &str) {
    assert_close_for(&sizes(expected), got, expected, what);
}

/// Like [`assert_close`], for sums that may cancel: a small result is only as accurate as the `sizes` of its terms
/// allow.
pub fn assert_close_for(sizes: &Named<f64>, got: &Named<Owned>, expected: &Named<Owned>, what: &str) {
    for (name, expected) in expected.iter() {
        let got = got.get(name).unwrap();
        let (rtol, relative) = tolerance(got.spec().dtype);
        let worst = worst(got, expected, rtol, relative * sizes.get(name).unwrap());
        assert!(worst <= 1.0, "{name} is off by {worst} times the tolerance: {what}");
    }
}

/// The bytes of all results, for comparisons.
pub fn bits(results: &Named<Owned>) -> Vec<Vec<u8>> {
    results.iter().map(|(_, tensor)| tensor.view().bytes().to_vec()).collect()
}

/// A range of an axis.
pub fn part(of: &Owned, axis: usize, range: std::ops::Range<usize>) -> Owned {
    let mut dims = of.spec().shape.to_vec();
    dims[axis] = range.len();
    let values = of.view().to_f64();
    let values = values.slice_axis(ndarray::Axis(axis), range.into());
    let mut values = values.iter().copied();
    Owned::from_fn(Spec::new(of.spec().dtype, &dims).unwrap(), |_| values.next().unwrap())
}

/// A tensor of rank 4 with its axes in this order.
pub fn transposed(of: &Owned, axes: [usize; 4]) -> Owned {
    let values = of.view().to_f64().permuted_axes(axes.to_vec());
    let spec = Spec::new(of.spec().dtype, values.shape()).unwrap();
    let mut values = values.iter().copied();
    Owned::from_fn(spec, |_| values.next().unwrap())
}

/// A minimal random generator: tests need no better numbers.
pub struct Random(pub u64);

impl Random {
    /// The next number, from 0 to 1.
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 11) as f64) / ((1u64 << 53) as f64)
    }
}
