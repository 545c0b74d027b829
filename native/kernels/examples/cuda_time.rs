//! Times the scan and its gradient on a CUDA device: one line of JSON per op, shape and type.
//!
//! `cuda_time [SHAPE...]` with shapes such as `8x2048x2048x16`; `SWEEP=bf16` times every layout in that
//! type too, and `OP=selective_scan_backward` only that op.
//! `kernel_ms` is device time by events; `resident_ms` is a call from device buffers to device buffers, including the
//! wait for its end; `host_ms` is a call from host memory to host memory. The limits are 16 exponentials per clock and
//! multiprocessor (the gradient computes each decay three times), and memory bandwidth of 4.2 TB/s.

#[path = "../tests/common/mod.rs"]
mod common;

use serde_json::json;
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops;
use sidewinder_kernels::ops::scan::selective_scan::backward::SelectiveScanBackward;
use sidewinder_kernels::ops::scan::selective_scan::cuda::{BackwardPlan, Plan, backward_as, forward_as};
use sidewinder_kernels::ops::scan::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::time::Instant;

const SHAPES: [&str; 9] = [
    "32x60x512x16",
    "8x2048x2048x16",
    "8x2048x5120x16",
    "1x2048x1536x16",
    "1x65536x256x16",
    "8x2048x2048x64",
    "1x1x1536x16",
    "64x1x1536x16",
    "64x1x5120x128",
];
const CLOCK: f64 = 1.98e9;
const BANDWIDTH: f64 = 4.2e12;

fn main() -> Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let shapes = if asked.is_empty() { SHAPES.map(String::from).to_vec() } else { asked };
    common::tell_gpus()?;
    let device = Device::get(0)?;
    for shape in shapes {
        time::<SelectiveScan>(&device, &shape)?;
        time::<SelectiveScanBackward>(&device, &shape)?;
    }
    Ok(())
}

fn time<O: Timed>(device: &Device, shape: &str) -> Result<()> {
    let dims: Vec<usize> = shape.split('x').map(|dim| dim.parse().expect("a number")).collect();
    if std::env::var("OP").is_ok_and(|name| name != O::NAME) {
        return Ok(());
    }
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let bench = Bench::<O>::new(device, &dims, dtype)?;
        println!("{}", bench.report(shape)?);
        if std::env::var("SWEEP").is_ok_and(|name| name == dtype.name()) {
            bench.sweep(shape)?;
        }
    }
    Ok(())
}

/// An op that is timed here.
trait Timed: Op<Options = Options> {
    type Plan: Copy + Debug;
    /// How often each decay is computed.
    const EXPONENTIALS: f64;

    fn queue(bench: &Bench<Self>, problem: &Self::Problem, plan: Option<Self::Plan>) -> Result<()>
    where
        Self: Sized;

    /// The layouts that a sweep times.
    fn plans(dims: [usize; 4]) -> Vec<Self::Plan>;
}

impl Timed for SelectiveScan {
    type Plan = Plan;
    const EXPONENTIALS: f64 = 1.0;

    fn queue(bench: &Bench<Self>, problem: &Self::Problem, plan: Option<Plan>) -> Result<()> {
        forward_as(problem, &refs(&bench.inputs), &refs(&bench.outputs), &bench.lane, plan)
    }

    fn plans([batch, length, _, state]: [usize; 4]) -> Vec<Plan> {
        let mut plans = Vec::new();
        for lanes in [1, 2, 4, 8, 16] {
            for owned in [1, 2, 4, 8] {
                for warps in [1, 2, 4] {
                    for chunks in [1, 2, 4, 8, 16, 64] {
                        let (states, tile) = (state.div_ceil(lanes), lanes * owned);
                        let long =
                            (chunks == 1 || length >= 64 * chunks) && (owned == 1 || tile < 2 * length) && states <= 32;
                        let small = 2 * tile * lanes * (states / 2 + 1) * 16 + warps * owned * 256 <= 48 << 10;
                        if long && small && tile <= 64 && (chunks == 1 || batch == 1) {
                            plans.push(Plan { lanes, owned, warps, chunks });
                        }
                    }
                }
            }
        }
        plans
    }
}

