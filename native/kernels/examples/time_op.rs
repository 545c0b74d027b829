//! Times one op on the CPU over the inputs of a safetensors file and prints one line of JSON.
//!
//! `time_op OP IN.safetensors [--level NAME] [--threads N] [--seconds S] [--out OUT.safetensors]
//! [--options JSON]`

#[path = "../tests/common/mod.rs"]
mod common;

use serde_json::{Value, json};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::for_each_op;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::safetensors::{self, Reader};
use sidewinder_kernels::tensor::{Described, Owned};
use std::path::Path;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

struct Arguments {
    positional: Vec<String>,
    flags: Vec<(String, String)>,
}

impl Arguments {
    fn parse() -> Result<Arguments, Failure> {
        let (mut positional, mut flags) = (Vec::new(), Vec::new());
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.strip_prefix("--") {
                Some(flag) => flags.push((flag.to_string(), words.next().ok_or(format!("--{flag} takes a value"))?)),
                None => positional.push(word),
            }
        }
        if positional.len() != 2 {
            return Err("usage: time_op OP IN.safetensors [--FLAG VALUE ...]".into());
        }
        Ok(Arguments { positional, flags })
    }

    fn flag(&self, name: &str) -> Option<&str> {
        self.flags.iter().find(|(flag, _)| flag == name).map(|(_, value)| value.as_str())
    }
}

fn exec(arguments: &Arguments) -> Result<Exec, Failure> {
    let mut exec = Exec::default();
    if let Some(level) = arguments.flag("level").filter(|&level| level != "auto") {
        exec.level = Level::from_name(level)?;
    }
    if let Some(threads) = arguments.flag("threads") {
        exec.threads = threads.parse()?;
    }
    Ok(exec)
}

fn inputs<O: Op>(path: &Path) -> Result<Named<Owned>, Failure> {
    let reader = Reader::open(path)?;
    let known = reader.entries().iter().filter(|entry| O::INPUTS.iter().any(|slot| slot.name == entry.name));
    known.map(|entry| Ok((op::name::<O>(&entry.name), reader.tensor(entry)?))).collect()
}

/// Milliseconds of each run, after a first that is not counted.
fn times<O: Op>(
    options: &O::Options,
    inputs: &Named<Owned>,
    exec: &Exec,
    limit: Duration,
) -> Result<Vec<f64>, Failure> {
    let mut outputs = common::run::<O>(options, inputs, exec)?;
    let (views, begin) = (inputs.map(Owned::view), Instant::now());
    let mut times = Vec::new();
    while begin.elapsed() < limit || times.len() < 3 {
        let to = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
        let start = Instant::now();
        op::run_cpu::<O>(options, &views, to, exec)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn time<O: Op>(arguments: &Arguments) -> Result<(), Failure> {
    let exec = exec(arguments)?;
    let inputs = inputs::<O>(Path::new(&arguments.positional[1]))?;
    let options: O::Options = serde_json::from_str(arguments.flag("options").unwrap_or("{}"))?;
    if let Some(out) = arguments.flag("out") {
        let outputs = common::run::<O>(&options, &inputs, &exec)?;
        let views: Vec<_> = outputs.iter().map(|(name, tensor)| (name.as_ref(), tensor.view())).collect();
        safetensors::write(Path::new(out), &views)?;
    }
    let seconds = arguments.flag("seconds").unwrap_or("1").parse()?;
    let times = times::<O>(&options, &inputs, &exec, Duration::from_secs_f64(seconds))?;
    let shapes: Value =
        inputs.iter().map(|(name, tensor)| (name.to_string(), json!(tensor.spec().shape.to_vec()))).collect();
    println!(
        "{}",
        json!({
            "op": O::NAME, "shape": shapes, "level": exec.level.name(), "threads": exec.threads,
            "median_ms": times[times.len() / 2], "min_ms": times[0], "runs": times.len(),
        })
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse()?;
    macro_rules! time_if_named {
        ($op:ty) => {
            if arguments.positional[0] == <$op>::NAME {
                return time::<$op>(&arguments);
            }
        };
    }
    for_each_op!(time_if_named);
    Err(format!("no op `{}`", arguments.positional[0]).into())
}
