//! Attention of queries over the slots that a walk down the hierarchy of a memory finds for each of them. With
//! `ratio` slots to one of the next level, exactly:
//!
//! ```text
//! candidates = all slots of the top level
//! at each level above the bank: of the candidates keep the top_k of the largest q.k[j], fewer if there are fewer
//!                               candidates = their children, ratio j to ratio j + ratio - 1, in order
//! slots = the candidates of the bank       context = softmax(q.k[slots] / sqrt(D)) v[slots]
//! ```
//!
//! Of equal scores the lower slot ranks first, and NaN ranks last. A NaN among the last candidates makes the context
//! NaN. A row costs `top_k ratio` products a level, independently of the size of the memory. One memory, of batch 1, may serve
//! all queries. The levels are those of [`HdsConstruct`](super::HdsConstruct), not rounded; scores and sums are f32
//! (f64 for f64 storage).

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
        /// how many candidates of a level go on
        top_k: usize = 4;
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The sizes of the hierarchy, whose batch is that of the memory.
    pub levels: Levels,
    /// Batch size of the queries, `B` in the shapes.
    pub batch: usize,
    /// Queries of a batch, `L`.
    pub length: usize,
    /// Slots of a level that make one of the next.
    pub ratio: usize,
    /// The number of candidates that go to the next level.
    pub top_k: usize,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    /// That slots have children, and numbers that fit.
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

    /// How many candidates each level has, the bank's first.
    pub fn candidates(&self) -> Vec<usize> {
        let mut counts = vec![self.levels.sizes[self.levels.sizes.len() - 1]];
        for _ in 1..self.levels.sizes.len() {
            counts.push(self.top_k.min(counts[counts.len() - 1]) * self.ratio);
        }
        counts.reverse();
        counts
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f64 {
        1.0 / (self.levels.width.max(1) as f64).sqrt()
    }

    /// The memory that the queries of a batch go to.
    pub fn memory(&self, batch: usize) -> usize {
        if self.levels.batch == 1 { 0 } else { batch }
    }
}

/// Attention over the slots that a walk down the hierarchy finds.
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
        // Not before: where `k` has a wrong number of slots, that is what is wrong.
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
