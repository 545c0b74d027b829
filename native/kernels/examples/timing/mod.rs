//! Shared by the examples that measure times: flags, and clock readings for some seconds.

use sidewinder_kernels::cpu::{Exec, Level};
use std::time::{Duration, Instant};

pub type Failure = Box<dyn std::error::Error>;

pub struct Arguments {
    pub positional: Vec<String>,
    flags: Vec<(String, String)>,
}

impl Arguments {
    /// Parses the command line: `count` positional arguments, and flags, all of which must be `known`.
    pub fn parse(usage: &str, count: usize, known: &[&str]) -> Result<Arguments, Failure> {
        let (mut positional, mut flags) = (Vec::new(), Vec::new());
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.strip_prefix("--") {
                Some(flag) if !known.contains(&flag) => return Err(format!("no option --{flag}").into()),
                Some(flag) => flags.push((flag.to_string(), words.next().ok_or(format!("--{flag} takes a value"))?)),
                None => positional.push(word),
            }
        }
        if positional.len() != count {
            return Err(format!("usage: {usage} [--FLAG VALUE ...]").into());
        }
        Ok(Arguments { positional, flags })
    }

    pub fn flag(&self, name: &str) -> Option<&str> {
        self.flags.iter().find(|(flag, _)| flag == name).map(|(_, value)| value.as_str())
    }

    pub fn exec(&self) -> Result<Exec, Failure> {
        let mut exec = Exec::default();
        if let Some(level) = self.flag("level").filter(|&level| level != "auto") {
            exec.level = Level::from_name(level)?;
        }
        if let Some(threads) = self.flag("threads") {
            exec.threads = threads.parse()?;
        }
        Ok(exec)
    }

    /// Times of runs in milliseconds, sorted; runs are repeated for the time given by `--seconds`.
    pub fn times(&self, mut run: impl FnMut() -> Result<f64, Failure>) -> Result<Vec<f64>, Failure> {
        let limit = Duration::from_secs_f64(self.flag("seconds").unwrap_or("1").parse()?);
        let (mut times, begin) = (Vec::new(), Instant::now());
        while begin.elapsed() < limit || times.len() < 3 {
            times.push(run()?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}