impl Timed for SelectiveScanBackward {
    type Plan = BackwardPlan;
    const EXPONENTIALS: f64 = 3.0;

    fn queue(bench: &Bench<Self>, problem: &Self::Problem, plan: Option<BackwardPlan>) -> Result<()> {
        backward_as(&problem.of, &refs(&bench.inputs), &refs(&bench.outputs), &bench.lane, plan)
    }

    fn plans([_, length, ..]: [usize; 4]) -> Vec<BackwardPlan> {
        let mut plans = Vec::new();
        for channels in [1, 2, 4] {
            for warps in [1, 2, 4] {
                for chunks in [1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 64] {
                    if chunks * 32 <= length.next_multiple_of(32) {
                        plans.push(BackwardPlan { channels, warps, chunks });
                    }
                }
            }
        }
        plans
    }
}

/// Inputs and outputs of one call, on the host and on the device.
struct Bench<'a, O> {
    op: PhantomData<O>,
    device: &'a Device,
    dims: [usize; 4],
    options: Options,
    host: Named<Owned>,
    inputs: Named<Buffer>,
    outputs: Named<Buffer>,
    lane: Lane,
    /// Memory whose filling keeps the device busy while launches are queued.
    blocker: Buffer,
}

impl<'a, O: Timed> Bench<'a, O> {
    fn new(device: &'a Device, dims: &[usize], dtype: DType) -> Result<Self> {
        let &[b, l, d, n] = dims else { panic!("a shape is BxLxDxN") };
        let options = Options {
            dt_clamp: Some((0.001, 0.1)),
            return_state: l == 1 && O::BACKWARD_OF.is_none(),
            ..Options::default()
        };
        let mut host = Named::default();
        for (name, shape, from, to) in [
            ("x", &[b, l, d][..], -1.0, 1.0),
            ("dt", &[b, l, d], 0.0, 0.12),
            ("A", &[d, n], -16.0, -0.5),
            ("B", &[b, l, n], -1.0, 1.0),
            ("C", &[b, l, n], -1.0, 1.0),
        ] {
            let dtype = if name == "A" { dtype.wide() } else { dtype };
            host.push(name, noise(Spec::new(dtype, shape)?, from, to));
        }
        if l == 1 {
            host.push("initial_state", noise(Spec::new(dtype.wide(), &[b, d, n])?, -1.0, 1.0));
        }
        if O::BACKWARD_OF.is_some() {
            host.push("dy", noise(Spec::new(dtype, &[b, l, d])?, -1.0, 1.0));
        }
        let (_, outputs) = op::check::<O>(&host.map(|t| t.view().spec()), &options)?;
        let lane = device.lane()?;
        let buffer = |spec| Buffer::new(device, spec);
        let inputs =
            host.iter().map(|(name, t)| Ok((name.clone(), buffer(t.view().spec())?))).collect::<Result<Named<_>>>()?;
        for (name, tensor) in host.iter() {
            lane.upload(tensor.view().bytes(), inputs.get(name)?)?;
        }
        let outputs = outputs.try_map(|&spec| buffer(spec))?;
        for (_, output) in outputs.iter() {
            lane.poison(output)?;
        }
        let blocker = buffer(Spec::new(DType::F32, &[1 << 29])?)?;
        Ok(Bench { op: PhantomData, device, dims: [b, l, d, n], options, host, inputs, outputs, lane, blocker })
    }

    fn report(&self, shape: &str) -> Result<serde_json::Value> {
        let (kernel, least) = self.kernel_ms(None)?;
        let resident = self.resident_ms()?;
        let host = self.host_ms()?;
        let [b, l, d, n] = self.dims;
        let processors = self.device.facts().multiprocessors as f64;
        let exponentials = 1e3 * O::EXPONENTIALS * (b * l * d * n) as f64 / (processors * 16.0 * CLOCK);
        let tensors = self.inputs.iter().chain(self.outputs.iter());
        let bytes = 1e3 * tensors.map(|(_, t)| t.spec().bytes() as f64).sum::<f64>() / BANDWIDTH;
        let short = |v: f64| (v * 1e5).round() / 1e5;
        Ok(json!({
            "op": O::NAME, "shape": shape, "dtype": self.inputs.get("x")?.spec().dtype.name(),
            "kernel_ms": short(kernel), "kernel_least_ms": short(least),
            "resident_ms": short(resident), "host_ms": short(host),
            "upload_ms": short(self.upload_ms()?), "download_ms": short(self.download_ms()?),
            "of_exponentials": short(exponentials / kernel), "of_bandwidth": short(bytes / kernel),
        }))
    }

