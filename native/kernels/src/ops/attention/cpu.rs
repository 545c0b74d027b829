//! Attention on the CPU, by tiles whose rows are keys and whose columns are queries.
//!
//! A block of queries is transposed once. Then every product reads its left matrix element by element, in place, and
//! the right one by vectors: scores are keys times columns of queries; results, columns too, are transposed values
//! times weights. So only the queries are packed. The softmax runs down columns, one query per lane, without reductions
//! across lanes. The gradient needs no other layout, since its sums over queries read a tile of weights element by
//! element. [`product`] computes all of these products.
//!
//! Where there are far fewer queries than lanes, [`few`] reads keys and values by vectors instead.
//!
//! The limit is the throughput of multiply-adds. Two Cascade Lake cores do 285 billion operations of f32 a second from
//! registers, so 16 heads of 2048 causal queries with a width of 64 cannot take less than 31 ms there; the tiles on the
//! diagonal waste 1 ms of it. History, as the share of that rate for 1024 queries and keys on one thread, including the
//! softmax:
//!
//! ```text
//! version 1  loops over the rows and vectors of a block: sums stored in every step    about 0.27
//! version 2  blocks written out, sums in registers                                    0.55
//! version 3  four steps a round, addresses proven before                              0.72
//! ```
//!
//! For bf16 there are products by AMX, if the CPU has it: [`amx`].
//!
//! What remains: a tenth for the softmax, a twentieth for transposing queries and results, and the ends of blocks.
//! Tried without gain (0.5): blocks of twelve rows and two vectors, whose addresses need more registers than there are.

// Iterators are not always inlined into functions of this size, and are slow calls then.
#![allow(clippy::needless_range_loop)]

#[cfg_attr(not(target_arch = "x86_64"), path = "cpu/no_amx.rs")]
mod amx;
mod backward;
mod bias;
mod cover;
mod few;
mod forward;
mod gradient;
mod product;
mod softmax;
mod tile;

use super::Problem;
use crate::cpu::{Exec, Storage, pool};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use cover::{Cover, Over};
use product::{Computed, Left};
use std::ops::Range;
use tile::{Dense, Room, Rows};

/// Queries per block, one per column: the lanes of four of the widest vectors.
const QUERIES: usize = 64;

/// Keys per tile: with [`QUERIES`] queries and usual widths, what a product reads repeatedly fits in the first-level
/// cache.
const KEYS: usize = 64;

/// Below this many multiplications waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 19;

/// Pieces of work per thread: several, so that other threads can take over from one that is delayed.
const PIECES_PER_THREAD: usize = 8;

/// Computes attention on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward::forward::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward::backward::<S>(problem, inputs, outputs, exec))
}

