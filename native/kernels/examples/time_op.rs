//! Times ops over the inputs of a safetensors file and prints one line of JSON.
//!
//! `time_op OP[,OP...] IN.safetensors [--backend cpu|cuda] [--level NAME] [--threads N] [--seconds S]
//! [--out OUT.safetensors] [--options JSON] [--type NAME] [--copies N]`.
//! Floats are cast to the type first, and results back to f32 in the end. N copies of the inputs (1 by default) are
//! used in turn, so that together they can exceed the caches. Several ops, such as one and its gradient, run one after
//! the other and are timed together; a later op takes inputs that the file lacks from the outputs of earlier ones. On
//! CUDA inputs and outputs are resident, and times are device times.

#[path = "../tests/common/mod.rs"]
mod common;
mod timing;

use serde_json::{Value, json};
use sidewinder_files::safetensors::{self, Reader};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::op::{self, About, AnyOp, Call, Named, Slot};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned};
use std::path::Path;
use std::time::Instant;
use timing::{Arguments, Failure};

const FLAGS: [&str; 8] = ["backend", "level", "threads", "seconds", "out", "options", "type", "copies"];

/// The op's inputs from the file, or else from the outputs of earlier ops.
fn inputs(op: &About, arguments: &Arguments, before: &[Box<dyn Job>]) -> Result<Named<Owned>, Failure> {
    let reader = Reader::open(Path::new(&arguments.positional[1]))?;
    let dtype = dtype(arguments)?;
    // Each tensor is cast to the precision that its slot requires.
    let cast = |slot: &Slot, tensor: Owned| match dtype.filter(|_| tensor.spec().dtype.is_float()) {
        Some(dtype) => tensor.cast(slot.precision.dtype(dtype)),
        None => tensor,
    };
    let mut inputs = Named::default();
    for slot in op.inputs {
        let given = before.iter().find_map(|job| job.outputs().find(slot.name));
        if let Some(entry) = reader.entry(slot.name) {
            inputs.push(slot.name, cast(slot, reader.tensor(entry)?));
        } else if let Some(given) = given {
            inputs.push(slot.name, given.clone());
        }
    }
    Ok(inputs)
}

/// The type that floats are cast to, if one is given.
fn dtype(arguments: &Arguments) -> Result<Option<DType>, Failure> {
    let named = |name| DType::from_name(name).ok_or_else(|| format!("no type `{name}`").into());
    arguments.flag("type").map(named).transpose()
}

/// The checked call of the op with its inputs.
fn call(op: &dyn AnyOp, arguments: &Arguments, before: &[Box<dyn Job>]) -> Result<(Call, Named<Owned>), Failure> {
    let inputs = inputs(op.about(), arguments, before)?;
    let options = serde_json::from_str(arguments.flag("options").unwrap_or("{}"))?;
    Ok((common::configured(op, options)?(op::specs(&inputs))?, inputs))
}

/// Number of copies of the inputs.
fn copies(arguments: &Arguments) -> Result<usize, Failure> {
    Ok(arguments.flag("copies").unwrap_or("1").parse::<usize>()?.max(1))
}

/// A repeatable run, and its results.
trait Job {
    /// Runs it and gives the milliseconds that it took.
    fn run(&mut self) -> Result<f64, Failure>;
    fn outputs(&self) -> &Named<Owned>;
    fn shapes(&self) -> Value;
}

/// A call of an op on the CPU, with its inputs and outputs.
struct OnCpu {
    call: Call,
    exec: Exec,
    inputs: Vec<Named<Owned>>,
    outputs: Named<Owned>,
}

impl OnCpu {
    fn new(op: &dyn AnyOp, arguments: &Arguments, before: &[Box<dyn Job>]) -> Result<Self, Failure> {
        let (exec, (call, inputs)) = (arguments.exec()?, call(op, arguments, before)?);
        let outputs = common::run_call(&call, &inputs, &exec)?;
        Ok(OnCpu { call, exec, inputs: vec![inputs; copies(arguments)?], outputs })
    }
}

