//! `dq`, `dk` and `dv`, by stretches of [`STRETCH`] keys.
//!
//! Weights are recomputed from `lse`, a tile at a time, and used at once for all three gradients. The sums for the keys
//! of a stretch stay in the second-level cache while the loop goes through all queries; the sums for queries are
//! accumulated over stretches. So only key heads can be divided among threads. Where those are too few, the sums for
//! keys and for queries are computed in separate passes, which takes seven products in place of five. Both ways add in
//! one order, and so give equal bits.

use super::gradient::{Backward, Block, Tiles};
use super::product::{Care, Computed, Left, Product, Then};
use super::tile::from_columns;
use super::{Given, KEYS, QUERIES, bias, each_range};
use crate::cpu::aligned::Aligned;
use crate::cpu::pool::Shared;
use crate::cpu::{Exec, Real, Storage, Vector, Work, convert, unrolled};
use crate::error::Result;
use crate::op::Named;
use crate::ops::attention::{Problem, Strides};
use crate::tensor::{Element, View, ViewMut};
use std::ops::Range;

/// Keys per stretch: with usual widths they and their sums fit in the second-level cache.
pub const STRETCH: usize = 512;

/// Computes the gradient.
pub fn backward<'a, S: Storage>(
    problem: &'a Problem,
    inputs: &Named<View<'a>>,
    mut outputs: Named<ViewMut<'a>>,
    exec: &Exec,
) -> Result<()> {
    let given = Backward::<S>::new(problem, inputs, exec)?;
    if let Some(dbias) = outputs.take("dbias") {
        bias::gradient(&given, dbias.slice()?)?;
    }
    let (dk, dv) = (Shared::new(outputs.expect("dk")?.slice()?), Shared::new(outputs.expect("dv")?.slice()?));
    convert::rounded(outputs.expect("dq")?.slice::<S>()?, exec, |dq| {
        Sums { given: &given, dq: Shared::new(dq), dk, dv }.run()
    })
}

/// The outputs, with the inputs of their sums.
struct Sums<'s, 'a, S: Storage> {
    given: &'s Backward<'a, S>,
    dq: Shared<'s, S::Wide>,
    dk: Shared<'a, S>,
    dv: Shared<'a, S>,
}

/// Which sums a pass computes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Which {
    queries: bool,
    keys: bool,
}

/// The workspace of a thread.
struct Scratch<E> {
    block: Block<E>,
    tiles: Tiles<E>,
    /// `dq`, with a query per column.
    dq: Aligned<E>,
    /// `dk` of a stretch, with a key per row, and its row stride.
    dk: (Aligned<E>, usize),
    dv: (Aligned<E>, usize),
}

impl<E: Real> Scratch<E> {
    fn new<S: Storage<Wide = E>>(given: &Given<S>) -> Self {
        let Problem { width, value_width, keys, .. } = *given.problem;
        let block = Block::new(given);
        let rows = |stride: usize| (Aligned::new(STRETCH.min(keys) * stride), stride);
        let (dk, dv) = (rows(block.q_rows.1), rows(block.dy_rows.1));
        assert!(dk.1 >= width && dv.1 >= value_width);
        Scratch { block, tiles: Tiles::new(), dq: Aligned::new(width * QUERIES), dk, dv }
    }
}

impl<S: Storage> Sums<'_, '_, S> {
    fn run(&self) -> Result<()> {
        let Problem { batch, heads, key_heads, queries, keys, .. } = *self.given.given.problem;
        let threads = self.given.given.exec.threads;
        let (stretches, blocks) = (keys.div_ceil(STRETCH).max(1), queries.div_ceil(QUERIES));
        // Five products with the heads divided among threads, or seven with all work divided among them.
        if (batch * key_heads).next_multiple_of(threads) * 5 <= batch * key_heads * 7 {
            let both = Which { queries: true, keys: true };
            return self.each(batch * key_heads, |i, scratch| {
                let of = (i / key_heads, i % key_heads);
                (0..stretches).for_each(|stretch| self.stretch(of, stretch, both, scratch));
            });
        }
        self.each(batch * key_heads * stretches, |i, scratch| {
            let (i, stretch) = (i / stretches, i % stretches);
            self.stretch((i / key_heads, i % key_heads), stretch, Which { queries: false, keys: true }, scratch);
        })?;
        self.each(batch * heads * blocks, |i, scratch| {
            let (i, block) = (i / blocks, blocks - 1 - i % blocks);
            let (of, which) = ((i / heads, i % heads), Which { queries: true, keys: false });
            self.given.load(of, range(block, QUERIES, queries), &mut scratch.block);
            (0..stretches).for_each(|stretch| self.block(of, stretch, which, scratch));
        })
    }

