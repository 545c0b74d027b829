//! Cross-attention of a sequence over a memory (MM-Rec), and its gradient. With `linear(v, W, b) = v W^T + b`, and
//! weights stored (out, in):
//!
//! ```text
//! q = linear(h, waq, baq) + q_in / 2       the latter where it is given
//! a = attention(q, k_mem, v_mem)           each cut into heads: head i is columns i D / H and on
//! y = linear(a, wao, bao)
//! ```
//!
//! The memory is not projected, and all of its slots are visible to every row. One memory, of batch 1, may serve all
//! sequences; its gradients are then sums over the batch. `lse` is that of attention. The gradient recomputes the
//! intermediate tensors, which have the storage type.

mod steps;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    pub struct Options {
        /// number of heads
        heads: usize = 1;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Width, `D`.
    pub width: usize,
    /// Slots of the memory, `S`.
    pub slots: usize,
    /// Whether one memory serves several sequences.
    pub shared: bool,
    /// Number of heads.
    pub heads: usize,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    fn lse(&self) -> Result<Spec> {
        Spec::new(self.dtype.wide(), &[self.batch, self.heads, self.length])
    }

    fn in_f64(self) -> Problem {
        Problem { dtype: DType::F64, ..self }
    }
}

/// Attention over a memory.
pub struct MultiMemoryAttention;

impl Op for MultiMemoryAttention {
    const NAME: &'static str = "multi_memory_attention";
    const ABOUT: &'static str = "Attention of a sequence over a memory, with its projections";
    const INPUTS: &'static [Slot] = &[
        Slot::new("h", "(B, L, D)"),
        Slot::new("k_mem", "(B|1, S, D)"),
        Slot::new("v_mem", "(B|1, S, D)"),
        Slot::new("waq", "(D, D)"),
        Slot::new("baq", "(D)").optional(),
        Slot::new("wao", "(D, D)"),
        Slot::new("bao", "(D)").optional(),
        Slot::new("q_in", "(B, L, D)").optional(),
    ];
    const HINT: &'static str =
        "h is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)";
    const COTANGENTS: &'static [&'static str] = &["dy", "dlse"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, width, slots] = call.sizes.all("BLDS");
        let memory = call.inputs.get("k_mem")?.shape;
        op::same_shape(call.inputs, "v_mem", &memory).map_err(|e| e.hint("v_mem is like k_mem"))?;
        let heads = call.options.heads;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(Error::new(Kind::Option, "heads").expected(format_args!("a divisor of {width}")).got(heads));
        }
        Ok(Problem { batch, length, width, slots, shared: memory[0] != batch, heads, dtype: call.storage })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let Problem { batch, length, width, slots, .. } = *problem;
        op::product(&[2, batch, length, width, width.saturating_add(slots)])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let y = Spec::new(problem.dtype, &[problem.batch, problem.length, problem.width])?;
        Ok([("y", y), ("lse", problem.lse()?)].into_iter().collect())
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MultiMemoryAttention`].
pub type MultiMemoryAttentionBackward = Backward<MultiMemoryAttention>;

impl Differentiable for MultiMemoryAttention {
    const BACKWARD: &'static str = "multi_memory_attention_backward";
    const GIVEN: &'static [Slot] = &op::slots::<10>(
        Self::INPUTS,
        &[Slot::new("dy", "(B, L, D)"), Slot::new("dlse", "(B, H, L)").wide().optional()],
    );

    crate::backward_by_steps!();
}
