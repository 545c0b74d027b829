//! Runs each recurrence and its gradient over 2^20 steps, which as states of all steps would not fit in memory: one line
//! of JSON for each op and type, with times, the memory beside inputs and outputs, and the largest errors against f64.
//!
//! `long_time [cpu|cuda [NAME]]`. Errors are relative to the largest value of their tensor; what is compared with are the
//! f64 kernels of the same backend. Times are of the second of two calls.

#[path = "../tests/common/mod.rs"]
mod common;

use common::check::noise;
use serde_json::{Value, json};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, AnyOp, Call, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned};
use std::time::Instant;

const STEPS: usize = 1 << 20;

/// An op, its options, the shapes of its inputs, and the elements of its state.
type Case = (&'static str, Value, Vec<(&'static str, Vec<usize>)>, usize);

fn cases() -> Vec<Case> {
    let steps = |name, dims: &[usize]| (name, [&[1, STEPS], dims].concat());
    let heads = || ["q", "k", "v"].map(|name| steps(name, &[1, 64])).into_iter().chain([steps("g", &[1])]);
    let ssd = vec![steps("x", &[1, 64]), steps("dt", &[1]), ("A", vec![1]), steps("B", &[1, 64]), steps("C", &[1, 64])];
    let scan = [steps("x", &[16]), steps("dt", &[16]), ("A", vec![16, 16]), steps("B", &[16]), steps("C", &[16])];
    vec![
        ("linear_scan", json!({}), vec![steps("a", &[16]), steps("b", &[16])], 16),
        ("selective_scan", json!({"dt_softplus": true}), scan.into(), 16 * 16),
        ("ssd", json!({"dt_softplus": true}), ssd, 64 * 64),
        ("linear_attention", json!({}), heads().collect(), 64 * 64),
        ("gated_delta_rule", json!({"qk_l2norm": true}), heads().chain([steps("beta", &[1])]).collect(), 64 * 64),
    ]
}

/// Decays and step sizes with which a state remembers some hundred steps.
fn filled(name: &str, dims: &[usize]) -> Owned {
    let [low, high] = match name {
        "a" => [0.9, 1.0],
        "g" => [-0.05, 0.0],
        "A" => [-0.2, -0.01],
        "dt" => [-4.0, 0.0],
        "beta" => [0.0, 1.0],
        _ => [-1.0, 1.0],
    };
    noise(name.bytes().map(u64::from).sum(), dims, low, high)
}

