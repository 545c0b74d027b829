//! A transformer block with a norm before each layer (pre-LN, Xiong et al. 2020), and its gradient:
//!
//! ```text
//! h = x + mha(layer_norm(x; ln1_w, ln1_b); wqkv, wo, bo)
//! y = h + swiglu_mlp(layer_norm(h; ln2_w, ln2_b); wg, wu, wd)
//! ```
//!
//! The gradient recomputes the intermediate tensors, and then goes through the gradients of these steps in reverse.
//! Intermediate tensors have the storage type. The cache of keys and values is that of [`mha`].

mod steps;

use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Slot};
use crate::ops::layers::mha::{self, Mha};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options: those of [`mha`], and the norms' `eps`.
    pub struct Options {
        ..mha::heads;
        /// epsilon of the norms
        eps: f64 = 1e-5, not_negative;
    }
}

impl Options {
    fn mha(&self) -> mha::Options {
        let Options { heads, causal, rope_theta, pairing, cached, .. } = *self;
        mha::Options { heads, causal, rope_theta, pairing, cached }
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// The specs of the cache's keys and values.
    pub cache: Option<[Spec; 2]>,
    /// The options.
    pub options: Options,
}

impl Problem {
    fn in_f64(&self) -> Problem {
        let f64 = |spec: Spec| Spec { dtype: DType::F64, ..spec };
        Problem { x: f64(self.x), cache: self.cache.map(|cache| cache.map(f64)), options: self.options.clone() }
    }
}

/// The inputs without the cache.
const BLOCK: [Slot; 12] = [
    Slot::new("x", "(B, L, D)"),
    Slot::new("wqkv", "(3D, D)"),
    Slot::new("wo", "(D, D)"),
    Slot::new("bo", "(D)").optional(),
    Slot::new("ln1_w", "(D)").wide(),
    Slot::new("ln1_b", "(D)").wide(),
    Slot::new("ln2_w", "(D)").wide(),
    Slot::new("ln2_b", "(D)").wide(),
    Slot::new("wg", "(F, D)"),
    Slot::new("wu", "(F, D)"),
    Slot::new("wd", "(D, F)"),
    Slot::new("mask", "(B|1, H|1, L|1, L|1)").mask().optional().loose(),
];

/// The block.
pub struct TransformerBlock;

impl Op for TransformerBlock {
    const NAME: &'static str = "transformer_block";
    const ABOUT: &'static str = "Transformer block: self-attention and feed-forward layer, each behind a norm";
    const INPUTS: &'static [Slot] = &op::slots::<14>(&BLOCK, &mha::CACHE);
    const HINT: &'static str = super::mha::Mha::HINT;
    const COTANGENTS: &'static [&'static str] = &["dy"];
    const IN_PLACE: &'static [&'static str] = Mha::IN_PLACE;

    type Options = Options;
    type Problem = Problem;

    /// Also checks self-attention's inputs, before the norm runs.
    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        steps::check(inputs, options)?;
        Ok(Problem { x: *inputs.get("x")?, cache: mha::cache(inputs)?, options: options.clone() })
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        let [batch, length, width] = [0, 1, 2].map(|axis| problem.x.shape[axis]);
        let weights = op::elements(inputs, &["wqkv", "wo", "wg", "wu", "wd"]);
        let keys = problem.options.cached.saturating_add(length);
        op::product(&[batch, length, weights]).saturating_add(op::product(&[2, batch, length, keys, width]))
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let [keys, values] = problem.cache.map_or([None; 2], |cache| cache.map(Some));
        Ok(op::named([("y", Some(problem.x)), ("keys", keys), ("values", values)]))
    }

    crate::forward_by_steps!();
}

/// The gradient of [`TransformerBlock`].
pub type TransformerBlockBackward = Backward<TransformerBlock>;

impl Differentiable for TransformerBlock {
    const BACKWARD: &'static str = "transformer_block_backward";
    const GIVEN: &'static [Slot] = &op::slots::<13>(&BLOCK, &[Slot::new("dy", "(B, L, D)")]);

    crate::backward_by_steps!();
}