/// The inputs of scores and results.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    q: &'a [S],
    k: &'a [S],
    v: &'a [S],
    mask: Option<&'a [u8]>,
    bias: Option<&'a [S::Wide]>,
    /// Contiguous copies of keys and values, head by head, where they are worth copying.
    dense: Option<[Dense<S::Wide>; 2]>,
    exec: Exec,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        let mut given = Given {
            problem,
            q: inputs.get("q")?.slice()?,
            k: inputs.get("k")?.slice()?,
            v: inputs.get("v")?.slice()?,
            mask: inputs.find("mask").map(View::slice).transpose()?,
            bias: inputs.find("bias").map(View::slice).transpose()?,
            dense: None,
            exec: Exec { threads: threads(problem, exec)?, ..*exec },
        };
        given.dense = given.worth_copying().then(|| given.copies()).transpose()?;
        Ok(given)
    }

    /// Whether keys and values are read often enough to be copied first: those that must be widened, and rows at large
    /// strides, which would compete for few sets of the caches and lie on a page each.
    fn worth_copying(&self) -> bool {
        let Problem { queries, width, value_width, k, v, .. } = *self.problem;
        let lie_apart = k.row != width || v.row != value_width;
        queries > QUERIES && (S::DTYPE != S::Wide::DTYPE || lie_apart)
    }

    fn copies(&self) -> Result<[Dense<S::Wide>; 2]> {
        let Problem { batch, key_heads, keys, width, value_width, .. } = *self.problem;
        let count = batch * key_heads;
        let of = |i| (i / key_heads, i % key_heads);
        let k = Dense::new(count, keys, width, &self.exec, |i, range| self.k(of(i), range))?;
        let v = Dense::new(count, keys, value_width, &self.exec, |i, range| self.v(of(i), range))?;
        Ok([k, v])
    }

    /// A tile of keys as a left factor; copied into `room` unless all keys have been copied before.
    fn k_tile<'s>(&'s self, of: (usize, usize), range: Range<usize>, room: &'s mut Room<S::Wide>) -> Left<'s, S::Wide> {
        match &self.dense {
            Some([k, _]) => k.tile(of.0 * self.problem.key_heads + of.1, range.start),
            None => room.tile(self.k(of, range), self.exec.level),
        }
    }

    /// Like [`Self::k_tile`], for values.
    fn v_tile<'s>(&'s self, of: (usize, usize), range: Range<usize>, room: &'s mut Room<S::Wide>) -> Left<'s, S::Wide> {
        match &self.dense {
            Some([_, v]) => v.tile(of.0 * self.problem.key_heads + of.1, range.start),
            None => room.tile(self.v(of, range), self.exec.level),
        }
    }

    /// Rows of queries of one head; `of` is batch and head.
    fn q(&self, of: (usize, usize), range: Range<usize>) -> Rows<'a, S> {
        let Problem { q, width, .. } = self.problem;
        Rows::of(self.q, q, *width, of, range)
    }

    /// Rows of keys; `of` is batch and key head.
    fn k(&self, of: (usize, usize), range: Range<usize>) -> Rows<'a, S> {
        let Problem { k, width, .. } = self.problem;
        Rows::of(self.k, k, *width, of, range)
    }

    /// Rows of values; `of` is batch and key head.
    fn v(&self, of: (usize, usize), range: Range<usize>) -> Rows<'a, S> {
        let Problem { v, value_width, .. } = self.problem;
        Rows::of(self.v, v, *value_width, of, range)
    }

    /// Whether scaled queries count as computed in f32, as the right factor of scores: scaling by a power of two keeps
    /// them exact in bf16.
    fn scaled(&self) -> Computed {
        let mantissa = self.problem.scale.to_bits() << (64 - 52);
        if mantissa == 0 { Computed::Neither } else { Computed::Right }
    }

    /// Whether a tile has masked scores or a bias.
    fn is_covered(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        self.mask.is_some() || self.bias.is_some() || self.problem.visible(queries.start) < keys.end
    }

    /// The cover of a tile of scores (bias and masks), to be written to `to`.
    fn cover<'s>(
        &self,
        (batch, head): (usize, usize),
        queries: Range<usize>,
        keys: Range<usize>,
        to: (&'s mut [S::Wide], usize),
    ) -> Cover<'s, S::Wide>
    where
        'a: 's,
    {
        let Problem { causal, bias, mask, .. } = *self.problem;
        let bias = self.bias.zip(bias).map(|(values, strides)| Over::new(values, strides, batch, head));
        let mask = self.mask.zip(mask).map(|(values, strides)| Over::new(values, strides, batch, head));
        Cover { bias, mask, causal, queries, keys, to }
    }
}

/// How many threads the call is worth.
fn threads(problem: &Problem, exec: &Exec) -> Result<usize> {
    let Problem { batch, heads, queries, keys, width, value_width, .. } = *problem;
    let scores = batch.saturating_mul(heads).saturating_mul(queries).saturating_mul(keys);
    let shared = scores.saturating_mul(width + value_width) >= WORTH_SHARING;
    if shared { pool::checked(exec.threads) } else { Ok(1) }
}

/// Calls `work` with ranges that partition the numbers below `count`, several per thread.
fn each_range(threads: usize, count: usize, work: impl Fn(Range<usize>) + Send + Sync) -> Result<()> {
    let ranges = count.min(if threads == 1 { 1 } else { threads * PIECES_PER_THREAD });
    pool::for_each(threads, ranges, |i| work(i * count / ranges..(i + 1) * count / ranges))
}
