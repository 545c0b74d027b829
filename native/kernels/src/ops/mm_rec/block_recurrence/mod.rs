//! The recurrence of the MM-Rec block, and its gradient: a gated state that each step multiplies with two matrices. For
//! each batch and time `t` from 1 to L, where `h[0]` is `initial_state`, or zero, and products are per element:
//!
//! ```text
//! s = sigmoid(w_gate h[t-1] + b_gate)
//! m = sigmoid(w_mix [z[t]; h[t-1]] + b_mix)
//! n = m z[t] + (1 - m) h[t-1] + gamma[t] h[t-1]
//! u = z[t] s + gamma[t] h[t-1] + mix n
//! h[t] = clip(norm(u))
//! ```
//!
//! `norm` divides by `sqrt(mean(u^2)) + 1e-6` if `state_norm` is set, and `clip` limits elements to `state_clip` if
//! that is given; by default both do nothing, as in the original. Without w_mix and b_mix, `mix` is 0 and `m` is not
//! needed: the core recurrence. (`mm_rec.md`, sections 4 and 5; both guards are from its remark on stability.)
//!
//! Given the cotangents `dh` and `dlast_state`, time runs backwards; `G` starts as `dlast_state`:
//!
//! ```text
//! G  += dh[t]                             then through clip and norm
//! ds  = G z[t] s (1 - s)                  dm = mix G (z[t] - h[t-1]) m (1 - m)
//! dz[t] = G s + mix G m + (dm w_mix)[:D]  dgamma[t] = (1 + mix) G h[t-1]
//! G   = G ((1 + mix) gamma[t] + mix (1 - m)) + ds w_gate + (dm w_mix)[D:]
//! dw_gate = sum ds h[t-1]^T               db_gate = sum ds
//! dw_mix  = sum dm [z[t]; h[t-1]]^T       db_mix = sum dm              dinitial_state = G
//! ```
//!
//! The gradient of a clipped element is 0 outside of the bounds, and passes through on them. Storage is f32, f64, bf16
//! or f16; `initial_state`, the state from step to step, `last_state` and all arithmetic are f32 (f64 for f64 storage),
//! and outputs are rounded once. The gradient reads `h` as it was stored.
//!
//! The state may grow without bound: its weight on itself is `(1 + mix) gamma + mix (1 - m)`, up to 1.2.

mod cpu;
mod cuda;
mod reference;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::tensor::{DType, Spec};
use crate::{options, shared_options};

/// The term that `norm` adds to the root.
const EPS: f64 = 1e-6;

shared_options! {
    state_bounds {
        /// clip state elements to [-state_clip, state_clip]; no clipping by default
        state_clip: Option<f64> = None, positive;
        /// normalise the state by its root mean square after each step
        state_norm: bool = false;
    }
}

options! {
    /// The options of the recurrence.
    pub struct Options {
        /// weight of the gated mean; 0.1 by default, 0 without w_mix and b_mix
        mix: Option<f64> = None;
        ..state_bounds;
    }
}

/// The default weight of `n`.
const MIX: f64 = 0.1;

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Width of the state, `D`.
    pub width: usize,
    /// The storage type.
    pub dtype: DType,
    /// Whether there is a second gate, `m`.
    pub mixed: bool,
    /// The weight of `n`.
    pub mix: f64,
    /// The bound of the state's elements.
    pub clip: Option<f64>,
    /// Whether the state is normalised.
    pub norm: bool,
}

/// Whether there is a second gate, whose matrix and bias have these names. `mix` must agree with it.
pub fn mixed(inputs: &Named<Spec>, [w, b]: [&str; 2], mix: Option<f64>) -> Result<bool> {
    let mix = mix.unwrap_or(0.0);
    let wrong = |expected: &str| Error::new(Kind::Option, "mix").expected(expected).got(mix);
    match (inputs.find(w), inputs.find(b)) {
        (Some(_), Some(_)) if !mix.is_finite() => Err(wrong("a finite number")),
        (Some(_), Some(_)) => Ok(true),
        (Some(_), None) => inputs.get(b).map(|_| true),
        (None, Some(_)) => inputs.get(w).map(|_| true),
        (None, None) if mix == 0.0 => Ok(false),
        (None, None) => {
            let hint = format!("Give {w} and {b}, or mix 0");
            Err(wrong(&format!("0 where there are no {w} and {b}")).hint(hint))
        }
    }
}

/// The recurrence.
pub struct BlockRecurrence;

impl Op for BlockRecurrence {
    const NAME: &'static str = "block_recurrence";
    const ABOUT: &'static str = "The gated recurrence of the MM-Rec block over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("z", "(B, L, D)"),
        Slot::new("gamma", "(B, L, D)"),
        Slot::new("w_gate", "(D, D)"),
        Slot::new("b_gate", "(D)"),
        Slot::new("w_mix", "(D, 2D)").optional(),
        Slot::new("b_mix", "(D)").optional(),
        Slot::new("initial_state", "(B, D)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("h", "(B, L, D)"), Output::new("last_state", "(B, D)").wide()];
    const HINT: &'static str = "Sequences are (batch, length, width), and weights are stored (out, in)";
    const COTANGENTS: &'static [&'static str] = &["dh", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, width] = call.sizes.all("BLD");
        let &Options { mix, state_clip: clip, state_norm: norm } = call.options;
        let mixed = mixed(call.inputs, ["w_mix", "b_mix"], mix)?;
        let mix = mix.unwrap_or(if mixed { MIX } else { 0.0 });
        Ok(Problem { batch, length, width, dtype: call.storage, mixed, mix, clip, norm })
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        op::product(&[problem.batch, problem.length, op::elements(inputs, &["w_gate", "w_mix"])])
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`BlockRecurrence`].
pub type BlockRecurrenceBackward = Backward<BlockRecurrence>;

impl Differentiable for BlockRecurrence {
    const BACKWARD: &'static str = "block_recurrence_backward";
    const GIVEN: &'static [Slot] = &op::slots::<10>(
        Self::INPUTS,
        &[
            Slot::new("h", "(B, L, D)"),
            Slot::new("dh", "(B, L, D)"),
            Slot::new("dlast_state", "(B, D)").wide().optional(),
        ],
    );

    crate::backward_by_kernels!();
}
