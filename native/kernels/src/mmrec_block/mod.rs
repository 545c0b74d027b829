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
//! A row sees those before it and the memory, which the call does not change; a sequence may be cut anywhere if
//! `last_state` of a part is `initial_state` of the next. Where there is no `wm`, `mix` is 0.
//!
//! The gradient recomputes the intermediate tensors, so a training step holds nothing for it but the inputs. Without
//! `checkpoint` the block also gives `q`, `k`, `v`, `z` and `hidden`, B L (4 D + F) numbers more. The gradient takes
//! these, `h`, `gamma` and `context` where it is given them, and recomputes only the others. That saves the recurrence
//! and the matrix products of the forward pass, except those inside of `mdi_gamma` and attention. The bits are the
//! same either way. Intermediate tensors have the storage type.

mod steps;

use crate::block_recurrence;
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::hds;
use crate::norm::{EpsMode, RmsOptions};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How many heads attention has; 1 by default.
    pub heads: usize,
    /// The recurrence's weight of the gated mean: 0.1 by default, 0 without `wm` and `bm`.
    pub mix: Option<f64>,
    /// The weight of `v` in the sum; 0.1 by default.
    pub v_mix: f64,
    /// What keeps the norms' divisors from 0.
    pub eps: f64,
    /// Where that goes: outside of the root by default.
    pub norm: EpsMode,
    /// How many levels the hierarchy has, that of the memory among them; 3 by default.
    pub levels: usize,
    /// How many slots of a level make one of the next; 4 by default.
    pub ratio: usize,
    /// How many writes a memory that is a ring has had; 0 by default.
    pub cursor: usize,
    /// Keeps every element of the state within plus and minus this; none by default.
    pub state_clip: Option<f64>,
    /// Divides the state by its root mean square after each step.
    pub state_norm: bool,
    /// Whether the gradient shall compute again what it needs; true by default.
    pub checkpoint: bool,
}

impl Default for Options {
    fn default() -> Self {
        let (block_recurrence::Options { mix, state_clip, state_norm }, hds::Options { levels, ratio, cursor }) =
            Default::default();
        let (heads, v_mix, eps, norm) = (1, 0.1, 1e-6, EpsMode::Outside);
        Options { heads, mix, v_mix, eps, norm, levels, ratio, cursor, state_clip, state_norm, checkpoint: true }
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
    /// Type and shape of a memory.
    pub memory: Spec,
    /// Width of the feed-forward layer, `F` in the shapes.
    pub hidden: usize,
    /// The options.
    pub options: Options,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (x, wf1) = (*inputs.get("x")?, inputs.get("wf1")?);
        let &[batch, length, width] = &x.shape[..] else {
            return Err(op::wrong_shape("x", "(B, L, D)", &x));
        };
        let hidden = match wf1.shape[..] {
            [hidden, inputs] if inputs == width => hidden,
            _ => return Err(op::wrong_shape("wf1", &format!("(F, {width})"), wf1).hint(WEIGHTS)),
        };
        for name in VECTORS {
            op::same_shape(inputs, name, &[width])?;
        }
        for name in SQUARES {
            op::same_shape(inputs, name, &[width; 2]).map_err(|e| e.hint(WEIGHTS))?;
        }
        op::same_shape(inputs, "wm", &[width, 2 * width]).map_err(|e| e.hint(WEIGHTS))?;
        op::same_shape(inputs, "wf2", &[width, hidden]).map_err(|e| e.hint(WEIGHTS))?;
        op::same_shape(inputs, "bf1", &[hidden])?;
        op::same_shape(inputs, "initial_state", &[batch, width])?;
        for name in ["h", "gamma", "context", "q", "k", "v", "z"] {
            op::same_shape(inputs, name, &x.shape)?;
        }
        op::same_shape(inputs, "hidden", &[batch, length, hidden])?;
        let memory = *inputs.get("k_mem")?;
        Ok(Problem { x, memory, hidden, options: options.clone() })
    }

    fn in_f64(&self) -> Problem {
        let f64 = |spec: Spec| Spec { dtype: DType::F64, ..spec };
        Problem { x: f64(self.x), memory: f64(self.memory), hidden: self.hidden, options: self.options.clone() }
    }

