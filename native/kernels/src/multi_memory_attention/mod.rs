//! Attention of a sequence over a memory that is not part of it (MM-Rec), and its gradient. With
//! `linear(v, W, b) = v W^T + b`, and weights stored (out, in):
//!
//! ```text
//! q = linear(h, waq, baq) + q_in / 2       the latter where it is given
//! a = attention(q, k_mem, v_mem)           each cut into heads: head i is columns i D / H and on
//! y = linear(a, wao, bao)
//! ```
//!
//! The memory is not projected, and every row sees all of its slots. One memory, of batch 1, may serve all
//! sequences; its gradients are then sums over the batch. `lse` is that of attention. The gradient recomputes the
//! intermediate tensors. They have the storage type.

mod steps;

use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How many heads there are, `H` in the shapes; 1 by default.
    pub heads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { heads: 1 }
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
    /// Heads.
    pub heads: usize,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (h, memory) = (inputs.get("h")?, inputs.get("k_mem")?);
        let &[batch, length, width] = &h.shape[..] else {
            return Err(op::wrong_shape("h", "(B, L, D)", h));
        };
        let (of_memory, slots) = match memory.shape[..] {
            [of_memory, slots, columns] if columns == width && (of_memory == batch || of_memory == 1) => {
                (of_memory, slots)
            }
            _ => {
                let expected = format!("({batch} or 1, S, {width})");
                return Err(op::wrong_shape("k_mem", &expected, memory).hint("A memory is batch or 1, slots and width"));
            }
        };
        op::same_shape(inputs, "v_mem", &memory.shape).map_err(|e| e.hint("v_mem is like k_mem"))?;
        op::same_shape(inputs, "q_in", &h.shape)?;
        for (name, dims) in [("waq", &[width, width][..]), ("baq", &[width]), ("wao", &[width; 2]), ("bao", &[width])] {
            op::same_shape(inputs, name, dims).map_err(|e| e.hint("Weights are stored (out, in)"))?;
        }
        let heads = options.heads;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(Error::new(Kind::Option, "heads").expected(format_args!("a divisor of {width}")).got(heads));
        }
        Ok(Problem { batch, length, width, slots, shared: of_memory != batch, heads, dtype: h.dtype })
    }

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
    const OPTIONS: &'static [OptionDoc] =
        &[OptionDoc { name: "heads", takes: "integer", help: "how many heads there are; 1 by default" }];
    const COTANGENTS: &'static [&'static str] = &["dy", "dlse"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let Problem { batch, length, width, slots, .. } = *problem;
        op::product(&[2, batch, length, width, width.saturating_add(slots)])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
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
