//! All kinds of writes into a memory: the rows `h` into the short bank, and then `N` summaries, one after the other,
//! into the long bank, whose initial content is `long_k`. Each policy writes into a copy of its own.

use super::write_long::{self, Policy, WriteLong};
use super::write_short::{self, WriteShort};
use crate::base::elementwise::Map;
use crate::error::{Error, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot, named};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    pub struct Options {
        /// how much of a slot stays with ema
        ema_decay: f64 = 0.99, share;
        /// the first slot of both rings
        cursor0: usize = 0;
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
    const OUTPUTS: &'static [Output] = &[
        Output::new("short_ring", "(B, S, D)"),
        Output::new("long_ring", "(B, M, D)"),
        Output::new("long_ema", "(B, M, D)"),
        Output::new("long_broadcast", "(B, M, D)"),
    ];
    const HINT: &'static str = "A bank is batch, slots and width";
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let [short, h, long] = [*inputs.get("short")?, *inputs.get("h")?, *inputs.get("long_k")?];
        let called = |name: &'static str, as_: &'static str| {
            move |e: Error| match &*e.argument == name {
                true => Error { argument: as_.into(), ..e },
                false => e,
            }
        };
        let start = write_short::Options { start: options.cursor0, ..Default::default() };
        op::part::<WriteShort>(&[("bank", short), ("rows", h)].into_iter().collect(), &start)
            .map_err(called("bank", "short"))?;
        let each = Spec::new(call.storage, &call.sizes.all::<2>("BD"))?;
        op::part::<WriteLong>(&[("bank", long), ("summary", each)].into_iter().collect(), &Default::default())
            .map_err(called("bank", "long_k"))?;
        Ok(Problem { short, long, summaries: call.sizes.of('N'), options: options.clone() })
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
