//! Times packed calls beside calls of a batch with as many steps, in one process: one line of JSON for each op.
//!
//! `packed_time [NAME]` times the ops with NAME in their name, in bf16. Lengths of packed sequences are drawn from 16 to
//! 2048. Times are device time by events over several calls, the median and the least of ten rounds.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Random, packed};
use serde_json::{Value, json};
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, AnyOp, CU_SEQLENS, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Steps of all sequences, and those of a sequence of the batch.
const STEPS: usize = 16384;
const LENGTH: usize = 2048;
const SHORTEST: usize = 16;

/// An op, its options, and the shapes of its inputs and of the cotangent of `y`; `None` stands for batch and length.
type Case = (&'static str, Value, Vec<(&'static str, Vec<Option<usize>>)>);

/// `linear_attention`, with these decays for each head.
fn linear_attention(decays: &[usize]) -> Case {
    let rows = ["q", "k", "v", "dy"].map(|name| of_steps(name, &[16, 128]));
    ("linear_attention", json!({}), rows.into_iter().chain([of_steps("g", &[&[16], decays].concat())]).collect())
}

fn of_steps(name: &'static str, dims: &[usize]) -> (&'static str, Vec<Option<usize>>) {
    (name, [None, None].into_iter().chain(dims.iter().copied().map(Some)).collect())
}

fn cases() -> Vec<Case> {
    let shared = |name, dims: &[usize]| (name, dims.iter().copied().map(Some).collect());
    vec![
        (
            "ssd",
            json!({"dt_softplus": true}),
            vec![
                of_steps("x", &[24, 64]),
                of_steps("dt", &[24]),
                shared("A", &[24]),
                of_steps("B", &[1, 128]),
                of_steps("C", &[1, 128]),
                shared("D", &[24]),
                of_steps("dy", &[24, 64]),
            ],
        ),
        (
            "gated_delta_rule",
            json!({"qk_l2norm": true}),
            vec![
                of_steps("q", &[16, 128]),
                of_steps("k", &[16, 128]),
                of_steps("v", &[16, 128]),
                of_steps("beta", &[16]),
                of_steps("g", &[16]),
                of_steps("dy", &[16, 128]),
            ],
        ),
        linear_attention(&[]),
        linear_attention(&[128]),
        (
            "selective_scan",
            json!({"dt_softplus": true}),
            vec![
                of_steps("x", &[2048]),
                of_steps("dt", &[2048]),
                shared("A", &[2048, 16]),
                of_steps("B", &[1, 16]),
                of_steps("C", &[1, 16]),
                shared("D", &[2048]),
                of_steps("dy", &[2048]),
            ],
        ),
        (
            "attention",
            json!({"layout": "heads_last", "causal": true}),
            vec![
                of_steps("q", &[16, 128]),
                of_steps("k", &[16, 128]),
                of_steps("v", &[16, 128]),
                of_steps("y", &[16, 128]),
                ("lse", vec![None, Some(16), None]),
                of_steps("dy", &[16, 128]),
            ],
        ),
    ]
}

fn main() -> Result<()> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    common::tell_gpus()?;
    let device = Device::get(0)?;
    let lengths = lengths();
    println!("{}", json!({"lengths": lengths}));
    for case in cases().iter().filter(|(name, ..)| name.contains(&wanted)) {
        println!("{}", time(&device, case, &lengths)?);
    }
    Ok(())
}

/// The lengths of the packed sequences.
fn lengths() -> Vec<usize> {
    let (mut random, mut lengths, mut left) = (Random(1), vec![], STEPS);
    while left > 0 {
        let drawn = SHORTEST + (random.next() * (LENGTH - SHORTEST) as f64) as usize;
        lengths.push(drawn.min(left));
        left -= lengths[lengths.len() - 1];
    }
    lengths
}

fn time(device: &Device, (name, options, shapes): &Case, lengths: &[usize]) -> Result<Value> {
    let lane = device.lane()?;
    let backward = format!("{name}_backward");
    let decays = shapes.iter().find(|(name, _)| *name == "g").map(|(_, dims)| dims.len());
    let mut all = json!({"op": name, "options": options, "dtype": "bf16", "by_key": decays == Some(4)});
    for (form, [batch, length]) in [("batch", [STEPS / LENGTH, LENGTH]), ("packed", [1, STEPS])] {
        for op in [name, &*backward] {
            let op = ops::find(op)?;
            let mut inputs = filled(device, &lane, op, shapes, [batch, length])?;
            if form == "packed" {
                inputs.push(CU_SEQLENS, uploaded(device, &lane, &packed::ends(lengths))?);
            }
            let configured = common::configured(op, options.clone()).expect("options of the op");
            let call = configured(op::specs(&inputs))?;
            let outputs = call.outputs().try_map(|&spec| Buffer::new(device, spec))?;
            let queue = || call.cuda(&inputs.as_ref(), &outputs.as_ref(), &lane);
            let (ms, least_ms) = common::median_and_least(&lane, queue)?;
            all[form][op.about().name] = json!({"ms": ms, "least_ms": least_ms});
        }
    }
    let ms = |form: &str, op: &str| all[form][op]["ms"].as_f64().expect("a time");
    let both = |form| ms(form, name) + ms(form, &backward);
    let ratios = [ms("packed", name) / ms("batch", name), both("packed") / both("batch")];
    all["packed_over_batch"] = json!({"forward": ratios[0], "with_gradient": ratios[1]});
    Ok(all)
}

/// The inputs of an op among these shapes.
fn filled(
    device: &Device,
    lane: &Lane,
    op: &dyn AnyOp,
    shapes: &[(&'static str, Vec<Option<usize>>)],
    [batch, length]: [usize; 2],
) -> Result<Named<Buffer>> {
    let slot = |name: &str| op.about().inputs.iter().find(|slot| slot.name == name);
    let given = shapes.iter().filter_map(|(name, dims)| Some((*name, dims, slot(name)?)));
    given
        .map(|(name, dims, slot)| {
            let size = |(axis, dim): (usize, &Option<usize>)| dim.unwrap_or(if axis == 0 { batch } else { length });
            let dims: Vec<usize> = dims.iter().enumerate().map(size).collect();
            let spec = Spec::new(slot.precision.dtype(DType::Bf16), &dims)?;
            Ok((name, uploaded(device, lane, &Owned::from_fn(spec, |i| value(name, i)))?))
        })
        .collect()
}

/// Values between -1 and 1; decays and step sizes of states that stay small.
fn value(name: &str, i: usize) -> f64 {
    let value = (i * 7919 % 2048) as f64 / 1024.0 - 1.0;
    match name {
        "A" | "g" => -0.1 - 0.4 * value.abs(),
        "beta" => value.abs(),
        "lse" => 8.0,
        _ => value,
    }
}

fn uploaded(device: &Device, lane: &Lane, values: &Owned) -> Result<Buffer> {
    let buffer = Buffer::new(device, values.spec())?;
    lane.upload(values.view().bytes(), &buffer)?;
    Ok(buffer)
}