    fn each(&self, count: usize, work: impl Fn(usize, &mut Scratch<S::Wide>) + Send + Sync) -> Result<()> {
        each_range(self.given.given.exec.threads, count, |range| {
            let mut scratch = Scratch::new(&self.given.given);
            range.for_each(|i| work(i, &mut scratch));
        })
    }

    /// A stretch of one key head: all queries of all heads that read it.
    fn stretch(&self, of: (usize, usize), stretch: usize, which: Which, scratch: &mut Scratch<S::Wide>) {
        let Problem { heads, key_heads, queries, keys, .. } = *self.given.given.problem;
        scratch.dk.0.fill(S::Wide::from_f64(0.0));
        scratch.dv.0.fill(S::Wide::from_f64(0.0));
        let together = heads / key_heads;
        for head in of.1 * together..(of.1 + 1) * together {
            for block in 0..queries.div_ceil(QUERIES) {
                let queries = range(block, QUERIES, queries);
                // The first stretch writes every row of dq; later ones only add to rows that attend to their keys.
                if stretch == 0 || self.given.given.problem.visible(queries.end - 1) > stretch * STRETCH {
                    self.given.load((of.0, head), queries, &mut scratch.block);
                    self.block((of.0, head), stretch, which, scratch);
                }
            }
        }
        if which.keys {
            self.write_keys(of, range(stretch, STRETCH, keys), scratch);
        }
    }

    /// The loaded block of queries with a stretch of keys.
    fn block(&self, of: (usize, usize), stretch: usize, which: Which, scratch: &mut Scratch<S::Wide>) {
        let Problem { width, keys, .. } = *self.given.given.problem;
        let visible = self.given.given.problem.visible(scratch.block.queries.end - 1);
        let stretch = range(stretch, STRETCH, keys);
        if stretch.start > 0 && visible <= stretch.start {
            return;
        }
        scratch.dq[..width * scratch.block.columns].fill(S::Wide::from_f64(0.0));
        for first in (stretch.start..stretch.end.min(visible)).step_by(KEYS) {
            let keys = first..stretch.end.min(visible).min(first + KEYS);
            if let Some(careful) = self.given.tile(of, &scratch.block, keys.clone(), &mut scratch.tiles) {
                self.add(of, keys, first - stretch.start, careful, which, scratch);
            }
        }
        if which.queries {
            self.write_queries(of, stretch.start > 0, scratch);
        }
    }

    /// Adds the contributions of a tile to all sums.
    fn add(
        &self,
        of: (usize, usize),
        keys: Range<usize>,
        row: usize,
        careful: bool,
        which: Which,
        scratch: &mut Scratch<S::Wide>,
    ) {
        let Problem { width, .. } = *self.given.given.problem;
        let (level, key_head) = (self.given.given.exec.level, self.given.given.problem.key_head(of.1));
        let Scratch { block, tiles, dq, dk, dv } = scratch;
        let (columns, count) = (block.columns, block.queries.len());
        let then = Then::Add;
        if which.queries {
            let left = self.given.given.k_tile((of.0, key_head), keys.clone(), &mut tiles.k).transposed();
            let (right, to) = ((&*tiles.cotangents, columns), (&mut **dq, columns));
            let care = if careful { Care::Right } else { Care::None };
            let computed = Computed::Right.of::<S>();
            let product = Product::new(left, right, [width, keys.len(), columns], to);
            Product { then, care, computed, ..product }.run(level);
        }
        if which.keys {
            let care = if careful { Care::Left } else { Care::None };
            let sums = [(&tiles.cotangents, &block.q_rows, dk), (&tiles.scores, &block.dy_rows, dv)];
            for (left, right, to) in sums {
                let (left, right) = (Left::rows(left, columns), (&*right.0, right.1));
                let (to, stride) = (&mut to.0[row * to.1..], to.1);
                let to = (to, stride);
                let computed = Computed::Left.of::<S>();
                let product = Product::new(left, right, [keys.len(), count, stride], to);
                Product { then, care, computed, ..product }.run(level);
            }
        }
    }

