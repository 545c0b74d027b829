//! Times attention and its gradient on a CUDA device: one line of JSON per op, shape and type.
//!
//! `attention_time [SHAPE...]` with shapes such as `4x16x4096x64` (batch, heads, length, width),
//! `4x16/2x4096x64` where heads share keys, or `1x32/8x1:32768x128` where queries are fewer than keys, as in
//! decoding, which has no gradient. `TYPES=bf16,f32` chooses types, `CAUSAL=0` or `1` the calls.
//! Times are those of the device, by events, where queries are fewer than keys from a CUDA graph of 50 calls, with
//! `queued_ms` for calls that the host queues; `tflops` counts 4 B H L M W operations forward, 2.5 times as
//! many backward, and half of them where calls are causal; `gb_s` counts every tensor once.

#[path = "../tests/common/mod.rs"]
mod common;

use serde_json::json;
use sidewinder_kernels::cuda::{Buffer, Device, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::attention::{Attention, AttentionBackward, Options};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

const SHAPES: [&str; 6] =
    ["4x16x4096x64", "2x32x8192x128", "1x16x1:2048x64", "1x32x1:4096x128", "1x32/8x1:32768x128", "8x32/8x1:8192x128"];

fn main() -> Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let shapes = if asked.is_empty() { SHAPES.map(String::from).to_vec() } else { asked };
    let types = std::env::var("TYPES").unwrap_or("bf16,f16,f32".into());
    let wanted = std::env::var("CAUSAL").unwrap_or("01".into());
    common::tell_gpus()?;
    let device = Device::get(0)?;
    for shape in &shapes {
        for name in types.split(',') {
            let dtype = DType::from_name(name).expect("a type");
            for causal in [false, true].into_iter().filter(|&causal| wanted.contains(if causal { '1' } else { '0' })) {
                Bench::new(&device, shape, dtype, causal)?.report(shape, causal)?;
            }
        }
    }
    Ok(())
}

/// The buffers of one call and its gradient.
struct Bench {
    options: Options,
    tensors: Named<Buffer>,
    gradients: Named<Buffer>,
    lane: Lane,
    operations: f64,
}

impl Bench {
    fn new(device: &Device, shape: &str, dtype: DType, causal: bool) -> Result<Bench> {
        let parts: Vec<&str> = shape.split('x').collect();
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let (heads, key_heads) = parts[1].split_once('/').unwrap_or((parts[1], parts[1]));
        let (queries, keys) = parts[2].split_once(':').unwrap_or((parts[2], parts[2]));
        let [b, h, k, l, m, w] = [parts[0], heads, key_heads, queries, keys, parts[3]].map(number);
        let options = Options { causal, ..Options::default() };
        let lane = device.lane()?;
        let mut tensors = Named::default();
        for (name, heads, rows, seed) in [("q", h, l, 1), ("k", k, m, 2), ("v", k, m, 3), ("dy", h, l, 4)] {
            let tensor = noise(Spec::new(dtype, &[b, heads, rows, w])?, seed);
            let buffer = Buffer::new(device, tensor.spec())?;
            lane.upload(tensor.view().bytes(), &buffer)?;
            tensors.push(name, buffer);
        }
        tensors.push("y", Buffer::new(device, Spec::new(dtype, &[b, h, l, w])?)?);
        tensors.push("lse", Buffer::new(device, Spec::new(dtype.wide(), &[b, h, l])?)?);
        let gradient = |name: &str| Buffer::new(device, tensors.get(name)?.spec());
        let gradients = [("dq", gradient("q")?), ("dk", gradient("k")?), ("dv", gradient("v")?)];
        let operations = 4.0 * (b * h * l * m * w) as f64 * if causal && l == m { 0.5 } else { 1.0 };
        Ok(Bench { options, tensors, gradients: gradients.into_iter().collect(), lane, operations })
    }

    fn some(&self, names: &[&'static str]) -> Result<Named<&Buffer>> {
        names.iter().map(|&name| Ok((name, self.tensors.get(name)?))).collect()
    }

    fn report(&self, shape: &str, causal: bool) -> Result<()> {
        let (inputs, outputs) = (self.some(&["q", "k", "v"])?, self.some(&["y", "lse"])?);
        self.time::<Attention>(shape, causal, &inputs, &outputs, self.operations)?;
        if shape.contains(':') {
            return Ok(());
        }
        let given = self.some(&["q", "k", "v", "y", "lse", "dy"])?;
        self.time::<AttentionBackward>(shape, causal, &given, &self.gradients.as_ref(), 2.5 * self.operations)
    }

    fn time<O: Op<Options = Options>>(
        &self,
        shape: &str,
        causal: bool,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        operations: f64,
    ) -> Result<()> {
        let call = || op::run_cuda::<O>(&self.options, inputs, outputs, &self.lane);
        let queued = common::median_and_least(&self.lane, call)?;
        // The host needs longer to queue a short call than the device for its work.
        let (median, least) = if shape.contains(':') { common::recorded(&self.lane, call)? } else { queued };
        let dtype = inputs.get("q")?.spec().dtype.name();
        let tflops = (operations / median / 1e7).round() / 1e2;
        let bytes: usize = inputs.iter().chain(outputs.iter()).map(|(_, buffer)| buffer.spec().bytes()).sum();
        let gb_s = (bytes as f64 / median / 1e6).round();
        println!(
            "{}",
            json!({"op": O::NAME, "shape": shape, "dtype": dtype, "causal": causal, "ms": median, "least_ms": least, "queued_ms": queued.0,
                "tflops": tflops, "gb_s": gb_s})
        );
        Ok(())
    }
}

/// Pseudorandom numbers, approximately normal.
fn noise(spec: Spec, seed: u64) -> Owned {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    Owned::from_fn(spec, |_| 2.0 * (next() + next() + next()))
}
