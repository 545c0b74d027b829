//! Times recurrences and their gradients over one sequence of 2^20 steps on one GPU, and in parts on all of the machine's:
//! one line of JSON for each op.
//!
//! `parts_time [NAME]` times the ops with NAME in their name, in bf16. Times are the host's, from the call until all results
//! are there, the median and the least of seven calls after two. Errors are those of the last state in parts, and of the
//! cotangent of the first one, against those on one GPU, relative to the largest value.

#[path = "../tests/common/mod.rs"]
mod common;

use common::check::noise;
use serde_json::{Value, json};
use sidewinder_kernels::cuda::{self, Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, AnyOp, Configured, Named, Parts, lanes_of_parts};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use std::time::Instant;

const STEPS: usize = 1 << 20;
/// Steps of the noise that all steps repeat.
const PERIOD: usize = 1 << 13;

/// An op, its options, and the shapes of its inputs after batch and length; the last of them has neither.
type Case = (&'static str, Value, Vec<(&'static str, Vec<usize>)>, (&'static str, Vec<usize>));

fn cases() -> Vec<Case> {
    let rows = |dims: &[usize]| ["q", "k", "v"].map(|name| (name, dims.to_vec())).to_vec();
    let scan = vec![("x", vec![1536]), ("dt", vec![1536]), ("B", vec![16]), ("C", vec![16])];
    let ssd = vec![("x", vec![24, 64]), ("dt", vec![24]), ("B", vec![1, 128]), ("C", vec![1, 128])];
    let state = ("initial_state", vec![1, 16, 128, 128]);
    vec![
        ("selective_scan", json!({"dt_softplus": true}), scan, ("A", vec![1536, 16])),
        ("ssd", json!({"dt_softplus": true}), ssd, ("A", vec![24])),
        ("linear_attention", json!({}), [rows(&[16, 128]), vec![("g", vec![16])]].concat(), state.clone()),
        (
            "gated_delta_rule",
            json!({"qk_l2norm": true}),
            [rows(&[16, 128]), vec![("g", vec![16]), ("beta", vec![16])]].concat(),
            state,
        ),
    ]
}

/// Decays and step sizes with which a state remembers some hundred steps.
fn filled(name: &str, dims: &[usize]) -> Owned {
    let [low, high] = match name {
        "g" => [-0.05, 0.0],
        "A" => [-0.2, -0.01],
        "dt" => [-4.0, 0.0],
        "beta" => [0.0, 1.0],
        _ => [-0.5, 0.5],
    };
    noise(name.bytes().map(u64::from).sum(), dims, low, high)
}

/// A tensor whose steps repeat some noise, on the lane's device.
fn repeated(name: &str, dims: &[usize], dtype: DType, steps: usize, lane: &Lane) -> Result<Buffer> {
    let noise = filled(name, &[&[PERIOD], dims].concat()).cast(dtype);
    let all = Buffer::new(lane.device(), Spec::new(dtype, &[&[1, steps], dims].concat())?)?;
    let rows = all.reshape(&[&[steps], dims].concat())?;
    lane.upload(noise.view().bytes(), &rows.rows(0..PERIOD)?)?;
    for at in (PERIOD..steps).step_by(PERIOD) {
        lane.copy(&rows.rows(0..PERIOD)?, &rows.rows(at..at + PERIOD)?)?;
    }
    Ok(all)
}

/// The inputs of a part of some steps: the op's, or those of its gradient with a cotangent of `y`.
fn inputs(op: &dyn AnyOp, case: &Case, at: usize, steps: usize, lane: &Lane) -> Result<Named<Buffer>> {
    let (_, _, shapes, (weight, dims)) = case;
    let storage = |name: &str| {
        let slot = op.about().inputs.iter().find(|slot| slot.name == name);
        slot.map(|slot| slot.precision.dtype(DType::Bf16))
    };
    let dy = [("dy", shapes[if shapes[0].0 == "q" { 2 } else { 0 }].1.clone())];
    let mut all = Named::default();
    for (name, dims) in shapes.iter().chain(&dy) {
        if let Some(dtype) = storage(name) {
            all.push(*name, repeated(name, dims, dtype, steps, lane)?);
        }
    }
    if *weight != "initial_state" || at == 0 {
        let own = filled(weight, dims);
        let buffer = Buffer::new(lane.device(), own.spec())?;
        lane.upload(own.view().bytes(), &buffer)?;
        all.push(*weight, buffer);
    }
    lane.synchronize()?;
    Ok(all)
}

/// Milliseconds of the host, the median and the least of seven calls after two.
fn times(mut call: impl FnMut() -> Result<()>) -> Result<Value> {
    let mut all = (0..9)
        .map(|_| {
            let begin = Instant::now();
            call().map(|()| begin.elapsed().as_secs_f64() * 1e3)
        })
        .collect::<Result<Vec<_>>>()?;
    let timed = &mut all[2..];
    timed.sort_by(f64::total_cmp);
    Ok(json!({"ms": timed[3], "least_ms": timed[0]}))
}

fn on_one(configured: &Configured, inputs: &Named<Buffer>, lane: &Lane) -> Result<(Named<Buffer>, Value)> {
    let call = configured(op::specs(inputs))?;
    let outputs = call.outputs().try_map(|spec| Buffer::new(lane.device(), *spec))?;
    let told = times(|| call.cuda(&inputs.as_ref(), &outputs.as_ref(), lane).and_then(|()| lane.synchronize()))?;
    Ok((outputs, told))
}

fn in_parts(
    op: &dyn AnyOp,
    configured: &Configured,
    inputs: &[Named<Buffer>],
    gpus: &[Device],
) -> Result<(Vec<Named<Buffer>>, Value)> {
    let specs: Vec<_> = inputs.iter().map(op::specs).collect();
    let parts = Parts::new(op.about(), configured, &specs)?;
    let new = |(part, gpu): (&Named<Spec>, &Device)| part.try_map(|spec| Buffer::new(gpu, *spec));
    let outputs: Vec<_> = parts.outputs()?.iter().zip(gpus).map(new).collect::<Result<_>>()?;
    let given: Vec<_> = inputs.iter().map(Named::as_ref).collect();
    let told = times(|| parts.cuda(&given, &outputs, &lanes_of_parts(gpus.iter())?))?;
    Ok((outputs, told))
}

/// The largest difference of two states, relative to the largest value.
fn difference(got: &Buffer, expected: &Buffer) -> Result<f64> {
    let [got, expected] = [got, expected].map(|state| state.device().lane()?.downloaded(state));
    let (got, expected) = (got?, expected?);
    let largest = expected.view().to_f64().fold(0.0f64, |most, value| most.max(value.abs()));
    Ok(common::worst(&got, &expected, 0.0, largest))
}

fn main() -> Result<()> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    common::tell_gpus()?;
    let gpus: Vec<_> = (0..cuda::devices()?.len()).map(Device::get).collect::<Result<_>>()?;
    // On a single GPU both parts lie there: that tells what cutting costs.
    let gpus = if gpus.len() == 1 { vec![gpus[0].clone(); 2] } else { gpus };
    let lanes: Vec<_> = gpus.iter().map(Device::lane).collect::<Result<_>>()?;
    let steps = STEPS / gpus.len();
    for case in cases().iter().filter(|(name, ..)| name.contains(&wanted)) {
        let mut line = json!({"op": case.0, "dtype": "bf16", "steps": STEPS, "parts": gpus.len(), "options": case.1});
        let mut options = case.1.clone();
        options["return_state"] = json!(true);
        let mut states: Vec<Option<Buffer>> = vec![None; gpus.len()];
        for (name, state) in [(case.0.to_string(), "last_state"), (format!("{}_backward", case.0), "dinitial_state")] {
            let op = ops::find(&name)?;
            let configured = common::configured(op, options.clone()).expect("options of the op");
            let (one, alone) = on_one(&configured, &inputs(op, case, 0, STEPS, &lanes[0])?, &lanes[0])?;
            let of_part = |at: usize| {
                let mut all = inputs(op, case, at, steps, &lanes[at])?;
                all.extend_with("initial_state", states[at].clone());
                Ok(all)
            };
            let given: Vec<_> = (0..gpus.len()).map(of_part).collect::<Result<_>>()?;
            let (several, together) = in_parts(op, &configured, &given, &gpus)?;
            let end = if state == "last_state" { gpus.len() - 1 } else { 0 };
            let pair = several[end].find(state).zip(one.find(state));
            line[&name] = json!({
                "one": alone,
                "parts": together,
                "times_faster": alone["ms"].as_f64().unwrap_or(0.0) / together["ms"].as_f64().unwrap_or(1.0),
                "error": pair.map(|(got, expected)| difference(got, expected)).transpose()?,
            });
            states = several.iter().map(|part| part.find("initial_state").cloned()).collect();
        }
        println!("{line}");
    }
    Ok(())
}
