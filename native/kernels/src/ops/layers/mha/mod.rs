//! Multi-head self-attention with its projections (Vaswani et al. 2017, section 3.2.2), and its gradient. With
//! `linear(v, M) = v M^T`, and weights stored (out, in):
//!
//! ```text
//! [q | k | v] = linear(x, wqkv)            each cut into heads: head i is columns i D / H and on
//! q, k = rope(q), rope(k)                  if there is a rope_theta
//! y = linear(attention(q, k, v), wo) + bo
//! ```
//!
//! The gradient recomputes the intermediate tensors, which have the storage type.
//!
//! With a cache of keys and values, queries attend to its rows and then to the new ones, which are appended to it
//! ([`decode`]). Rotary positions count from the start of the cache. A cache has no gradient.

mod steps;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Slot};
use crate::ops::attention;
use crate::ops::attention::decode;
use crate::ops::positions::rope::Pairing;
use crate::tensor::{DType, Spec};
use crate::{options, shared_options};

shared_options! {
    heads {
        /// number of heads
        heads: usize = 1;
        /// mask later tokens
        causal: bool = false;
        /// base of the rotary angles; no rotation by default
        rope_theta: Option<f64> = None, positive;
        ..crate::ops::positions::rope::pairing;
        ..crate::ops::attention::decode::cached;
    }
}

options! {
    /// The options.
    pub struct Options {
        ..heads;
    }
}

/// A cache of keys and values with a capacity of `C` rows.
pub const CACHE: [Slot; 2] =
    [Slot::new("keys", "(B, H, C, W)").optional(), Slot::new("values", "(B, H, C, W)").optional()];

/// The specs of the cache, if one is given.
pub fn cache(inputs: &Named<Spec>) -> Result<Option<[Spec; 2]>> {
    match (inputs.find("keys"), inputs.find("values")) {
        (Some(&keys), Some(&values)) => Ok(Some([keys, values])),
        (None, None) => Ok(None),
        (Some(_), None) => inputs.get("values").map(|_| None),
        (None, Some(_)) => inputs.get("keys").map(|_| None),
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Width of the model, `D`.
    pub width: usize,
    /// Number of heads.
    pub heads: usize,
    /// Whether there is a causal mask.
    pub causal: bool,
    /// The base of rotary angles, if there is rotation.
    pub rope_theta: Option<f64>,
    /// Which elements are rotated in pairs.
    pub pairing: Pairing,
    /// The storage type.
    pub dtype: DType,
    /// The specs of the cache's keys and values.
    pub cache: Option<[Spec; 2]>,
    /// The number of filled rows of the cache.
    pub cached: usize,
}

impl Problem {
    fn check_cache(&self) -> Result<()> {
        match self.cache {
            Some([keys, values]) => {
                let new = Spec::new(self.dtype, &self.in_heads())?;
                let inputs = [("q", new), ("k", new), ("v", new), ("keys", keys), ("values", values)];
                op::part::<decode::Decode>(&inputs.into_iter().collect(), &self.decode()).map(|_| ())
            }
            None if self.cached == 0 => Ok(()),
            None => Err(Error::new(Kind::Option, "cached")
                .expected("0 where there is no cache")
                .got(self.cached)
                .hint("Give the cache as `keys` and `values`")),
        }
    }

    /// The shape of a tensor like `x`, split into heads.
    fn in_heads(&self) -> [usize; 4] {
        [self.batch, self.length, self.heads, self.width / self.heads]
    }

    fn decode(&self) -> decode::Options {
        let Problem { causal, cached, .. } = *self;
        decode::Options { causal, cached, layout: attention::Layout::HeadsLast, ..Default::default() }
    }

    fn in_f64(self) -> Problem {
        let cache = self.cache.map(|cache| cache.map(|spec| Spec { dtype: DType::F64, ..spec }));
        Problem { dtype: DType::F64, cache, ..self }
    }
}

/// The inputs without the cache. The last axis of a mask has the length of cache and sequence together.
const LAYER: [Slot; 5] = [
    Slot::new("x", "(B, L, D)"),
    Slot::new("wqkv", "(3D, D)"),
    Slot::new("wo", "(D, D)"),
    Slot::new("bo", "(D)").optional(),
    Slot::new("mask", "(B|1, H|1, L|1, L|1)").mask().optional().loose(),
];

/// Multi-head self-attention.
pub struct Mha;

impl Op for Mha {
    const NAME: &'static str = "mha";
    const ABOUT: &'static str = "Multi-head self-attention with its projections";
    const INPUTS: &'static [Slot] = &op::slots::<7>(&LAYER, &CACHE);
    const HINT: &'static str = "x is (batch, length, width), and weights are stored (out, in)";
    const COTANGENTS: &'static [&'static str] = &["dy"];
    const IN_PLACE: &'static [&'static str] = &["keys", "values"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, width] = call.sizes.all("BLD");
        let Options { heads, causal, rope_theta, pairing, cached } = *call.options;
        attention::repeated(call.inputs, "mask", [batch, heads, length, cached.saturating_add(length)])?;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(Error::new(Kind::Option, "heads").expected(format_args!("a divisor of {width}")).got(heads));
        }
        if rope_theta.is_some() && !(width / heads).is_multiple_of(2) {
            return Err(Error::new(Kind::Option, "heads")
                .expected("heads of an even width, to rotate pairs")
                .got(format_args!("{heads} of {}", width / heads)));
        }
        let (cache, dtype) = (cache(call.inputs)?, call.storage);
        let problem = Problem { batch, length, width, heads, causal, rope_theta, pairing, dtype, cache, cached };
        problem.check_cache()?;
        Ok(problem)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        let Problem { batch, length, width, cached, .. } = *problem;
        let keys = cached.saturating_add(length);
        op::product(&[4, batch, length, width, width.max(keys)])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let Problem { batch, length, width, dtype, .. } = *problem;
        let y = Spec::new(dtype, &[batch, length, width])?;
        let [keys, values] = problem.cache.map_or([None; 2], |cache| cache.map(Some));
        Ok(op::named([("y", Some(y)), ("keys", keys), ("values", values)]))
    }

    crate::forward_by_steps!();
}

/// The gradient of [`Mha`].
pub type MhaBackward = Backward<Mha>;

impl Differentiable for Mha {
    const BACKWARD: &'static str = "mha_backward";
    const GIVEN: &'static [Slot] = &op::slots::<6>(&LAYER, &[Slot::new("dy", "(B, L, D)")]);

    crate::backward_by_steps!();
}