    fn write_queries(&self, of: (usize, usize), add: bool, scratch: &Scratch<S::Wide>) {
        let Problem { width, scale, q: strides, .. } = *self.given.given.problem;
        let queries = scratch.block.queries.clone();
        let factor = S::Wide::from_f64(scale);
        let from = (&*scratch.dq, scratch.block.columns);
        let write = WriteQueries { from, width, factor, to: &self.dq, strides, of, queries, add };
        S::Wide::dispatch(self.given.given.exec.level, write);
    }

    fn write_keys(&self, of: (usize, usize), keys: Range<usize>, scratch: &Scratch<S::Wide>) {
        let Problem { width, value_width, scale, k, v, .. } = *self.given.given.problem;
        let level = self.given.given.exec.level;
        let (scale, one) = (S::Wide::from_f64(scale), S::Wide::from_f64(1.0));
        let (dk, dv) = ((&*scratch.dk.0, scratch.dk.1), (&*scratch.dv.0, scratch.dv.1));
        let keys = || keys.clone();
        S::Wide::dispatch(
            level,
            WriteKeys::<S> { from: dk, width, factor: scale, to: &self.dk, strides: k, of, keys: keys() },
        );
        S::Wide::dispatch(
            level,
            WriteKeys::<S> { from: dv, width: value_width, factor: one, to: &self.dv, strides: v, of, keys: keys() },
        );
    }
}

/// Range `i` of the ranges of `size` elements that partition `all`.
pub fn range(i: usize, size: usize, all: usize) -> Range<usize> {
    i * size..all.min((i + 1) * size)
}

/// Writes columns of `dq` as rows, or adds them to the output.
struct WriteQueries<'s, E> {
    from: (&'s [E], usize),
    width: usize,
    factor: E,
    to: &'s Shared<'s, E>,
    strides: Strides,
    of: (usize, usize),
    queries: Range<usize>,
    add: bool,
}

impl<E: Real> Work<E> for WriteQueries<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) {
        let mut i = 0;
        while i < self.queries.len() {
            let mut d = 0;
            while d < self.width {
                let rows = from_columns::<V>(self.from, self.width, (i, d), V::splat(self.factor));
                let queries = V::LANES.min(self.queries.len() - i);
                unrolled!(lane < queries, {
                    let at = self.strides.at(self.of.0, self.of.1, self.queries.start + i + lane);
                    // SAFETY: only one thread at a time works on the queries of a head.
                    let to = unsafe { self.to.part(at + d, V::LANES.min(self.width - d)) };
                    let before = if self.add { V::load_partial(to) } else { V::zero() };
                    before.add(rows[lane]).store_partial(to);
                });
                d += V::LANES;
            }
            i += V::LANES;
        }
    }
}

/// Writes rows of `dk` or `dv`.
struct WriteKeys<'s, 'a, S: Storage> {
    from: (&'s [S::Wide], usize),
    width: usize,
    factor: S::Wide,
    to: &'s Shared<'a, S>,
    strides: Strides,
    of: (usize, usize),
    keys: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for WriteKeys<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let factor = V::splat(self.factor);
        for i in 0..self.keys.len() {
            let from = &self.from.0[i * self.from.1..][..self.from.1];
            let at = self.strides.at(self.of.0, self.of.1, self.keys.start + i);
            // SAFETY: stretches share no key.
            let to = unsafe { self.to.part(at, self.width) };
            let mut d = 0;
            while d < self.width {
                S::store(V::load(&from[d..]).mul(factor), &mut to[d..]);
                d += V::LANES;
            }
        }
    }
}