impl Job for OnCpu {
    fn run(&mut self) -> Result<f64, Failure> {
        self.inputs.rotate_left(1);
        let start = Instant::now();
        let to = self.outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
        self.call.cpu(&self.inputs[0].map(Owned::view), to, &self.exec)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    fn outputs(&self) -> &Named<Owned> {
        &self.outputs
    }

    fn shapes(&self) -> Value {
        self.inputs[0].iter().map(|(name, tensor)| (name.to_string(), json!(tensor.spec().shape.to_vec()))).collect()
    }
}

/// An op on a GPU, with its outputs from a first run.
struct OnDevice {
    call: Call,
    lane: Lane,
    inputs: Vec<Named<Buffer>>,
    results: Named<Buffer>,
    outputs: Named<Owned>,
}

impl OnDevice {
    fn new(op: &dyn AnyOp, arguments: &Arguments, before: &[Box<dyn Job>]) -> Result<Self, Failure> {
        let (device, (call, from)) = (Device::get(0)?, call(op, arguments, before)?);
        let lane = device.lane()?;
        let outputs = common::run_call_on(&call, &from, &lane)?;
        let brought = |tensor: &Owned| {
            let buffer = Buffer::new(&device, tensor.spec())?;
            lane.upload(tensor.view().bytes(), &buffer).map(|()| buffer)
        };
        let inputs = (0..copies(arguments)?).map(|_| Ok(from.try_map(brought)?)).collect::<Result<_, Failure>>()?;
        let results = call.outputs().try_map(|&spec| Buffer::new(&device, spec))?;
        Ok(OnDevice { call, lane, inputs, results, outputs })
    }
}

impl Job for OnDevice {
    fn run(&mut self) -> Result<f64, Failure> {
        let inputs: Vec<_> = self.inputs.iter().map(|inputs| inputs.as_ref()).collect();
        let (results, mut copies) = (self.results.as_ref(), inputs.iter().cycle());
        Ok(common::milliseconds(&self.lane, 10, || {
            self.call.cuda(copies.next().expect("an endless one"), &results, &self.lane)
        })?)
    }

    fn outputs(&self) -> &Named<Owned> {
        &self.outputs
    }

    fn shapes(&self) -> Value {
        self.inputs[0].iter().map(|(name, buffer)| (name.to_string(), json!(buffer.spec().shape.to_vec()))).collect()
    }
}

fn job(name: &str, arguments: &Arguments, before: &[Box<dyn Job>]) -> Result<Box<dyn Job>, Failure> {
    let op = ops::find(name)?;
    Ok(match arguments.flag("backend").unwrap_or("cpu") {
        "cpu" => Box::new(OnCpu::new(op, arguments, before)?),
        "cuda" => Box::new(OnDevice::new(op, arguments, before)?),
        other => return Err(format!("no backend `{other}`: cpu or cuda").into()),
    })
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse("time_op OP IN.safetensors", 2, &FLAGS)?;
    let ops = &arguments.positional[0];
    let mut jobs = Vec::new();
    for name in ops.split(',') {
        jobs.push(job(name, &arguments, &jobs)?);
    }
    if let Some(out) = arguments.flag("out") {
        let is_cast = dtype(&arguments)?.is_some();
        let cast = |tensor: &Owned| if is_cast { tensor.cast(DType::F32) } else { tensor.clone() };
        let outputs = jobs.iter().flat_map(|job| job.outputs().iter());
        let outputs: Vec<_> = outputs.map(|(name, tensor)| (name.clone(), cast(tensor))).collect();
        let views: Vec<_> = outputs.iter().map(|(name, tensor)| (name.as_ref(), tensor.view())).collect();
        safetensors::write(Path::new(out), &views)?;
    }
    let times = arguments.times(|| jobs.iter_mut().map(|job| job.run()).sum())?;
    let exec = arguments.exec()?;
    let level = if arguments.flag("backend") == Some("cuda") { "cuda" } else { exec.level.name() };
    println!(
        "{}",
        json!({
            "op": ops, "shape": jobs[0].shapes(), "level": level, "threads": exec.threads,
            "median_ms": times[times.len() / 2], "min_ms": times[0], "runs": times.len(),
        })
    );
    Ok(())
}