    /// Sizes of `x`.
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

    fn summary(&self) -> Result<Spec> {
        let [batch, _, width] = self.sizes();
        Spec::new(self.x.dtype, &[batch, width])
    }

    /// The top level of the hierarchy over a memory.
    fn top(&self) -> Result<Spec> {
        let hds::Options { levels, ratio, .. } = self.options.hierarchy();
        let (of, slots, width) = (self.memory.shape[0], self.memory.shape[1], self.memory.shape[2]);
        let slots = (slots / ratio.saturating_pow(levels as u32 - 1)).max(1);
        Spec::new(self.x.dtype, &[of, slots, width])
    }
}

const WEIGHTS: &str = "Weights are stored (out, in)";
const VECTORS: [&str; 11] = ["n1", "n2", "bq", "bk", "bv", "bz", "bgate", "bm", "baq", "bao", "bf2"];
const SQUARES: [&str; 7] = ["wq", "wk", "wv", "wz", "wgate", "waq", "wao"];

/// What it computes from.
const BLOCK: [Slot; 34] = [
    Slot::new("x", "(B, L, D)"),
    Slot::new("k_mem", "(B|1, M, D)"),
    Slot::new("v_mem", "(B|1, M, D)"),
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

/// What the gradient takes beside: outputs, each computed again where it is absent, and cotangents.
const OUTPUTS: [Slot; 14] = [
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
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "heads", takes: "integer", help: "how many heads attention has; 1 by default" },
        OptionDoc {
            help: "weight of the gated mean; 0.1 by default, 0 without wm and bm",
            ..block_recurrence::OPTIONS[0]
        },
        OptionDoc { name: "v_mix", takes: "float", help: "weight of v in the sum; 0.1 by default" },
        OptionDoc { name: "eps", takes: "float", help: "what keeps the norms' divisors from 0; 1e-6 by default" },
        OptionDoc { name: "norm", takes: "text", help: "where eps goes: outside of the root, the default, or inside" },
        hds::LEVELS,
        hds::RATIO,
        OptionDoc {
            name: "cursor",
            takes: "integer",
            help: "the oldest slot of a memory that is a ring; 0 by default",
        },
        block_recurrence::OPTIONS[1],
        block_recurrence::OPTIONS[2],
        OptionDoc { name: "checkpoint", takes: "flag", help: "whether the gradient computes again what it needs" },
    ];
    const COTANGENTS: &'static [&'static str] = &["dy", "dh", "dlast_state", "dgamma", "dcontext", "dsummary"];

    type Options = Options;
    type Problem = Problem;

    /// Checks what the parts would find too late: then some of them have run.
    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let problem = Problem::new(inputs, options)?;
        steps::check(&problem, inputs)?;
        Ok(problem)
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        let weights = ["wq", "wk", "wv", "wz", "wg1", "wg2", "wc1", "wc2", "wgate", "wm", "waq", "wao", "wf1", "wf2"];
        let [batch, length, width] = [0, 1, 2].map(|axis| problem.x.shape[axis]);
        let attention = op::product(&[2, batch, length, problem.memory.shape[1], width]);
        op::product(&[batch, length, op::elements(inputs, &weights)]).saturating_add(attention)
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let x = problem.x;
        let mut outputs: Named<_> = [
            ("y", x),
            ("h", x),
            ("last_state", problem.last_state()?),
            ("gamma", x),
            ("context", x),
            ("summary", problem.summary()?),
        ]
        .into_iter()
        .collect();
        if !problem.options.checkpoint {
            ["q", "k", "v", "z"].into_iter().for_each(|name| outputs.push(name, x));
            outputs.push("hidden", problem.hidden()?);
        }
        Ok(outputs)
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MmrecBlock`].
pub type MmrecBlockBackward = Backward<MmrecBlock>;

impl Differentiable for MmrecBlock {
    const BACKWARD: &'static str = "mmrec_block_backward";
    const GIVEN: &'static [Slot] = &op::slots::<48>(&BLOCK, &OUTPUTS);

    crate::backward_by_steps!();
}
