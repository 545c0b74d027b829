//! The block of MM-Rec and its gradient. With `linear(v, W, b) = v W^T + b`, weights stored (out, in), and the erf
//! form of GELU:
//!
//! ```text
//! xn = rms_norm(x, n1)                  q, k, v, z = linear(xn, w., b.)
//! gamma = mdi_gamma(z, context k)
//! h, last_state = block_recurrence(z, gamma; wgate, bgate, wm, bm, initial_state)
//! kt, vt = the top level of hds_construct(k_mem, v_mem)
//! context = multi_memory_attention(h, kt, vt, q_in q)
//! r = x + h + context + v_mix v         hidden = linear(rms_norm(r, n2), wf1, bf1)
//! y = r + linear(gelu(hidden), wf2, bf2)
//! summary = the mean of y over time     0 where there is none
//! ```
//!
//! A row depends on earlier rows and on the memory, which the call does not change. A sequence may be divided anywhere,
//! if `last_state` of one part is `initial_state` of the next. Without `wm`, `mix` is 0.
//!
//! The gradient recomputes the intermediate tensors, so a training step keeps only the inputs for it. Without
//! `checkpoint` the block also gives `q`, `k`, `v`, `z` and `hidden`, B L (4 D + F) numbers more. The gradient accepts
//! these and `h`, `gamma` and `context`, and recomputes only those that are not given. That saves the recurrence and
//! the matrix products of the forward pass, except those inside of `mdi_gamma` and attention. The bits are equal either
//! way. Intermediate tensors have the storage type.

mod steps;

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::ops::mm_rec::block_recurrence;
use crate::ops::mm_rec::hds;
use crate::ops::norm::{EpsMode, RmsOptions};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options.
    pub struct Options {
        /// number of attention heads
        heads: usize = 1;
        /// weight of the gated mean; 0.1 by default, 0 without wm and bm
        mix: Option<f64> = None;
        /// weight of v in the sum
        v_mix: f64 = 0.1;
        /// epsilon of the norms
        eps: f64 = 1e-6, positive;
        /// add eps inside or outside the square root
        norm: EpsMode = EpsMode::Outside;
        ..hds::levels;
        /// oldest slot of the memory, if it is a ring
        cursor: usize = 0;
        ..block_recurrence::state_bounds;
        /// recompute activations in the backward pass
        checkpoint: bool = true;
    }
}

impl Options {
    fn recurrence(&self) -> block_recurrence::Options {
        block_recurrence::Options { mix: self.mix, state_clip: self.state_clip, state_norm: self.state_norm }
    }

    fn hierarchy(&self) -> hds::Options {
        hds::Options { levels: self.levels, ratio: self.ratio, cursor: self.cursor }
    }

    fn norm(&self) -> RmsOptions {
        RmsOptions { eps: self.eps, eps_mode: self.norm }
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// Type and shape of the keys of the memory.
    pub memory: Spec,
    /// Width of the feed-forward layer, `F` in the shapes.
    pub hidden: usize,
    /// The options.
    pub options: Options,
}

impl Problem {
    fn in_f64(&self) -> Problem {
        let f64 = |spec: Spec| Spec { dtype: DType::F64, ..spec };
        Problem { x: f64(self.x), memory: f64(self.memory), hidden: self.hidden, options: self.options.clone() }
    }

    /// The sizes of `x`.
    fn sizes(&self) -> [usize; 3] {
        [self.x.shape[0], self.x.shape[1], self.x.shape[2]]
    }

    fn hidden(&self) -> Result<Spec> {
        let [batch, length, _] = self.sizes();
        Spec::new(self.x.dtype, &[batch, length, self.hidden])
    }

    fn last_state(&self) -> Result<Spec> {
        let [batch, _, width] = self.sizes();
        Spec::new(self.x.dtype.wide(), &[batch, width])
    }

