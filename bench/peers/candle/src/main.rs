//! Times candle's ops on the CPU: `sidewinder_candle_peer NAME OP IN.safetensors --threads N --seconds S
//! [--out OUT.safetensors] [--copies N]`; of a model its folder is the input, and of quantized weights there are N copies
//! that take turns.
//!
//! It talks as worker.py does: one line of JSON when all is ready, then one after each line of its input.

mod mamba;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{D, Device, Error, Result, Tensor, safetensors};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::{Linear, Module, ops};
use serde_json::json;
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

type Tensors = HashMap<String, Tensor>;
type Call = Box<dyn Fn() -> Result<Tensor>>;

/// What to time, as a call without arguments, and how often its results are checked.
fn call(name: &str, op: &str, file: &Path, copies: usize) -> Result<(Call, usize)> {
    match op {
        "prefill" | "decode" => mamba::call(op, file),
        "matmul_q8_q8" => Ok((quantized(GgmlDType::Q8_0, &safetensors::load(file, &Device::Cpu)?, copies)?, 1)),
        "matmul_q8_q4" => Ok((quantized(GgmlDType::Q4_0, &safetensors::load(file, &Device::Cpu)?, copies)?, 1)),
        _ => Ok((call_of_op(name, op, &safetensors::load(file, &Device::Cpu)?)?, 1)),
    }
}

fn call_of_op(name: &str, op: &str, given: &Tensors) -> Result<Call> {
    let find = |name: &str| given.get(name).cloned().ok_or_else(|| Error::msg(format!("no `{name}`")));
    if op == "attention" {
        return attention(name, [find("q")?, find("k")?, find("v")?]);
    }
    let x = find("x")?;
    Ok(match op {
        "silu" => Box::new(move || x.silu()),
        "gelu_tanh" => Box::new(move || x.gelu()),
        "gelu_erf" => Box::new(move || x.gelu_erf()),
        "linear" => {
            let layer = Linear::new(find("w")?, None);
            Box::new(move || layer.forward(&x))
        }
        "rms_norm" => {
            let w = find("w")?;
            Box::new(move || ops::rms_norm(&x, &w, 1e-6))
        }
        "layer_norm" => {
            let (w, b) = (find("w")?, find("b")?);
            Box::new(move || ops::layer_norm(&x, &w, &b, 1e-5))
        }
        "layer_norm_gelu" => {
            let (w, b) = (find("w")?, find("b")?);
            Box::new(move || ops::layer_norm(&x, &w, &b, 1e-5)?.gelu())
        }
        _ => return Err(Error::msg(format!("no op `{op}`"))),
    })
}

/// A layer of weights whose bytes these are.
fn quantized(dtype: GgmlDType, given: &Tensors, copies: usize) -> Result<Call> {
    let find = |name: &str| given.get(name).cloned().ok_or_else(|| Error::msg(format!("no `{name}`")));
    let (x, w) = (find("x")?, find("w")?);
    let (outputs, bytes) = (w.dim(0)?, w.flatten_all()?.to_vec1::<u8>()?);
    let layer = || {
        let storage = QStorage::from_data(Cow::Borrowed(&bytes), &Device::Cpu, dtype)?;
        QMatMul::from_qtensor(QTensor::new(storage, (outputs, x.dim(D::Minus1)?))?)
    };
    let layers = (0..copies).map(|_| layer()).collect::<Result<Vec<_>>>()?;
    // At their first use they are put into another order.
    layers.iter().try_for_each(|layer| layer.forward(&x).map(drop))?;
    let turn = Cell::new(0);
    Ok(Box::new(move || {
        turn.set((turn.get() + 1) % layers.len());
        layers[turn.get()].forward(&x)
    }))
}

fn attention(name: &str, [q, k, v]: [Tensor; 3]) -> Result<Call> {
    let scale = 1.0 / (q.dim(D::Minus1)? as f64).sqrt();
    if name == "candle/flash" {
        // It takes (B, L, H, W), and gets it so, untimed.
        let turned = |t: Tensor| t.transpose(1, 2)?.contiguous();
        let (q, k, v) = (turned(q)?, turned(k)?, turned(v)?);
        return Ok(Box::new(move || flash_attn::<f32>(&q, &k, &v, scale as f32, AttnMask::causal(), None, None)));
    }
    let mask = causal_mask(q.dim(2)?)?;
    Ok(Box::new(move || {
        let scores = (&q * scale)?.matmul(&k.t()?)?.broadcast_add(&mask)?;
        ops::softmax_last_dim(&scores)?.matmul(&v)
    }))
}

/// (L, L): 0 where a query sees a key, else minus infinity.
fn causal_mask(length: usize) -> Result<Tensor> {
    let value = |i| if i % length <= i / length { 0.0 } else { f32::NEG_INFINITY };
    Tensor::from_vec((0..length * length).map(value).collect::<Vec<_>>(), (length, length), &Device::Cpu)
}

/// Sorted milliseconds of runs for that long, after one to warm up.
fn times(call: &Call, limit: Duration) -> Result<Vec<f64>> {
    call()?;
    let (mut times, begin) = (Vec::new(), Instant::now());
    while begin.elapsed() < limit || times.is_empty() {
        let start = Instant::now();
        drop(call()?);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, op, file, flags @ ..] = &words[..] else { return Err("usage: NAME OP IN.safetensors ...".into()) };
    let flag = |name: &str| flags.iter().position(|f| f == name).map(|at| flags[at + 1].as_str());
    let limit = Duration::from_secs_f64(flag("--seconds").unwrap_or("1").parse()?);
    let copies = flag("--copies").unwrap_or("1").parse()?;
    let (call, checked) = call(name, op, Path::new(file), copies)?;
    let ys = (0..checked).map(|_| call()).collect::<Result<Vec<_>>>()?;
    if let Some(out) = flag("--out") {
        Tensor::cat(&ys, 0)?.save_safetensors("y", out)?;
    }
    drop(ys);
    println!("{}", json!({"level": name}));
    for line in std::io::stdin().lines() {
        line?;
        let times = times(&call, limit)?;
        let median = times[times.len() / 2];
        println!("{}", json!({"level": name, "median_ms": median, "min_ms": times[0], "runs": times.len()}));
    }
    Ok(())
}
