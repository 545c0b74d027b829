//! Times ops on a CUDA device, with inputs and outputs resident there: one line of JSON for each.
//!
//! `cuda_op [NAME]` times the list below, or only its ops with NAME in their name. `ms` is the median device time by
//! events, `gb_s` the bytes of all inputs and outputs divided by it, `tflops` the multiplications and additions of
//! products divided by it. A product may take less time than the host needs to queue it: its `ms` is that of calls
//! replayed from a CUDA graph, and `queued_ms` that of calls queued one by one. The first lines describe the devices
//! and time plain copies in the same way.

#[path = "../tests/common/mod.rs"]
mod common;

use serde_json::{Value, json};
use sidewinder_kernels::base::elementwise::Map;
use sidewinder_kernels::cuda::{self, Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named};
use sidewinder_kernels::ops;
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// An op, its options and the shapes of its inputs.
type Case = (&'static str, Value, Vec<(&'static str, Vec<usize>)>);

const ROWS: usize = 8192;
const WIDTH: usize = 4096;

fn cases() -> Vec<Case> {
    let x = || ("x", vec![ROWS, WIDTH]);
    let [dy, z] = ["dy", "z"].map(|name| (name, vec![ROWS, WIDTH]));
    let [w, b] = ["w", "b"].map(|name| (name, vec![WIDTH]));
    let norm = |more: &[(&'static str, Vec<usize>)]| [&[x(), w.clone()], more].concat();
    let square = |name| (name, vec![4096, 4096]);
    let recurrence = |width: usize, more: &[&'static str]| {
        let sequence = |name| (name, vec![8, 2048, width]);
        let weights = [
            ("w_gate", vec![width, width]),
            ("b_gate", vec![width]),
            ("w_mix", vec![width, 2 * width]),
            ("b_mix", vec![width]),
        ];
        ["z", "gamma"].into_iter().map(sequence).chain(weights).chain(more.iter().copied().map(sequence)).collect()
    };
    let ternary = |rows: usize, width: usize| {
        vec![("x", vec![rows, width]), ("plane0", vec![width, width / 8]), ("plane1", vec![width, width / 8])]
    };
    let scan = |shape: [usize; 4]| ["gamma", "y", "dy"].map(|name| (name, shape.to_vec())).to_vec();
    // Rows of quantization blocks of 34 or 18 `bytes`. With 32768 outputs the weights do not fit in the cache.
    let blocks = |rows: usize, outputs: usize, bytes: usize| {
        vec![("x", vec![rows, 8192]), ("w", vec![outputs, 8192 / 32 * bytes])]
    };
    let dense = |rows: usize, outputs: usize| vec![("x", vec![rows, 8192]), ("w", vec![outputs, 8192])];
    vec![
        ("linear", json!({}), dense(1, 8192)),
        ("linear", json!({}), dense(1, 32768)),
        ("linear", json!({}), dense(32, 8192)),
        ("linear", json!({}), dense(32, 32768)),
        ("matmul_q8_q8", json!({}), blocks(1, 8192, 34)),
        ("matmul_q8_q8", json!({}), blocks(1, 32768, 34)),
        ("matmul_q8_q8", json!({}), blocks(4, 8192, 34)),
        ("matmul_q8_q8", json!({}), blocks(32, 8192, 34)),
        ("matmul_q8_q8", json!({}), blocks(32, 32768, 34)),
        ("matmul_q8_q4", json!({}), blocks(1, 8192, 18)),
        ("matmul_q8_q4", json!({}), blocks(1, 32768, 18)),
        ("matmul_q8_q4", json!({}), blocks(4, 8192, 18)),
        ("matmul_q8_q4", json!({}), blocks(32, 8192, 18)),
        ("matmul_q8_q4", json!({}), blocks(32, 32768, 18)),
        ("matmul_f32_q8", json!({}), blocks(1, 8192, 34)),
        ("matmul_f32_q4", json!({}), blocks(1, 8192, 18)),
        ("quantize", json!({"format": "q8_0", "unchecked": true}), vec![x()]),
        ("quantize", json!({"format": "q4_0", "unchecked": true}), vec![x()]),
        ("dequantize", json!({"format": "q4_0"}), vec![("q", vec![ROWS, WIDTH / 32 * 18])]),
        ("activations", json!({"fn": "silu"}), vec![x()]),
        ("activations", json!({"fn": "gelu_tanh"}), vec![x()]),
        ("activations", json!({"fn": "gelu_erf"}), vec![x()]),
        ("activations_backward", json!({"fn": "silu"}), vec![x(), dy.clone()]),
        ("rms_norm", json!({}), norm(&[])),
        ("rms_norm_backward", json!({}), norm(std::slice::from_ref(&dy))),
        ("gated_rms_norm", json!({}), norm(std::slice::from_ref(&z))),
        ("gated_rms_norm_backward", json!({}), norm(&[z, dy.clone()])),
        ("layer_norm", json!({}), norm(std::slice::from_ref(&b))),
        ("layer_norm_backward", json!({}), norm(&[b.clone(), dy.clone()])),
        ("layer_norm_gelu", json!({}), norm(std::slice::from_ref(&b))),
        ("layer_norm_gelu_backward", json!({}), norm(&[b.clone(), dy])),
        ("rope", json!({}), vec![("x", vec![4, 32, 4096, 128])]),
        ("sinusoidal_positions", json!({}), vec![("x", vec![4, 2048, WIDTH])]),
        ("cumprod_scan", json!({}), vec![("gamma", vec![8, 16, 2048, 64])]),
        ("cumprod_scan", json!({}), vec![("gamma", vec![1, 8, 32768, 128])]),
        ("cumprod_scan_backward", json!({}), scan([8, 16, 2048, 64])),
        ("cumprod_scan_backward", json!({}), scan([1, 8, 32768, 128])),
        ("exp_product_scan", json!({}), vec![("gamma", vec![8, 16, 2048, 64])]),
        ("logcumsumexp", json!({}), vec![("x", vec![8, 16, 2048, 64])]),
        ("block_recurrence", json!({}), recurrence(512, &[])),
        ("block_recurrence", json!({}), recurrence(2048, &[])),
        ("block_recurrence_backward", json!({}), recurrence(512, &["h", "dh"])),
        ("block_recurrence_backward", json!({}), recurrence(2048, &["h", "dh"])),
        ("matmul_i8_ternary", json!({}), ternary(1, 8192)),
        ("matmul_i8_ternary", json!({}), ternary(32, 8192)),
        ("matmul_ternary", json!({}), ternary(1, 8192)),
        ("matmul_ternary", json!({}), ternary(32, 8192)),
        ("matmul_f32_ternary", json!({}), ternary(1, 8192)),
        ("matmul", json!({}), vec![square("a"), square("b")]),
        ("linear", json!({}), vec![square("x"), square("w")]),
        ("linear", json!({"activation": "gelu"}), vec![square("x"), square("w"), ("b", vec![4096])]),
    ]
}

fn main() -> Result<()> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    common::tell_gpus()?;
    let device = Device::get(0)?;
    for dtype in [DType::F32, DType::Bf16] {
        println!("{}", copy(&device, dtype)?);
    }
    for (name, options, shapes) in cases().iter().filter(|(name, ..)| name.contains(&wanted)) {
        for dtype in [DType::F32, DType::Bf16] {
            println!("{}", time(name, &device, options, shapes, dtype)?);
        }
    }
    Ok(())
}

/// Times a plain copy: [`Map::Sum`] of a single tensor.
fn copy(device: &Device, dtype: DType) -> Result<Value> {
    let (lane, spec) = (device.lane()?, Spec::new(dtype, &[ROWS, WIDTH])?);
    let (from, to) = (filled("x", device, &lane, spec)?, Buffer::new(device, spec)?);
    let (ms, least_ms) = common::median_and_least(&lane, || cuda::map(Map::Sum, &[&from], &to, &lane))?;
    Ok(json!({"op": "copy", "dtype": dtype.name(), "ms": ms, "least_ms": least_ms,
        "gb_s": 2.0 * spec.bytes() as f64 / ms / 1e6}))
}

fn time(
    name: &str,
    device: &Device,
    options: &Value,
    shapes: &[(&'static str, Vec<usize>)],
    dtype: DType,
) -> Result<Value> {
    let op = ops::find(name)?;
    let configured = common::configured(op, options.clone()).expect("options of the op");
    let spec = |name: &str, dims: &[usize]| {
        let slot = op.about().inputs.iter().find(|slot| slot.name == name).expect("an input of the op");
        Spec::new(slot.precision.dtype(dtype), dims)
    };
    let lane = device.lane()?;
    let named = shapes.iter().map(|(name, dims)| Ok((*name, filled(name, device, &lane, spec(name, dims)?)?)));
    let inputs: Named<Buffer> = named.collect::<Result<_>>()?;
    let call = configured(op::specs(&inputs))?;
    let outputs = call.outputs().try_map(|&spec| Buffer::new(device, spec))?;
    let bytes: usize = inputs.iter().chain(outputs.iter()).map(|(_, buffer)| buffer.spec().bytes()).sum();
    let queue = || call.cuda(&inputs.as_ref(), &outputs.as_ref(), &lane);
    let (ms, least_ms) = common::median_and_least(&lane, queue)?;
    let dims: Vec<_> = shapes.iter().map(|(_, dims)| dims).collect();
    let product = name.starts_with("matmul") || name == "linear";
    let (queued_ms, (ms, least_ms)) =
        if product { (Some(ms), common::recorded(&lane, queue)?) } else { (None, (ms, least_ms)) };
    // Each result is a dot product over the last axis of the first factor.
    let results: usize = outputs.iter().map(|(_, buffer)| buffer.spec().shape.elements()).sum();
    let products = (results * shapes[0].1.last().copied().unwrap_or(0)) as f64;
    Ok(json!({"op": name, "options": options, "dtype": dtype.name(), "shapes": dims, "ms": ms, "least_ms": least_ms,
        "queued_ms": queued_ms, "gb_s": bytes as f64 / ms / 1e6, "tflops": product.then_some(2.0 * products / ms / 1e9)}))
}

/// Values between -1 and 1; decays just below 1, so that their products do not underflow.
fn filled(name: &str, device: &Device, lane: &Lane, spec: Spec) -> Result<Buffer> {
    let value = |i: usize| (i % 2048) as f64 / 1024.0 - 1.0;
    let decay = |i: usize| 1.0 - (i % 2048) as f64 / 2e7;
    let values = Owned::from_fn(spec, |i| if name == "gamma" { decay(i) } else { value(i) });
    let buffer = Buffer::new(device, spec)?;
    lane.upload(values.view().bytes(), &buffer)?;
    Ok(buffer)
}
