//! Times a Mamba language model of random weights: the prefill of a prompt, and decode steps of batched sessions.
//!
//! ```text
//! cargo run --release -p sidewinder_models --example mamba_time -- [cpu|cuda] [TYPE] [THREADS]
//! ```
//!
//! The sizes are those of mamba-130m, or of the environment: `MODEL` (`mamba`, `falcon_mamba` or `mamba2`), `LAYERS`,
//! `WIDTH`, `VOCABULARY`, `GROUPS` (of Mamba-2), `PROMPT` (length), `STEPS` (timed steps) and `BATCHES` (numbers of
//! sessions stepped at once, such as `1,8`). `QUANTIZE` makes matrices `q8_0`, `q4_0` or `ternary`. Prints a line of JSON
//! for each time, in milliseconds.

use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::products::matrices::Quantization;
use sidewinder_kernels::tensor::{DType, Owned, Spec};
use sidewinder_models::mamba::sample::Sampling;
use sidewinder_models::mamba::{Checkpoint, Config, Heads, Input, Mixer, Model, Session, Weight, Where};
use std::sync::Arc;
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize, default: &str| arguments.get(at).cloned().unwrap_or(default.to_string());
    let dtype = DType::from_name(&argument(1, "f32")).expect("a type");
    let threads = argument(2, "2").parse().expect("a number of threads");
    let place = match argument(0, "cpu").as_str() {
        "cuda" => Where::Cuda(Device::get(0)?, false),
        _ => Where::Cpu(Exec { threads, ..Exec::default() }),
    };
    let level = format!("{:?}", Exec::default().level);
    let start = Instant::now();
    let config = sizes();
    let checkpoint = Checkpoint::new("random", Some(config), random(&config, dtype)?);
    let how = std::env::var("QUANTIZE").ok().map(|name| Quantization::from_name(&name).expect("a format"));
    let model = Arc::new(match how {
        Some(how) => Model::quantized(checkpoint, Some(dtype), false, how, place)?,
        None => Model::new(checkpoint, Some(dtype), false, place)?,
    });
    // Not reported for a quantized model, because only its large matrices are smaller.
    let bytes = how.is_none().then(|| parameters(&config) * dtype.size());
    let about = |what: &str, size: usize, times: &mut [f64]| {
        times.sort_by(f64::total_cmp);
        let (median, least) = (times[times.len() / 2], times[0]);
        println!(
            "{}",
            serde_json::json!({"what": what, "size": size, "median_ms": median, "min_ms": least, "runs": times.len(),
                "model": config.mixer.name(), "dtype": dtype.name(), "quantized": how.map(Quantization::name), "threads": threads, "level": level,
                "weights_mb": bytes.map(|bytes| bytes / 1_000_000), "gb_per_s": bytes.map(|bytes| bytes as f64 / median / 1e6)})
        );
    };
    println!("# made in {:.1} s", start.elapsed().as_secs_f64());
    prompts(&model, &config, about)?;
    for batch in environment("BATCHES", "1,2,8").split(',') {
        steps(&model, batch.parse().expect("a number"), about)?;
    }
    Ok(())
}

fn environment(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or(default.to_string())
}

fn number(name: &str, default: &str) -> usize {
    environment(name, default).parse().expect("a number")
}

fn sizes() -> Config {
    let width = number("WIDTH", "768");
    let inner = 2 * width;
    let (state, rank, mixer) = match environment("MODEL", "mamba").as_str() {
        "mamba" => (16, width.div_ceil(16), Mixer::Mamba),
        "falcon_mamba" => (16, width.div_ceil(16), Mixer::FalconMamba(1e-6)),
        "mamba2" => {
            let (count, groups) = (inner / 64, number("GROUPS", "1"));
            (128, 0, Mixer::Mamba2(Heads { count, groups, limit: (0.0, f64::INFINITY) }))
        }
        other => panic!("MODEL is mamba, falcon_mamba or mamba2, not {other}"),
    };
    let (layers, vocabulary) = (number("LAYERS", "24"), number("VOCABULARY", "50280"));
    Config { width, layers, vocabulary, inner, state, rank, conv: 4, eps: 1e-5, mixer }
}