    fn call(&self, plan: Option<O::Plan>) -> Result<()> {
        let (problem, _) = op::check::<O>(&self.inputs.map(|b| b.spec()), &self.options)?;
        O::queue(self, &problem, plan)
    }

    /// Median and least device time of a launch. Launches are queued behind other work, so that the launch overhead on
    /// the host does not count.
    fn kernel_ms(&self, plan: Option<O::Plan>) -> Result<(f64, f64)> {
        self.call(plan)?;
        self.lane.synchronize()?;
        let mut times = Vec::new();
        for _ in 0..4 {
            self.lane.poison(&self.blocker)?;
            let mut marks = vec![self.lane.mark()?];
            for _ in 0..12 {
                self.call(plan)?;
                marks.push(self.lane.mark()?);
            }
            self.lane.synchronize()?;
            for pair in marks.windows(2).skip(2) {
                times.push(pair[1].milliseconds_since(&pair[0])? as f64);
            }
        }
        Ok(median_and_least(times))
    }

    fn resident_ms(&self) -> Result<f64> {
        let work = || self.call(None).and_then(|()| self.lane.synchronize());
        let times = (0..200).map(|_| timed(work)).collect::<Result<Vec<_>>>()?;
        Ok(median_and_least(times).0)
    }

    fn host_ms(&self) -> Result<f64> {
        let mut results: Vec<_> =
            self.outputs.iter().map(|(name, t)| (name.clone(), Owned::poisoned(t.spec()))).collect();
        let (views, call) = (self.host.map(Owned::view), ops::call::<O>(op::specs(&self.host), &self.options)?);
        let mut times = Vec::new();
        for _ in 0..12 {
            let outputs = results.iter_mut().map(|(name, t)| (name.clone(), t.view_mut())).collect();
            times.push(timed(|| op::run_host(&call, &views, outputs, &self.device.lane()?))?);
        }
        Ok(median_and_least(times.split_off(2)).0)
    }

    fn upload_ms(&self) -> Result<f64> {
        let pairs = self.host.iter().zip(self.inputs.iter());
        let copies: Vec<_> = pairs.map(|((_, from), (_, to))| (from.view().bytes(), to)).collect();
        let work = || self.lane.upload_all(&copies).and_then(|()| self.lane.synchronize());
        Ok(median_and_least((0..12).map(|_| timed(work)).collect::<Result<_>>()?).0)
    }

    fn download_ms(&self) -> Result<f64> {
        let mut results: Vec<_> = self.outputs.iter().map(|(_, t)| Owned::poisoned(t.spec())).collect();
        let mut times = Vec::new();
        for _ in 0..12 {
            let pairs = self.outputs.iter().zip(&mut results);
            let mut copies: Vec<_> = pairs.map(|((_, from), to)| (from, to.view_mut().bytes())).collect();
            times.push(timed(|| self.lane.download_all(&mut copies))?);
        }
        Ok(median_and_least(times).0)
    }

    fn sweep(&self, shape: &str) -> Result<()> {
        let mut lines = Vec::new();
        for plan in O::plans(self.dims) {
            lines.push((self.kernel_ms(Some(plan))?.0, plan));
        }
        lines.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (ms, plan) in lines {
            println!("sweep {shape} {ms:.5} {plan:?}");
        }
        Ok(())
    }
}

fn refs(buffers: &Named<Buffer>) -> Named<&Buffer> {
    buffers.iter().map(|(name, buffer)| (name.clone(), buffer)).collect()
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn median_and_least(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

fn noise(spec: Spec, from: f64, to: f64) -> Owned {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    Owned::from_fn(spec, |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        from + (to - from) * (state >> 11) as f64 / (1u64 << 53) as f64
    })
}