    /// The spec of the hierarchy's top level over the memory.
    fn top(&self) -> Result<Spec> {
        let hds::Options { levels, ratio, .. } = self.options.hierarchy();
        let (of, slots, width) = (self.memory.shape[0], self.memory.shape[1], self.memory.shape[2]);
        let slots = (slots / ratio.saturating_pow(levels as u32 - 1)).max(1);
        Spec::new(self.x.dtype, &[of, slots, width])
    }
}

/// The inputs.
const BLOCK: [Slot; 34] = [
    Slot::new("x", "(B, L, D)"),
    Slot::new("k_mem", "(B|1, M, D)"),
    Slot::new("v_mem", "(B|1, M, D)").loose(),
    Slot::new("n1", "(D)").wide(),
    Slot::new("n2", "(D)").wide(),
    Slot::new("wq", "(D, D)"),
    Slot::new("bq", "(D)"),
    Slot::new("wk", "(D, D)"),
    Slot::new("bk", "(D)"),
    Slot::new("wv", "(D, D)"),
    Slot::new("bv", "(D)"),
    Slot::new("wz", "(D, D)"),
    Slot::new("bz", "(D)"),
    Slot::new("wg1", "(I, D)"),
    Slot::new("bg1", "(I)"),
    Slot::new("wg2", "(D, I)"),
    Slot::new("bg2", "(D)"),
    Slot::new("wc1", "(I, D)"),
    Slot::new("bc1", "(I)"),
    Slot::new("wc2", "(D, I)"),
    Slot::new("bc2", "(D)"),
    Slot::new("wgate", "(D, D)"),
    Slot::new("bgate", "(D)"),
    Slot::new("wm", "(D, 2D)").optional(),
    Slot::new("bm", "(D)").optional(),
    Slot::new("waq", "(D, D)"),
    Slot::new("baq", "(D)"),
    Slot::new("wao", "(D, D)"),
    Slot::new("bao", "(D)"),
    Slot::new("wf1", "(F, D)"),
    Slot::new("bf1", "(F)"),
    Slot::new("wf2", "(D, F)"),
    Slot::new("bf2", "(D)"),
    Slot::new("initial_state", "(B, D)").wide().optional(),
];

/// The gradient's additional inputs: outputs, which are recomputed if not given, and cotangents.
const BESIDE: [Slot; 14] = [
    Slot::new("h", "(B, L, D)").optional(),
    Slot::new("gamma", "(B, L, D)").optional(),
    Slot::new("context", "(B, L, D)").optional(),
    Slot::new("q", "(B, L, D)").optional(),
    Slot::new("k", "(B, L, D)").optional(),
    Slot::new("v", "(B, L, D)").optional(),
    Slot::new("z", "(B, L, D)").optional(),
    Slot::new("hidden", "(B, L, F)").optional(),
    Slot::new("dy", "(B, L, D)"),
    Slot::new("dh", "(B, L, D)").optional(),
    Slot::new("dlast_state", "(B, D)").wide().optional(),
    Slot::new("dgamma", "(B, L, D)").optional(),
    Slot::new("dcontext", "(B, L, D)").optional(),
    Slot::new("dsummary", "(B, D)").optional(),
];

/// The block.
pub struct MmrecBlock;

impl Op for MmrecBlock {
    const NAME: &'static str = "mmrec_block";
    const ABOUT: &'static str = "Block of MM-Rec: gated recurrence, attention over a memory and feed-forward layer";
    const INPUTS: &'static [Slot] = &BLOCK;
    const OUTPUTS: &'static [Output] = &[
        Output::new("y", "(B, L, D)"),
        Output::new("h", "(B, L, D)"),
        Output::new("last_state", "(B, D)").wide(),
        Output::new("gamma", "(B, L, D)"),
        Output::new("context", "(B, L, D)"),
        Output::new("summary", "(B, D)"),
        Output::new("q", "(B, L, D)").unless("checkpoint"),
        Output::new("k", "(B, L, D)").unless("checkpoint"),
        Output::new("v", "(B, L, D)").unless("checkpoint"),
        Output::new("z", "(B, L, D)").unless("checkpoint"),
        Output::new("hidden", "(B, L, F)").unless("checkpoint"),
    ];
    const HINT: &'static str =
        "x is (batch, length, width), a memory (batch or 1, slots, width), and weights are stored (out, in)";
    const COTANGENTS: &'static [&'static str] = &["dy", "dh", "dlast_state", "dgamma", "dcontext", "dsummary"];

    type Options = Options;
    type Problem = Problem;

    /// Also checks the inputs of all steps, before any of them runs.
    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let (x, memory) = (*inputs.get("x")?, *inputs.get("k_mem")?);
        let problem = Problem { x, memory, hidden: call.sizes.of('F'), options: options.clone() };
        steps::check(&problem, inputs)?;
        Ok(problem)
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        let weights = ["wq", "wk", "wv", "wz", "wg1", "wg2", "wc1", "wc2", "wgate", "wm", "waq", "wao", "wf1", "wf2"];
        let [batch, length, width] = [0, 1, 2].map(|axis| problem.x.shape[axis]);
        let attention = op::product(&[2, batch, length, problem.memory.shape[1], width]);
        op::product(&[batch, length, op::elements(inputs, &weights)]).saturating_add(attention)
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MmrecBlock`].
pub type MmrecBlockBackward = Backward<MmrecBlock>;

impl Differentiable for MmrecBlock {
    const BACKWARD: &'static str = "mmrec_block_backward";
    const GIVEN: &'static [Slot] = &op::slots::<48>(&BLOCK, &BESIDE);

    crate::backward_by_steps!();
}
