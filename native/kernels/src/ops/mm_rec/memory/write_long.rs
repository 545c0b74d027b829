//! Writes a summary into a bank of slots:
//!
//! ```text
//! ring:       bank[cursor mod M] = summary
//! ema:        bank[j] = decay bank[j] + (1 - decay) summary       for all j
//! broadcast:  bank[j] = summary                                   for all j
//! ```

use super::WRITE;
use crate::cpu::pool::Shared;
use crate::cpu::strips::Strips;
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use crate::with_type;
use ndarray::{ArrayD, Axis};
use serde::{Deserialize, Serialize};

const SOURCE: Source<Params> = Source::new("write_long", WRITE);

/// Which slots are written, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The slot at the cursor.
    #[default]
    Ring,
    /// All slots, each as a moving average.
    Ema,
    /// All slots. They are then equal, and attention over them no longer depends on the query.
    Broadcast,
}

options! {
    /// The options.
    pub struct Options {
        /// how slots are selected for the write
        policy: Policy = Policy::Ring;
        /// slot to write, with policy ring
        cursor: usize = 0;
        /// decay of a slot, with policy ema
        decay: f64 = 0.99, share;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of the bank.
    pub bank: Spec,
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Slots, `M`.
    pub slots: usize,
    /// Width, `D`.
    pub width: usize,
    /// The first slot to write.
    pub first: usize,
    /// The number of slots to write.
    pub count: usize,
    /// The weight of a slot's old contents.
    pub decay: f64,
}

/// Writes a summary into a bank.
pub struct WriteLong;

params! {
    /// The kernel's parameters.
    struct Params {
        summary: u64 as "const STORAGE*",
        bank: u64 as "STORAGE*",
        batch: i64,
        slots: i64,
        width: i64,
        // The slots to write.
        first: i64,
        count: i64,
        decay: f64, // weight of the old contents
    }
}

impl Op for WriteLong {
    const NAME: &'static str = "write_long";
    const ABOUT: &'static str = "A summary into the slots of a memory bank";
    const INPUTS: &'static [Slot] = &[Slot::new("bank", "(B, M, D)"), Slot::new("summary", "(B, D)")];
    const OUTPUTS: &'static [Output] = &[Output::new("bank", "(B, M, D)")];
    const HINT: &'static str = "A bank is (batch, slots, width)";
    const COTANGENTS: &'static [&'static str] = &[];
    const IN_PLACE: &'static [&'static str] = &["bank"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (bank, &Options { policy, cursor, decay }) = (*call.inputs.get("bank")?, call.options);
        let [batch, slots, width] = call.sizes.all("BMD");
        if slots == 0 {
            let expected = "(B, M, D) with at least one slot";
            return Err(op::wrong_shape("bank", expected, &bank).hint(Self::HINT));
        }
        let (first, count) = if policy == Policy::Ring { (cursor % slots, 1) } else { (0, slots) };
        let decay = if policy == Policy::Ema { decay } else { 0.0 };
        Ok(Problem { bank, batch, slots, width, first, count, decay })
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        let Problem { bank, batch, slots, width, first, count, decay } = *problem;
        with_type!(bank.dtype, S => {
            let summary = inputs.get("summary")?.slice::<S>()?;
            let bank = Shared::new(outputs.expect("bank")?.slice::<S>()?);
            let rows = batch * count;
            Strips::new(exec, rows, width, rows * width, usize::MAX).for_each(|row, columns| {
                let (batch, slot) = (row / count, first + row % count);
                // SAFETY: strips share no element of (batch, slot, column).
                let to = unsafe { bank.part((batch * slots + slot) * width + columns.start, columns.len()) };
                let summary = &summary[batch * width..][columns];
                if decay == 0.0 {
                    return to.copy_from_slice(summary);
                }
                <S as Storage>::Wide::dispatch(exec.level, Average { summary, decay, to });
            })
        })
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let Problem { first, count, decay, .. } = *problem;
        let (mut bank, summary) = (inputs.get("bank")?.clone(), inputs.get("summary")?);
        for slot in first..first + count {
            let mut slot = bank.index_axis_mut(Axis(1), slot);
            let new = match decay {
                0.0 => summary.clone(),
                _ => &slot * decay + summary * (1.0 - decay),
            };
            slot.assign(&new);
        }
        Ok([("bank", bank)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let Problem { bank, batch, slots, width, first, count, decay } = *problem;
        let params = Params {
            summary: lane.address(inputs.get("summary")?)?,
            bank: lane.address(outputs.get("bank")?)?,
            batch: batch as i64,
            slots: slots as i64,
            width: width as i64,
            first: first as i64,
            count: count as i64,
            decay,
        };
        let kernel = lane.device().kernel(&SOURCE, &types(bank.dtype))?;
        // SAFETY: the op's checks prove that the buffers have these sizes.
        unsafe { launch_each(lane, &kernel, batch * count * width, &params) }
    }
}

/// Adds a summary to the moving average in a slot.
struct Average<'a, S> {
    summary: &'a [S],
    decay: f64,
    to: &'a mut [S],
}

impl<S: Storage> Work<S::Wide> for Average<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (decay, rest) = (V::constant(self.decay), V::constant(1.0 - self.decay));
        for (to, summary) in self.to.chunks_mut(V::LANES).zip(self.summary.chunks(V::LANES)) {
            let new = S::load::<V>(summary).mul(rest);
            S::store(S::load::<V>(to).mul_add(decay, new), to);
        }
    }
}
