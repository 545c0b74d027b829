//! Attention on the CPU, by tiles whose rows are keys and whose columns are queries.
//!
//! A block of queries is turned into columns once, and then every product reads one of its matrices
//! element by element, as it lies in memory, and the other by vectors: scores are keys by columns of
//! queries, and results, columns too, are values turned by weights. So nothing is packed but the
//! queries; the softmax goes down columns, one query a lane, without sums over lanes; and the gradient
//! needs nothing else, since a tile of weights is also what the sums over queries read element by
//! element. [`product`] does all of them.
//!
//! Where there are far fewer queries than lanes, [`few`] reads keys and values by vectors instead.

/// Repeats a block for `$i` from 0 to `$limit`, which is at most 16. A loop would do, but is unrolled
/// only after the compiler has decided what lives in registers, and what does not is stored in every
/// round.
macro_rules! unrolled {
    ($i:ident < $limit:tt, $body:block) => {
        unrolled!(@ $i $limit $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident $limit:tt $body:block $($index:literal)*) => {
        $(if $index < $limit {
            let $i: usize = $index;
            $body
        })*
    };
}

mod backward;
mod bias;
mod cover;
mod few;
mod forward;
mod product;
mod softmax;
mod tile;

use super::Problem;
use crate::cpu::{Exec, Storage, pool};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use cover::{Cover, Over};
use std::ops::Range;
use tile::Rows;

/// Queries in a block: as many columns as four of the widest vectors have lanes.
const QUERIES: usize = 64;

/// Keys in a tile: with as many queries and usual widths, what a product reads again and again fits
/// in the first-level cache.
const KEYS: usize = 64;

/// Below this many multiplications waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 19;

/// How many pieces of work each thread gets: several, so that a thread that is held up gets help.
const PIECES_PER_THREAD: usize = 8;

/// Computes attention on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward::forward::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward::backward::<S>(problem, inputs, outputs, exec))
}

/// What scores and results are made of.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    q: &'a [S],
    k: &'a [S],
    v: &'a [S],
    mask: Option<&'a [u8]>,
    bias: Option<&'a [S::Wide]>,
    exec: Exec,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        Ok(Given {
            problem,
            q: inputs.get("q")?.slice()?,
            k: inputs.get("k")?.slice()?,
            v: inputs.get("v")?.slice()?,
            mask: inputs.find("mask").map(View::slice).transpose()?,
            bias: inputs.find("bias").map(View::slice).transpose()?,
            exec: Exec { threads: threads(problem, exec)?, ..*exec },
        })
    }

    /// Queries of a head.
    fn q(&self, batch: usize, head: usize, range: Range<usize>) -> Rows<'a, S> {
        let Problem { q, width, .. } = self.problem;
        Rows::of(self.q, q, *width, (batch, head), range)
    }

    /// Keys of a head of keys.
    fn k(&self, batch: usize, head: usize, range: Range<usize>) -> Rows<'a, S> {
        let Problem { k, width, .. } = self.problem;
        Rows::of(self.k, k, *width, (batch, head), range)
    }

    /// Values of a head of keys.
    fn v(&self, batch: usize, head: usize, range: Range<usize>) -> Rows<'a, S> {
        let Problem { v, value_width, .. } = self.problem;
        Rows::of(self.v, v, *value_width, (batch, head), range)
    }

    /// Whether some of a tile's keys may be hidden from some of its queries, or have a bias.
    fn is_covered(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        self.mask.is_some() || self.bias.is_some() || self.problem.visible(queries.start) < keys.end
    }

    /// What lies over the scores of a tile, to be laid into `to`.
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

/// How many threads are worth their while.
fn threads(problem: &Problem, exec: &Exec) -> Result<usize> {
    let Problem { batch, heads, queries, keys, width, value_width, .. } = *problem;
    let scores = batch.saturating_mul(heads).saturating_mul(queries).saturating_mul(keys);
    let shared = scores.saturating_mul(width + value_width) >= WORTH_SHARING;
    if shared { pool::checked(exec.threads) } else { Ok(1) }
}

/// Calls `work` with ranges of the numbers below `count`, several for each thread if there are more.
fn each_range(threads: usize, count: usize, work: impl Fn(Range<usize>) + Send + Sync) -> Result<()> {
    let ranges = count.min(if threads == 1 { 1 } else { threads * PIECES_PER_THREAD });
    pool::for_each(threads, ranges, |i| work(i * count / ranges..(i + 1) * count / ranges))
}