fn main() -> Result<()> {
    let [backend, wanted] = [1, 2].map(|at| std::env::args().nth(at).unwrap_or_default());
    let device = if backend == "cuda" { Some(Device::get(0)?) } else { None };
    match device {
        Some(_) => common::tell_gpus()?,
        None => println!("{}", json!({"device": cpu(&Exec::default())})),
    }
    for (name, options, shapes, state) in cases().iter().filter(|(name, ..)| name.contains(&wanted)) {
        let given: Named<Owned> = shapes.iter().map(|(name, dims)| (*name, filled(name, dims))).collect();
        for dtype in [DType::F32, DType::Bf16] {
            let mut line = json!({"op": name, "dtype": dtype.name(), "steps": STEPS, "options": options});
            line["megabytes_of_all_states"] = json!((STEPS * state * 4) >> 20);
            let (mut before, mut exact) = (given.clone(), given.clone());
            for op in [name, &*format!("{name}_backward")] {
                let op = ops::find(op)?;
                let rounded = inputs(op, &before, dtype);
                // Equal values for both, so that errors are those of the arithmetic.
                let of_f64 = inputs(op, &exact, dtype);
                let (outputs, told) = run(op, options, &rounded, device.as_ref())?;
                let (expected, _) = run(op, options, &inputs(op, &of_f64, DType::F64), device.as_ref())?;
                line[op.about().name] = told;
                line[op.about().name]["errors"] = errors(&outputs, &expected);
                outputs.into_iter().for_each(|(name, output)| before.push(name, output));
                expected.into_iter().for_each(|(name, output)| exact.push(name, output));
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// The CPU's name, where Linux tells it, and what is used of it.
fn cpu(exec: &Exec) -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("a CPU");
    format!("{}, {} threads, {}", name.trim_matches([' ', '\t', ':']), exec.threads, exec.level.name())
}

/// The inputs of an op: those that are given, and cotangents of outputs that are.
fn inputs(op: &dyn AnyOp, given: &Named<Owned>, dtype: DType) -> Named<Owned> {
    let slots = op.about().inputs.iter();
    let own = slots.filter_map(|slot| {
        let cotangent = || slot.name.strip_prefix('d').and_then(|of| given.find(of));
        let tensor = match given.find(slot.name) {
            Some(tensor) => tensor.clone(),
            None => filled(slot.name, &cotangent()?.spec().shape),
        };
        Some((slot.name, tensor.cast(slot.precision.dtype(dtype))))
    });
    own.collect()
}

/// Runs a call twice; gives its outputs, and the time and memory of the second call.
fn run(
    op: &dyn AnyOp,
    options: &Value,
    inputs: &Named<Owned>,
    device: Option<&Device>,
) -> Result<(Named<Owned>, Value)> {
    let call = common::configured(op, options.clone()).expect("options of the op")(op::specs(inputs))?;
    match device {
        None => on_cpu(&call, inputs),
        Some(device) => on_device(&call, inputs, device),
    }
}

fn on_cpu(call: &Call, inputs: &Named<Owned>) -> Result<(Named<Owned>, Value)> {
    common::run_call(call, inputs, &Exec::default())?;
    let mut outputs = call.outputs().map(|spec| Owned::poisoned(*spec));
    let views = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
    let before = Memory::begin();
    let begin = Instant::now();
    call.cpu(&inputs.map(Owned::view), views, &Exec::default())?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    Ok((outputs, json!({"ms": ms, "workspace_megabytes": before.and_then(Memory::grown)})))
}

fn on_device(call: &Call, inputs: &Named<Owned>, device: &Device) -> Result<(Named<Owned>, Value)> {
    // Otherwise what earlier calls left would count.
    device.trim()?;
    let lane = device.lane()?;
    let uploaded = common::uploaded(&lane, inputs)?;
    let outputs = call.outputs().try_map(|&spec| Buffer::new(device, spec))?;
    let queue = || call.cuda(&uploaded.as_ref(), &outputs.as_ref(), &lane);
    device.peak_scratch_bytes()?;
    queue()?;
    let ms = common::milliseconds(&lane, 1, queue)?;
    let told = json!({"ms": ms, "workspace_megabytes": device.peak_scratch_bytes()? >> 20});
    Ok((outputs.try_map(|output| lane.downloaded(output))?, told))
}

/// Resident memory of this process, where Linux tells it.
struct Memory {
    before: u64,
}

impl Memory {
    /// Forgets the peak.
    fn begin() -> Option<Memory> {
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Memory { before: Memory::megabytes("VmRSS:")? })
    }

    /// By how many megabytes the peak has exceeded what there was.
    fn grown(self) -> Option<u64> {
        Some(Memory::megabytes("VmHWM:")?.saturating_sub(self.before))
    }

    fn megabytes(key: &str) -> Option<u64> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kilobytes| kilobytes >> 10)
    }
}

/// The largest error of each output, relative to the output's largest value.
fn errors(outputs: &Named<Owned>, expected: &Named<Owned>) -> Value {
    let error = |name: &str, output: &Owned| {
        let expected = expected.find(name)?;
        let largest = expected.view().to_f64().fold(0.0f64, |most, value| most.max(value.abs()));
        Some((name.to_string(), json!(common::worst(output, expected, 0.0, largest))))
    };
    outputs.iter().filter_map(|(name, output)| error(name, output)).collect::<serde_json::Map<_, _>>().into()
}
