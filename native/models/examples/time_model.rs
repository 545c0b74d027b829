//! Times a Mamba language model on the CPU and prints one line of JSON.
//!
//! `time_model prefill|decode|read FOLDER [--level NAME] [--threads N] [--seconds S] [--out OUT.safetensors]`
//!
//! The folder has a model and `tokens.json`: a `prompt`, and the `steps` after it, which are repeated. `--out` writes
//! the logits after the prompt, or after each of the steps. `read` only sums the squares of all weights: its time is
//! the part of a decode step that memory bandwidth takes.

#[path = "../../kernels/examples/timing/mod.rs"]
mod timing;

use serde::Deserialize;
use serde_json::json;
use sidewinder_files::safetensors::{self, Reader};
use sidewinder_kernels::cpu::pool::{self, Shared};
use sidewinder_kernels::cpu::{Exec, Real, Vector, Work, prefetch_near};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};
use sidewinder_models::mamba::{Checkpoint, Input, Model, Session, Where};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use timing::{Arguments, Failure};

const USAGE: &str = "time_model prefill|decode|read FOLDER";

#[derive(Deserialize)]
struct Tokens {
    prompt: Vec<u32>,
    steps: Vec<u32>,
}

/// A repeatable run.
trait Job {
    /// Runs once and returns the result.
    fn run(&mut self) -> Result<&Owned, Failure>;
    /// Number of runs whose results `--out` writes.
    fn checked(&self) -> usize {
        1
    }
}

/// The prefill of a prompt, from states of zeros.
struct Prefill {
    session: Session,
    prompt: Vec<u32>,
    logits: Owned,
}

impl Job for Prefill {
    fn run(&mut self) -> Result<&Owned, Failure> {
        self.session.reset()?;
        self.session.prefill(Input::Tokens(&self.prompt), Some(self.logits.view_mut()))?;
        Ok(&self.logits)
    }
}

/// Decode steps of one token each.
struct Decode {
    session: Session,
    steps: Vec<u32>,
    logits: Owned,
}

impl Job for Decode {
    fn run(&mut self) -> Result<&Owned, Failure> {
        Session::step(&mut [&mut self.session], Input::Tokens(&self.steps[..1]), self.logits.view_mut())?;
        self.steps.rotate_left(1);
        Ok(&self.logits)
    }

    fn checked(&self) -> usize {
        self.steps.len()
    }
}

/// The sum of the squares of all weights.
struct Read {
    weights: Vec<f32>,
    sum: Owned,
    exec: Exec,
}

/// Weights per task.
const PIECE: usize = 1 << 18;

impl Job for Read {
    fn run(&mut self) -> Result<&Owned, Failure> {
        let pieces: Vec<_> = self.weights.chunks(PIECE).collect();
        let mut sums = vec![0.0; pieces.len()];
        let (level, to) = (self.exec.level, &Shared::new(&mut sums));
        pool::for_each(self.exec.threads, pieces.len(), |i| {
            // SAFETY: each task writes its own sum.
            unsafe { to.part(i, 1)[0] = f32::dispatch(level, Squares(pieces[i])) };
        })?;
        self.sum = Owned::from_fn(Spec::new(DType::F32, &[1])?, |_| sums.iter().map(|&sum| f64::from(sum)).sum());
        Ok(&self.sum)
    }
}

struct Squares<'a>(&'a [f32]);

impl Work<f32> for Squares<'_> {
    type Output = f32;

    /// Eight sums hide the latency of the addition; memory is prefetched 4 KiB ahead.
    #[inline(always)]
    fn run<V: Vector<Element = f32>>(self) -> f32 {
        let mut sums = [V::zero(); 8];
        for part in self.0.chunks(8 * V::LANES) {
            prefetch_part::<V>(part);
            for (sum, values) in sums.iter_mut().zip(part.chunks(V::LANES)) {
                let values = V::load_partial(values);
                *sum = values.mul_add(values, *sum);
            }
        }
        let mut total = V::zero();
        for sum in sums {
            total = total.add(sum);
        }
        total.sum()
    }
}

#[inline(always)]
fn prefetch_part<V: Vector<Element = f32>>(part: &[f32]) {
    for line in (0..8 * V::LANES).step_by(16) {
        prefetch_near(part.as_ptr(), line + 1024);
    }
}

fn job(what: &str, folder: &Path, exec: Exec) -> Result<Box<dyn Job>, Failure> {
    if what == "read" {
        return Ok(Box::new(Read { weights: weights(folder)?, sum: Owned::zeros(Spec::new(DType::F32, &[1])?), exec }));
    }
    let tokens: Tokens = serde_json::from_slice(&std::fs::read(folder.join("tokens.json"))?)?;
    let model = Arc::new(Model::new(Checkpoint::open(folder, true)?, None, false, Where::Cpu(exec))?);
    let (logits, session) = (Owned::poisoned(model.output(&[1])?), Session::new(&model)?);
    let mut prefill = Prefill { session, prompt: tokens.prompt, logits };
    match what {
        "prefill" => Ok(Box::new(prefill)),
        "decode" => {
            prefill.run()?;
            let Prefill { session, logits, .. } = prefill;
            Ok(Box::new(Decode { session, steps: tokens.steps, logits }))
        }
        _ => Err(format!("usage: {USAGE}").into()),
    }
}

fn weights(folder: &Path) -> Result<Vec<f32>, Failure> {
    let reader = Reader::open(&folder.join("model.safetensors"))?;
    let mut all = Vec::new();
    for entry in reader.entries() {
        all.extend_from_slice(reader.tensor(entry)?.view().slice::<f32>()?);
    }
    Ok(all)
}

/// Writes the results of the first runs, concatenated along the first axis.
fn write(job: &mut dyn Job, path: &Path) -> Result<(), Failure> {
    let (count, mut values, mut dims) = (job.checked(), Vec::<f32>::new(), Vec::new());
    for _ in 0..count {
        let result = job.run()?.view();
        values.extend_from_slice(result.slice()?);
        dims = result.spec().shape.to_vec();
    }
    dims[0] *= count;
    let y = Owned::from_fn(Spec::new(DType::F32, &dims)?, |i| f64::from(values[i]));
    Ok(safetensors::write(path, &[("y", y.view())])?)
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse(USAGE, 2, &["level", "threads", "seconds", "out"])?;
    let [what, folder] = &arguments.positional[..] else { unreachable!("as many as were asked for") };
    let exec = arguments.exec()?;
    let mut job = job(what, Path::new(folder), exec)?;
    match arguments.flag("out") {
        Some(out) => write(&mut *job, Path::new(out))?,
        None => drop(job.run()?),
    }
    let times = arguments.times(|| {
        let start = Instant::now();
        job.run()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    })?;
    println!(
        "{}",
        json!({
            "op": what, "level": exec.level.name(), "threads": exec.threads,
            "median_ms": times[times.len() / 2], "min_ms": times[0], "runs": times.len(),
        })
    );
    Ok(())
}
