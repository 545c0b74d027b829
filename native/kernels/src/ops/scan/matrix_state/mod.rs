//! What the recurrences share whose state is a matrix, K rows by V columns for each head: `gated_delta_rule` and
//! `linear_attention`. Their kernels are the ones here, compiled for each [`Form`].

pub mod cpu;
pub(super) mod cuda;

use crate::error::{Error, Kind, Result};
use crate::tensor::DType;

/// Added to the squared L2 norms of `q` and `k`, so that no divisor is 0.
pub(super) const EPS: f64 = 1e-6;

/// How a step changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The delta rule, with a decay for each head: `S = a (I - beta k k^T) S + beta k v^T`.
    Delta,
    /// A sum with a decay for each head: `S = a S + k v^T`.
    ByHead,
    /// A sum with a decay for each key of each head: `S = Diag(a) S + k v^T`.
    ByKey,
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Heads, `H`.
    pub heads: usize,
    /// Groups of heads with the same `q` and `k`, `G`.
    pub groups: usize,
    /// Width of keys, `K`.
    pub keys: usize,
    /// Width of values, `V`.
    pub values: usize,
    /// The storage type.
    pub dtype: DType,
    /// How a step changes the state.
    pub form: Form,
    /// The factor of `q`.
    pub scale: f64,
    /// Whether `q` and `k` are divided by their L2 norms.
    pub qk_l2norm: bool,
}

impl Problem {
    /// Heads of a group.
    pub fn heads_per_group(&self) -> usize {
        self.heads / self.groups.max(1)
    }

    /// Elements of a head's state.
    pub fn state(&self) -> usize {
        self.keys * self.values
    }

    /// Decays of a step of a head.
    pub fn decays(&self) -> usize {
        if self.form == Form::ByKey { self.keys } else { 1 }
    }
}

/// Checks that groups divide the heads.
pub(super) fn divides(groups: usize, heads: usize) -> Result<()> {
    if groups > 0 && heads.is_multiple_of(groups) {
        return Ok(());
    }
    Err(Error::new(Kind::Shape, "q")
        .expected(format_args!("a number of groups that divides {heads} heads"))
        .got(format_args!("{groups} groups")))
}
