//! Linear attention with decays: attention without softmax as a recurrence, of which the linear transformer (Katharopoulos
//! et al. 2020, arXiv 2006.16236), retention (Sun et al. 2023, arXiv 2307.08621), lightning attention (Qin et al. 2024,
//! arXiv 2405.17381) and gated linear attention (GLA; Yang et al. 2024, arXiv 2312.06635) are cases. The options are those of
//! `fused_recurrent_linear_attn`, `fused_recurrent_simple_gla` and `fused_recurrent_gla` of flash-linear-attention.
//!
//! For each batch, head `h` and time `t`, with `a = exp(g[t,h])`, a number, or one for each key, or 1 without `g`, and with
//! the state `S`, K rows by V columns, and the sum of keys `z`:
//!
//! ```text
//! S[t] = Diag(a) S[t-1] + k[t] v[t,h]^T                              (S starts as initial_state, or zero)
//! z[t] = a * z[t-1] + k[t]                                           (z starts as initial_z, or zero)
//! y[t] = scale S[t]^T q[t]                                           (scale is 1 / sqrt(K) unless given)
//! y[t] = scale S[t]^T q[t] / (scale z[t] . q[t] + 1e-10)             with normalize
//! ```
//!
//! Heads fall into `G` equal groups with the same `q` and `k`. Given the cotangents `dy` and `dlast_state`, time runs
//! backwards:
//!
//! ```text
//! G[t] = scale q[t] dy[t]^T + Diag(a[t+1]) G[t+1]                    Diag(a[L+1]) G[L+1] = dlast_state
//! dq = scale S[t] dy                  dk = G[t] v                    dv = G[t]^T k
//! dg = sum G[t] * (Diag(a) S[t-1])    dinitial_state = Diag(a[1]) G[1]
//! ```
//!
//! where `dq` and `dk` sum over the heads of a group, and `dg` over values, and without a decay for each key over keys.
//!
//! `z` is the column that `S` has for a value that is always 1. So calls with `normalize` or with a state of `z` are calls
//! with such a value more, whose outputs `n` and `d` give `y = n / (d + 1e-10)`; the cotangents of these are
//! `dn = dy / (d + 1e-10)` and `dd = -(dn . y)`. They are in the type of the arithmetic, so that this is exact.
//!
//! Storage is f32, f64, bf16 or f16; `g`, the states and the arithmetic are f32 (f64 for f64), and outputs are rounded
//! once. On a GPU, 16-bit sequences run in chunks on tensor cores where sizes allow, which also rounds the factors of
//! products to 16 bits; with a decay for each key, `q` and `k` times the decays of a chunk are such factors, so that
//! growth over 64 steps must not exceed the type. The order of all sums depends on the sizes alone (on a GPU, also
//! on its model).
//!
//! To decode one token of running sequences, call it with a length of 1 and with the `last_state` of the call before as
//! `initial_state` (and its `last_z` as `initial_z`).

mod cpu;
mod cuda;
mod reference;
mod z;

use super::matrix_state::{self, Form};
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot, wrong_shape};
use crate::ops::attention;
use crate::options;
use crate::tensor::Spec;

options! {
    /// The options of the recurrence.
    pub struct Options {
        /// factor of q; 1 / sqrt(K) by default
        scale: Option<f64> = None;
        /// divide y by the product of q and the sum of keys, z
        normalize: bool = false;
        /// write last_state (B, H, K, V)
        return_state: bool = false;
        /// write last_z (B, H, K)
        return_z: bool = false;
    }
}

/// Added to the divisor of `y`.
const EPS: f64 = 1e-10;

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// The recurrence of `S`.
    pub of_values: matrix_state::Problem,
    /// Whether `y` is divided by `scale z . q`.
    pub normalize: bool,
}

impl Problem {
    /// Whether a call with these tensors needs `z`.
    fn needs_z<I, O>(&self, inputs: &Named<I>, outputs: &Named<O>) -> bool {
        let given = ["initial_z", "dlast_z"].iter().any(|name| inputs.find(name).is_some());
        self.normalize || given || outputs.find("last_z").is_some()
    }

    /// The recurrence with `z` as a further column of the state, in the type of the arithmetic.
    fn with_z(&self) -> matrix_state::Problem {
        let of = self.of_values;
        matrix_state::Problem { values: of.values + 1, dtype: of.dtype.wide(), ..of }
    }
}

/// The op.
pub struct LinearAttention;

impl Op for LinearAttention {
    const NAME: &'static str = "linear_attention";
    const ABOUT: &'static str = "Linear attention with decays (retention, GLA) over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("q", "(B, L, G, K)"),
        Slot::new("k", "(B, L, G, K)"),
        Slot::new("v", "(B, L, H, V)"),
        Slot::new("g", "(B, L, H) | (B, L, H, K)").wide().optional().loose(),
        Slot::new("initial_state", "(B, H, K, V)").wide().optional(),
        Slot::new("initial_z", "(B, H, K)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[
        Output::new("y", "(B, L, H, V)"),
        Output::new("last_state", "(B, H, K, V)").wide().asked_by("return_state"),
        Output::new("last_z", "(B, H, K)").wide().asked_by("return_z"),
    ];
    const HINT: &'static str = "Layout is (batch, length, groups, keys) and (batch, length, heads, values)";
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state", "dlast_z"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, heads, groups, keys, values] = call.sizes.all("BLHGKV");
        let Options { scale, normalize, .. } = *call.options;
        matrix_state::divides(groups, heads)?;
        let (scale, dtype) = (attention::scale(scale, keys)?, call.storage);
        let form = call.inputs.find("g").map_or(Ok(Form::ByHead), |g| form(g, [batch, length, heads, keys]))?;
        let of_values =
            matrix_state::Problem { batch, length, heads, groups, keys, values, dtype, form, scale, qk_l2norm: false };
        Ok(Problem { of_values, normalize })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let matrix_state::Problem { batch, length, heads, keys, values, .. } = problem.of_values;
        op::product(&[batch, length, heads, keys, values])
    }

    crate::forward_by_kernels!();
    crate::packed_by_kernels!(cuda_packed(problem, inputs, outputs, steps, lane) {
        let runs = !problem.needs_z(inputs, outputs);
        Ok(runs && matrix_state::cuda::forward_packed(&problem.of_values, inputs, outputs, steps, lane)?)
    });
}

/// The form that the shape of `g` determines.
fn form(g: &Spec, by_key: [usize; 4]) -> Result<Form> {
    let [batch, length, heads, keys] = by_key;
    if g.shape[..] == by_key[..3] {
        return Ok(Form::ByHead);
    }
    if g.shape[..] == by_key {
        return Ok(Form::ByKey);
    }
    Err(wrong_shape("g", &format!("({batch}, {length}, {heads}) or ({batch}, {length}, {heads}, {keys})"), g))
}

/// The gradient of [`LinearAttention`].
pub type LinearAttentionBackward = Backward<LinearAttention>;

impl Differentiable for LinearAttention {
    const BACKWARD: &'static str = "linear_attention_backward";
    const GIVEN: &'static [Slot] =
        &op::slots::<9>(Self::INPUTS, &op::given(Self::INPUTS, Self::OUTPUTS, ["dy", "dlast_state", "dlast_z"]));

    crate::backward_by_kernels!();
    crate::packed_by_kernels!(cuda_backward_packed(problem, inputs, outputs, steps, lane) {
        let runs = !problem.needs_z(inputs, outputs);
        Ok(runs && matrix_state::cuda::backward_packed(&problem.of_values, inputs, outputs, steps, lane)?)
    });
}
