//! Writes rows into a bank of slots that is a ring:
//!
//! ```text
//! bank[(start + i) mod S] = rows[i]
//! ```
//!
//! If there are more rows than slots, the last ones remain. With the mode `strict`, rows past the last slot are an
//! error.

use super::WRITE;
use crate::cpu::Exec;
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::{ArrayD, Axis};
use serde::{Deserialize, Serialize};

const SOURCE: Source<Params> = Source::new("write_short", WRITE);

/// What happens to rows past the last slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// They wrap around to the first slot.
    #[default]
    Ring,
    /// They are an error.
    Strict,
}

options! {
    /// The options.
    pub struct Options {
        /// slot of the first row
        start: usize = 0;
        /// handling of rows past the last slot
        mode: Mode = Mode::Ring;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of the bank.
    pub bank: Spec,
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Slots, `S`.
    pub slots: usize,
    /// Rows, `N`.
    pub rows: usize,
    /// Width, `D`.
    pub width: usize,
    /// The slot of the first row.
    pub start: usize,
}

impl Problem {
    /// The first row that is not overwritten, and its slot.
    fn first(&self) -> (usize, usize) {
        let row = self.rows.saturating_sub(self.slots);
        (row, (self.start + row % self.slots.max(1)) % self.slots.max(1))
    }

    /// Ranges of rows that go to adjacent slots: first row, first slot and number.
    fn runs(&self) -> [(usize, usize, usize); 2] {
        let (row, slot) = self.first();
        let stay = self.rows - row;
        let until_end = stay.min(self.slots - slot);
        [(row, slot, until_end), (row + until_end, 0, stay - until_end)]
    }
}

/// Writes rows into a bank.
pub struct WriteShort;

params! {
    /// The kernel's parameters.
    struct Params {
        rows: u64 as "const STORAGE*",
        bank: u64 as "STORAGE*",
        batch: i64,
        slots: i64,
        count: i64,
        width: i64,
        // The first row that is not overwritten, and its slot.
        first: i64,
        slot: i64,
    }
}

impl Op for WriteShort {
    const NAME: &'static str = "write_short";
    const ABOUT: &'static str = "Rows into the slots of a memory bank";
    const INPUTS: &'static [Slot] = &[Slot::new("bank", "(B, S, D)"), Slot::new("rows", "(B, N, D)")];
    const OUTPUTS: &'static [Output] = &[Output::new("bank", "(B, S, D)")];
    const HINT: &'static str = "A bank is (batch, slots, width)";
    const COTANGENTS: &'static [&'static str] = &[];
    const IN_PLACE: &'static [&'static str] = &["bank"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (bank, &Options { start, mode }) = (*call.inputs.get("bank")?, call.options);
        let [batch, slots, rows, width] = call.sizes.all("BSND");
        if slots == 0 && rows > 0 {
            return Err(op::wrong_shape("bank", "(B, S, D) with at least one slot", &bank).hint("Rows need a slot"));
        }
        let fits = start.checked_add(rows).is_some_and(|end| end <= slots);
        if mode == Mode::Strict && !fits {
            return Err(Error::new(Kind::Option, "start")
                .expected(format_args!("room for {rows} rows after it, of {slots} slots"))
                .got(start)
                .hint("The mode `ring` goes on from the first slot"));
        }
        Ok(Problem { bank, batch, slots, rows, width, start: start % slots.max(1) })
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, _exec: &Exec) -> Result<()> {
        let (from, to) = (inputs.get("rows")?.bytes(), outputs.expect("bank")?.bytes());
        let row = problem.width * problem.bank.dtype.size();
        for batch in 0..problem.batch {
            for (first, slot, count) in problem.runs() {
                let from = &from[(batch * problem.rows + first) * row..][..count * row];
                to[(batch * problem.slots + slot) * row..][..count * row].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let (mut bank, rows) = (inputs.get("bank")?.clone(), inputs.get("rows")?);
        for i in 0..problem.rows {
            let slot = (problem.start + i) % problem.slots;
            bank.index_axis_mut(Axis(1), slot).assign(&rows.index_axis(Axis(1), i));
        }
        Ok([("bank", bank)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let Problem { bank, batch, slots, rows, width, .. } = *problem;
        let (first, slot) = problem.first();
        let params = Params {
            rows: lane.address(inputs.get("rows")?)?,
            bank: lane.address(outputs.get("bank")?)?,
            batch: batch as i64,
            slots: slots as i64,
            count: rows as i64,
            width: width as i64,
            first: first as i64,
            slot: slot as i64,
        };
        let kernel = lane.device().kernel(&SOURCE, &format!("{} -DSHORT", types(bank.dtype)))?;
        // SAFETY: the op's checks prove that the buffers have these sizes.
        unsafe { launch_each(lane, &kernel, batch * (rows - first) * width, &params) }
    }
}
