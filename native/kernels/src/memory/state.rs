//! All kinds of writes into a memory: the rows `h` into the short bank, and then `N` summaries, one after the other,
//! into the long bank, whose initial content is `long_k`. Each policy writes into a copy of its own.

use super::write_long::{self, Policy, WriteLong};
use super::write_short::{self, WriteShort};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Named, Op, OptionDoc, Slot, named};
use crate::place::{Map, Place};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How much of a slot stays in an average; 0.99 by default.
    pub ema_decay: f64,
    /// The first slot that is written of both rings; 0 by default.
    pub cursor0: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { ema_decay: 0.99, cursor0: 0 }
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    short: Spec,
    long: Spec,
    summaries: usize,
    options: Options,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let [short, h, long, summaries] =
            [*inputs.get("short")?, *inputs.get("h")?, *inputs.get("long_k")?, *inputs.get("summaries")?];
        let called = |name: &'static str, as_: &'static str| {
            move |e: crate::error::Error| match &*e.argument == name {
                true => crate::error::Error { argument: as_.into(), ..e },
                false => e,
            }
        };
        let start = write_short::Options { start: options.cursor0, ..Default::default() };
        WriteShort::check(&[("bank", short), ("rows", h)].into_iter().collect(), &start)
            .map_err(called("bank", "short"))
            .map_err(called("rows", "h"))?;
        let &[count, batch, width] = &summaries.shape[..] else {
            return Err(
                op::wrong_shape("summaries", "(N, B, D)", &summaries).hint("One after the other, of each batch")
            );
        };
        let each = Spec::new(summaries.dtype, &[batch, width])?;
        let by = write_long::Options { decay: options.ema_decay, ..Default::default() };
        WriteLong::check(&[("bank", long), ("summary", each)].into_iter().collect(), &by)
            .map_err(called("bank", "long_k"))
            .map_err(called("summary", "summaries"))
            .map_err(called("decay", "ema_decay"))?;
        op::same_shape(inputs, "long_v", &long.shape)?;
        Ok(Problem { short, long, summaries: count, options: options.clone() })
    }

    fn in_f64(&self) -> Problem {
        let f64 = |spec: Spec| Spec { dtype: DType::F64, ..spec };
        Problem { short: f64(self.short), long: f64(self.long), ..self.clone() }
    }
}

/// All sorts of writes.
pub struct MemoryState;

impl Op for MemoryState {
    const NAME: &'static str = "memory_state";
    const ABOUT: &'static str = "Rows and summaries into the banks of a memory, by each policy";
    const INPUTS: &'static [Slot] = &[
        Slot::new("short", "(B, S, D)"),
        Slot::new("h", "(B, L, D)"),
        Slot::new("long_k", "(B, M, D)"),
        // Where a memory has keys it has values; what is written into the one says how it is in the other.
        Slot::new("long_v", "(B, M, D)").optional(),
        Slot::new("summaries", "(N, B, D)"),
    ];
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "ema_decay", takes: "float", help: "how much of a slot stays with ema; 0.99 by default" },
        OptionDoc { name: "cursor0", takes: "integer", help: "the first slot of both rings; 0 by default" },
    ];
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let Problem { short, long, .. } = *problem;
        Ok([("short_ring", short), ("long_ring", long), ("long_ema", long), ("long_broadcast", long)]
            .into_iter()
            .collect())
    }

    crate::forward_by_steps!();
}

/// The writes as a sequence of ops, on any [`Place`].
mod steps {
    use super::*;

    /// The banks after all writes.
    pub fn forward<'a, P: Place>(
        place: &P,
        problem: &Problem,
        inputs: &Named<P::View<'a>>,
        mut outputs: Named<P::ViewMut<'a>>,
    ) -> Result<()> {
        let input = |name| inputs.get(name).map(P::briefly).map(Some);
        let start = write_short::Options { start: problem.options.cursor0, ..Default::default() };
        let to = P::briefly_mut(outputs.expect("short_ring")?);
        let given = named([("bank", input("short")?), ("rows", input("h")?)]);
        place.call::<WriteShort>(&start, given, named([("bank", Some(to))]))?;
        for (policy, name) in
            [(Policy::Ring, "long_ring"), (Policy::Ema, "long_ema"), (Policy::Broadcast, "long_broadcast")]
        {
            long(place, problem, policy, inputs, outputs.expect(name)?)?;
        }
        Ok(())
    }

    fn long<'a, P: Place>(
        place: &P,
        problem: &Problem,
        policy: Policy,
        inputs: &Named<P::View<'a>>,
        to: P::ViewMut<'a>,
    ) -> Result<()> {
        let Problem { long, summaries, ref options, .. } = *problem;
        let mut bank = place.empty(long)?;
        place.map(Map::Sum, &[P::briefly(inputs.get("long_k")?)], P::view_mut(&mut bank))?;
        for i in 0..summaries {
            let summary = P::rows(inputs.get("summaries")?, i..i + 1)?;
            let summary = P::reshape(&summary, &[long.shape[0], long.shape[2]])?;
            let cursor = options.cursor0.wrapping_add(i);
            let options = write_long::Options { policy, cursor, decay: options.ema_decay };
            let held = named([("bank", Some(P::view_mut(&mut bank)))]);
            place.call::<WriteLong>(&options, named([("summary", Some(summary))]), held)?;
        }
        place.map(Map::Sum, &[P::view(&bank)], P::briefly_mut(to))
    }
}
