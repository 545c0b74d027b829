//! Attention over the slots of a memory that a search down its hierarchy finds for each query. A slot has exactly
//! `ratio` children in the level below:
//!
//! ```text
//! candidates = all slots of the top level
//! at each level above the bank: of the candidates keep the top_k of the largest q.k[j], fewer if there are fewer
//!                               candidates = their children, ratio j to ratio j + ratio - 1, in order
//! slots = the candidates of the bank       context = softmax(q.k[slots] / sqrt(D)) v[slots]
//! ```
//!
//! Ties go to the lower slot, and NaN ranks last. A NaN among the final candidates makes the context NaN. A query costs
//! `top_k ratio` dot products per level, independently of the size of the memory. One memory, of batch 1, may serve all
//! queries. The levels are those of [`HdsConstruct`](super::HdsConstruct), not rounded; scores and sums are f32 (f64
//! for f64 storage).

mod cpu;
mod cuda;
mod reference;

use super::{Levels, within};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    pub struct Options {
        ..super::levels;
        /// number of candidates selected per level
        top_k: usize = 4;
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The sizes of the hierarchy; its batch is that of the memory.
    pub levels: Levels,
    /// Batch size of the queries, `B` in the shapes.
    pub batch: usize,
    /// Queries of a batch, `L`.
    pub length: usize,
    /// Slots of a level per slot of the level above.
    pub ratio: usize,
    /// Candidates that are kept at each level above the bank.
    pub top_k: usize,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    /// Checks that levels have exactly `ratio` times the slots of the next one, and that slot numbers fit in i32.
    fn exact(&self) -> Result<()> {
        let sizes = &self.levels.sizes;
        let slots = |expected: String| Err(Error::new(Kind::Shape, "k").expected(expected).got(sizes[0]));
        match self.ratio.checked_pow(sizes.len() as u32 - 1) {
            Some(parts) if sizes[0].is_multiple_of(parts) => {}
            _ => return slots(format!("slots that are a multiple of {}^{}", self.ratio, sizes.len() - 1)),
        }
        if sizes[0] > i32::MAX as usize {
            return slots("fewer than 2^31 slots".to_string());
        }
        Ok(())
    }

    /// The number of candidates at each level, from the bank up.
    pub fn candidates(&self) -> Vec<usize> {
        let mut counts = vec![self.levels.sizes[self.levels.sizes.len() - 1]];
        for _ in 1..self.levels.sizes.len() {
            counts.push(self.top_k.min(counts[counts.len() - 1]) * self.ratio);
        }
        counts.reverse();
        counts
    }

    /// The scale of the scores.
    pub fn scale(&self) -> f64 {
        1.0 / (self.levels.width.max(1) as f64).sqrt()
    }

    /// The index of the memory for the queries of a batch.
    pub fn memory(&self, batch: usize) -> usize {
        if self.levels.batch == 1 { 0 } else { batch }
    }
}

/// Attention over the slots that a search down the hierarchy finds.
pub struct HdsQueryTopk;

impl Op for HdsQueryTopk {
    const NAME: &'static str = "hds_query_topk";
    const ABOUT: &'static str = "Attention over the slots that a walk down the levels of a memory finds";
    const INPUTS: &'static [Slot] =
        &[Slot::new("q", "(B, L, D)"), Slot::new("k", "(B|1, M, D)"), Slot::new("v", "(B|1, M, D)").loose()];
    const HINT: &'static str = "q is (batch, length, width), and a memory (batch or 1, slots, width)";
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (&Options { levels, ratio, top_k }, k) = (call.options, call.inputs.get("k")?);
        let [batch, length] = call.sizes.all("BL");
        let levels = Levels::new("k", k, &super::Options { levels, ratio, cursor: 0 })?;
        within("top_k", top_k, 1..=usize::MAX)?;
        let problem = Problem { levels, batch, length, ratio, top_k, dtype: call.storage };
        problem.exact()?;
        // Checked last: if `k` has a wrong number of slots, that is the error to report.
        op::same_shape(call.inputs, "v", &k.shape).map(|()| problem)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let Levels { width, sizes, .. } = &problem.levels;
        let above = sizes.len() - 1;
        let seen = problem.top_k.saturating_mul(problem.ratio).saturating_mul(above).saturating_add(sizes[above]);
        op::product(&[problem.batch, problem.length, *width, seen])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let Problem { batch, length, dtype, .. } = *problem;
        let context = Spec::new(dtype, &[batch, length, problem.levels.width])?;
        let slots = Spec::new(DType::I32, &[batch, length, problem.candidates()[0]])?;
        Ok([("context", context), ("slots", slots)].into_iter().collect())
    }

    crate::forward_by_kernels!();
}
