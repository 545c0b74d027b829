//! The gated delta rule, the recurrence of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, eq. 10; the
//! options are those of `fused_recurrent_gated_delta_rule` of flash-linear-attention). A state is a matrix that maps keys
//! to values: each step decays it, and moves the value that it has for the step's key towards the step's value.
//!
//! For each batch, head `h` and time `t`, with `a = exp(g[t,h])`, or 1 without `g` (the delta rule of DeltaNet), and with
//! the state `S`, K rows by V columns:
//!
//! ```text
//! e[t] = v[t,h] - a S[t-1]^T k[t]                                    (S starts as initial_state, or zero)
//! S[t] = a S[t-1] + k[t] (beta e[t])^T                               = a (I - beta k k^T) S[t-1] + beta k v^T
//! y[t] = scale S[t]^T q[t]                                           (scale is 1 / sqrt(K) unless given)
//! ```
//!
//! Heads fall into `G` equal groups with the same `q` and `k`. With `qk_l2norm`, `q` and `k` are vectors `x` divided by
//! their L2 norms, `x / sqrt(x . x + 1e-6)`. Given the cotangents `dy` and `dlast_state`, time runs backwards:
//!
//! ```text
//! G[t] = scale q[t] dy[t]^T + a[t+1] G'[t+1]                         a[L+1] G'[L+1] = dlast_state
//! G'[t] = G[t] - k (beta de)^T                                       de = G[t]^T k
//! dq = scale S[t] dy                  dk = G[t] (beta e) - a S[t-1] (beta de)
//! dv = beta de                        dbeta = de . e
//! dg = sum G' (a S[t-1])              dinitial_state = a[1] G'[1]
//! ```
//!
//! `dq` and `dk` sum over the heads of a group; where `z = x / sqrt(x . x + 1e-6)`, `dx = (dz - z (z . dz)) /
//! sqrt(x . x + 1e-6)`. Storage is f32, f64, bf16 or f16; `g`, the states and the arithmetic are f32 (f64 for f64), and
//! outputs are rounded once. On a GPU, 16-bit sequences run in chunks on tensor cores where sizes allow, which also rounds
//! the factors of products to 16 bits. The order of all sums depends on the sizes alone (on a GPU, also on its model).
//!
//! To decode one token of running sequences, call it with a length of 1 and with the `last_state` of the call before as
//! `initial_state`.

mod cuda;
mod reference;

use super::matrix_state::{self, EPS, Form, cpu};
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::ops::attention;
use crate::options;
use crate::tensor::Spec;

pub use super::matrix_state::Problem;

options! {
    /// The options of the recurrence.
    pub struct Options {
        /// scale of q; 1 / sqrt(K) by default
        scale: Option<f64> = None;
        /// divide q and k by their L2 norms
        qk_l2norm: bool = false;
        /// write last_state (B, H, K, V)
        return_state: bool = false;
    }
}

/// The op.
pub struct GatedDeltaRule;

impl Op for GatedDeltaRule {
    const NAME: &'static str = "gated_delta_rule";
    const ABOUT: &'static str = "Gated delta rule (Gated DeltaNet) over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("q", "(B, L, G, K)"),
        Slot::new("k", "(B, L, G, K)"),
        Slot::new("v", "(B, L, H, V)"),
        Slot::new("beta", "(B, L, H)"),
        Slot::new("g", "(B, L, H)").wide().optional(),
        Slot::new("initial_state", "(B, H, K, V)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::new("y", "(B, L, H, V)"), Output::new("last_state", "(B, H, K, V)").wide().asked_by("return_state")];
    const HINT: &'static str = "Layout is (batch, length, groups, keys) and (batch, length, heads, values)";
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, heads, groups, keys, values] = call.sizes.all("BLHGKV");
        let Options { scale, qk_l2norm, .. } = *call.options;
        matrix_state::divides(groups, heads)?;
        let scale = attention::scale(scale, keys)?;
        let (dtype, form) = (call.storage, Form::Delta);
        Ok(Problem { batch, length, heads, groups, keys, values, dtype, form, scale, qk_l2norm })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.batch, problem.length, problem.heads, problem.keys, problem.values]).saturating_mul(2)
    }

    crate::forward_by_kernels!();
    crate::packed_by_kernels!(cuda_packed, cuda::forward_packed);
}

/// The gradient of [`GatedDeltaRule`].
pub type GatedDeltaRuleBackward = Backward<GatedDeltaRule>;

impl Differentiable for GatedDeltaRule {
    const BACKWARD: &'static str = "gated_delta_rule_backward";
    const GIVEN: &'static [Slot] =
        &op::slots::<8>(Self::INPUTS, &op::given(Self::INPUTS, Self::OUTPUTS, ["dy", "dlast_state"]));

    crate::backward_by_kernels!();
    crate::packed_by_kernels!(cuda_backward_packed, cuda::backward_packed);
}
