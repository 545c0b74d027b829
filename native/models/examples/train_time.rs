//! Times training steps of a Mamba language model of random weights on one GPU, and on all of the machine's, with the same
//! batch: one line of JSON for each number of GPUs, with the losses of its steps.
//!
//! ```text
//! cargo run --release -p sidewinder_models --example train_time -- [BATCH] [LENGTH] [mamba|mamba2]
//! ```
//!
//! The sizes are those of mamba-130m or mamba2-130m. Times are the host's, the median and the least of ten steps.

#[path = "../../kernels/tests/common/mod.rs"]
mod common;
#[path = "../tests/common/models.rs"]
mod models;

use serde_json::json;
use sidewinder_kernels::cuda::{self, Device};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::DType;
use sidewinder_models::mamba::train::{AdamW, Trainer};
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Mixer, Model, Where};
use std::time::Instant;

fn main() -> Result<()> {
    let argument = |at: usize, default: &str| std::env::args().nth(at).unwrap_or(default.to_string());
    let number = |at: usize, default: &str| argument(at, default).parse::<usize>().expect("a number");
    let (batch, length, kind) = (number(1, "16"), number(2, "1025"), argument(3, "mamba"));
    common::tell_gpus()?;
    let config = sizes(&kind);
    let checkpoint = Checkpoint::new("random", Some(config), models::tensors(&config, false));
    let gpus: Vec<_> = (0..cuda::devices()?.len()).map(Device::get).collect::<Result<_>>()?;
    let places: Vec<_> = gpus.into_iter().map(|device| Where::Cuda(device, true)).collect();
    let model = Model::new(checkpoint, Some(DType::F32), false, places[0].clone())?;
    let tokens: Vec<u32> =
        (0..batch * length).map(|i| (i * i / 7 + 13 * i) as u32 % config.vocabulary as u32).collect();
    for count in [1, places.len()] {
        let mut trainer = Trainer::on(&model, &places[..count])?;
        let how = AdamW { learning_rate: 1e-4, ..AdamW::default() };
        let (mut times, mut losses) = (vec![], vec![]);
        for _ in 0..12 {
            let begin = Instant::now();
            losses.push(trainer.step(&tokens, batch, &how)?.loss);
            times.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        let mut timed = times[2..].to_vec();
        timed.sort_by(f64::total_cmp);
        let (ms, least) = (timed[timed.len() / 2], timed[0]);
        println!(
            "{}",
            json!({"gpus": count, "model": kind, "batch": batch, "length": length, "allow_tf32": true, "ms": ms,
                "least_ms": least, "tokens_per_second": (batch * length) as f64 / ms * 1e3, "losses": losses})
        );
    }
    Ok(())
}

fn sizes(kind: &str) -> Config {
    let config = Config {
        width: 768,
        layers: 24,
        vocabulary: 50280,
        inner: 1536,
        state: 16,
        rank: 48,
        conv: 4,
        eps: 1e-5,
        mixer: Mixer::Mamba,
    };
    match kind {
        "mamba" => config,
        "mamba2" => {
            let heads = Heads { count: 24, groups: 1, limit: (0.0, f64::INFINITY) };
            Config { state: 128, rank: 0, mixer: Mixer::Mamba2(heads), ..config }
        }
        other => panic!("mamba or mamba2, not {other}"),
    }
}