/// A tensor of a layer: its name, its shape, whether it is a matrix of the model's type, and the range of its values.
type Tensor = (&'static str, Vec<usize>, bool, [f64; 2]);

/// The tensors of a layer, without biases of projections.
fn tensors(config: &Config) -> Vec<Tensor> {
    let Config { width, inner, state, rank, conv, mixer, .. } = *config;
    let (small, large) = (1.0 / (width as f64).sqrt(), 1.0 / (inner as f64).sqrt());
    let (heads, channels) = match mixer {
        Mixer::Mamba2(Heads { count, groups, .. }) => (count, inner + 2 * groups * state),
        _ => (0, inner),
    };
    let mut all: Vec<Tensor> = vec![
        ("norm.weight", vec![width], false, [0.9, 1.1]),
        ("mixer.in_proj.weight", vec![inner + channels + heads, width], true, [-small, small]),
        ("mixer.conv1d.weight", vec![channels, 1, conv], false, [-0.5, 0.5]),
        ("mixer.conv1d.bias", vec![channels], false, [-0.1, 0.1]),
        ("mixer.out_proj.weight", vec![width, inner], true, [-large, large]),
    ];
    all.extend(match mixer {
        Mixer::Mamba2(_) => vec![
            ("mixer.dt_bias", vec![heads], false, [-6.0, -2.0]),
            ("mixer.A_log", vec![heads], false, [0.0, 2.7]),
            ("mixer.D", vec![heads], false, [0.9, 1.1]),
            ("mixer.norm.weight", vec![inner], false, [0.9, 1.1]),
        ],
        _ => vec![
            ("mixer.x_proj.weight", vec![rank + 2 * state, inner], true, [-large, large]),
            ("mixer.dt_proj.weight", vec![inner, rank], true, [-0.1, 0.1]),
            ("mixer.dt_proj.bias", vec![inner], false, [-6.0, -2.0]),
            ("mixer.A_log", vec![inner, state], false, [0.0, 2.7]),
            ("mixer.D", vec![inner], false, [0.9, 1.1]),
        ],
    });
    all
}

/// The number of weights that a decode step reads.
fn parameters(config: &Config) -> usize {
    let layer: usize = tensors(config).iter().map(|(_, dims, ..)| dims.iter().product::<usize>()).sum();
    config.layers * layer + config.vocabulary * config.width
}

fn random(config: &Config, dtype: DType) -> Result<Vec<(String, Weight)>> {
    let Config { width, layers, vocabulary, .. } = *config;
    let mut seed = 1u64;
    let mut tensor = |name: String, dims: &[usize], matrix: bool, [low, high]: [f64; 2]| -> Result<(String, Weight)> {
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            low + (high - low) * ((seed >> 11) as f64 / (1u64 << 53) as f64)
        };
        let dtype = if matrix { dtype } else { DType::F32 };
        Ok((name, Owned::from_fn(Spec::new(dtype, dims)?, |_| next()).into()))
    };
    let mut all = Vec::new();
    all.push(tensor("backbone.embeddings.weight".into(), &[vocabulary, width], true, [-0.02, 0.02])?);
    all.push(tensor("backbone.norm_f.weight".into(), &[width], false, [0.9, 1.1])?);
    for layer in 0..layers {
        for (name, dims, matrix, range) in tensors(config) {
            all.push(tensor(format!("backbone.layers.{layer}.{name}"), &dims, matrix, range)?);
        }
    }
    Ok(all)
}

fn milliseconds(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Times the prefill of a prompt in one session, with the last logits.
fn prompts(model: &Arc<Model>, config: &Config, about: impl Fn(&str, usize, &mut [f64])) -> Result<()> {
    let length = number("PROMPT", "512");
    let tokens: Vec<u32> = (0..length).map(|i| (i * 7919 % config.vocabulary) as u32).collect();
    let mut logits = Owned::poisoned(model.output(&[1])?);
    let mut session = Session::new(model)?;
    let mut once = || milliseconds(|| session.prefill(Input::Tokens(&tokens), Some(logits.view_mut())));
    let mut times = (0..6).map(|_| once()).collect::<Result<Vec<_>>>()?.split_off(1);
    about("prefill", length, &mut times);
    Ok(())
}

/// Times decode steps of `batch` sessions at once, without and with sampling.
fn steps(model: &Arc<Model>, batch: usize, about: impl Fn(&str, usize, &mut [f64])) -> Result<()> {
    let mut sessions = (0..batch).map(|_| Session::new(model)).collect::<Result<Vec<_>>>()?;
    let mut sessions: Vec<&mut Session> = sessions.iter_mut().collect();
    let tokens: Vec<u32> = (0..batch as u32).collect();
    let mut logits = Owned::poisoned(model.output(&[batch])?);
    let mut once = || milliseconds(|| Session::step(&mut sessions, Input::Tokens(&tokens), logits.view_mut()));
    let runs = number("STEPS", "60");
    let mut times = (0..runs + 5).map(|_| once()).collect::<Result<Vec<_>>>()?.split_off(5);
    about("step", batch, &mut times);
    for (what, sampling) in [
        ("next, greedy", Sampling { temperature: 0.0, ..Default::default() }),
        ("next, drawn", Sampling::default()),
        ("next, top_k 50", Sampling { top_k: Some(50), ..Default::default() }),
        ("next, top_p 0.9", Sampling { top_p: Some(0.9), ..Default::default() }),
    ] {
        let choices: Vec<_> = (0..batch as u64).map(|draw| (sampling, draw)).collect();
        let mut once = || milliseconds(|| Session::next(&mut sessions, Input::Tokens(&tokens), &choices).map(drop));
        let mut times = (0..runs + 5).map(|_| once()).collect::<Result<Vec<_>>>()?.split_off(5);
        about(what, batch, &mut times);
    }
    Ok(())
}
