//! `y` and `lse`, a block of queries at a time.

use super::amx::{Packed, pack_all, pack_columns};
use super::product::{AreFinite, Care, Computed, Product, Then};
use super::softmax::Weigh;
use super::tile::{Room, ToColumns, from_columns, lanes};
use super::{Given, KEYS, QUERIES, each_range, few};
use crate::cpu::aligned::Aligned;
use crate::cpu::pool::Shared;
use crate::cpu::{Exec, Real, Storage, Vector, Work, unrolled};
use crate::error::Result;
use crate::op::Named;
use crate::ops::attention::{Problem, Strides};
use crate::tensor::{Element, View, ViewMut};
use std::ops::Range;

/// Computes attention.
pub fn forward<'a, S: Storage>(
    problem: &'a Problem,
    inputs: &Named<View<'a>>,
    mut outputs: Named<ViewMut<'a>>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    let (y, lse) = (outputs.expect("y")?.slice()?, outputs.expect("lse")?.slice()?);
    if few::is_faster::<S>(&given) {
        return few::forward(&given, y, lse);
    }
    let packed = pack_all(&given)?;
    let call = Forward { given, packed, y: Shared::new(y), lse: Shared::new(lse) };
    let blocks = problem.batch * problem.heads * problem.queries.div_ceil(QUERIES);
    each_range(call.given.exec.threads, blocks, |range| {
        let mut scratch = Scratch::new(&call.given);
        range.for_each(|i| call.block(i, &mut scratch));
    })
}

struct Forward<'a, S: Storage> {
    given: Given<'a, S>,
    /// Keys, and columns of values, as packed left factors.
    packed: Option<[Vec<Packed>; 2]>,
    y: Shared<'a, S>,
    lse: Shared<'a, S::Wide>,
}

/// The workspace of a thread: matrices with a query per column.
struct Scratch<E> {
    lanes: usize,
    q: Aligned<E>,
    /// The packed queries, where keys are packed.
    q_tiles: Option<Packed>,
    scores: Aligned<E>,
    cover: Aligned<E>,
    y: Aligned<E>,
    largest: Aligned<E>,
    sums: Aligned<E>,
    decay: Aligned<E>,
    k: Room<E>,
    v: Room<E>,
}

impl<E: Real> Scratch<E> {
    fn new<S: Storage<Wide = E>>(given: &Given<S>) -> Self {
        let Problem { width, value_width, .. } = *given.problem;
        let column = || Aligned::new(QUERIES);
        Scratch {
            lanes: lanes::<E>(given.exec.level),
            q: Aligned::new(width * QUERIES),
            q_tiles: None,
            scores: Aligned::new(KEYS * QUERIES),
            cover: Aligned::new(KEYS * QUERIES),
            y: Aligned::new(value_width * QUERIES),
            largest: column(),
            sums: column(),
            decay: column(),
            k: Room::new(),
            v: Room::new(),
        }
    }
}

impl<S: Storage> Forward<'_, S> {
    /// Block `i`. The last blocks of a head come first, since causal queries have the most keys there.
    fn block(&self, i: usize, scratch: &mut Scratch<S::Wide>) {
        let Problem { heads, queries, .. } = *self.given.problem;
        let each = queries.div_ceil(QUERIES);
        let (of, block) = (i / each, each - 1 - i % each);
        let range = block * QUERIES..queries.min((block + 1) * QUERIES);
        self.queries((of / heads, of % heads), range, scratch);
    }

    fn queries(&self, of: (usize, usize), queries: Range<usize>, scratch: &mut Scratch<S::Wide>) {
        let Problem { value_width, scale, .. } = *self.given.problem;
        let (level, zero) = (self.given.exec.level, S::Wide::from_f64(0.0));
        let columns = queries.len().next_multiple_of(scratch.lanes);
        let (factor, from) = (S::Wide::from_f64(scale), self.given.q(of, queries.clone()));
        S::Wide::dispatch(level, ToColumns { from, factor, to: (&mut scratch.q, columns) });
        if self.packed.is_some() {
            let (width, split) = (self.given.problem.width, self.given.scaled() == Computed::Right);
            scratch.q_tiles = pack_columns(scratch.q_tiles.take(), (&scratch.q, columns), [columns, width], split);
        }
        scratch.y[..value_width * columns].fill(zero);
        scratch.largest.fill(S::Wide::from_f64(f64::NEG_INFINITY));
        scratch.sums.fill(zero);
        let visible = self.given.problem.visible(queries.end - 1);
        for first in (0..visible).step_by(KEYS) {
            self.tile(of, queries.clone(), first..visible.min(first + KEYS), columns, scratch);
        }
        self.finish(of, queries, columns, scratch);
    }

    fn tile(
        &self,
        of @ (batch, head): (usize, usize),
        queries: Range<usize>,
        keys: Range<usize>,
        columns: usize,
        scratch: &mut Scratch<S::Wide>,
    ) {
        let Problem { width, value_width, .. } = *self.given.problem;
        let level = self.given.exec.level;
        let is_covered = self.given.is_covered(&queries, &keys);
        if is_covered {
            let cover = self.given.cover(of, queries, keys.clone(), (&mut scratch.cover, columns));
            if !S::Wide::dispatch(level, cover) {
                return;
            }
        }
        let (key_head, count) = (self.given.problem.key_head(head), keys.len());
        let at = (batch * self.given.problem.key_heads + key_head) * self.given.problem.keys.div_ceil(KEYS);
        let at = at + keys.start / KEYS;
        let packed = self.packed.as_ref().map(|[k, v]| [&k[at], &v[at]]);
        let k = self.given.k_tile((batch, key_head), keys.clone(), &mut scratch.k);
        let (right, to) = ((&*scratch.q, columns), (&mut *scratch.scores, columns));
        let product = Product::new(k, right, [count, width, columns], to);
        let (computed, q_tiles) = (self.given.scaled().of::<S>(), packed.and(scratch.q_tiles.as_ref()));
        Product { computed, packed: [packed.map(|[k, _]| k), q_tiles], ..product }.run(level);
        let weigh = Weigh {
            scores: &mut scratch.scores,
            cover: is_covered.then_some(&*scratch.cover),
            keys: count,
            largest: &mut scratch.largest[..columns],
            sums: &mut scratch.sums[..columns],
            decay: &mut scratch.decay[..columns],
        };
        S::Wide::dispatch(level, weigh);
        let v = self.given.v_tile((batch, key_head), keys, &mut scratch.v);
        let finite = AreFinite { values: (v.values, v.down), rows: count, width: value_width };
        let careful = is_covered && !S::Wide::dispatch(level, finite);
        let (right, to) = ((&*scratch.scores, columns), (&mut *scratch.y, columns));
        let product = Product::new(v.transposed(), right, [value_width, count, columns], to);
        let (then, computed) = (Then::Scale(&scratch.decay), Computed::Right.of::<S>());
        let care = if careful { Care::Right } else { Care::None };
        Product { then, care, computed, packed: [packed.map(|[_, v]| v), None], ..product }.run(level);
    }

    fn finish(&self, (batch, head): (usize, usize), queries: Range<usize>, columns: usize, scratch: &Scratch<S::Wide>) {
        let Problem { heads, queries: all, value_width, y: strides, .. } = *self.given.problem;
        // SAFETY: blocks share no query.
        let lse = unsafe { self.lse.part((batch * heads + head) * all + queries.start, queries.len()) };
        for ((lse, largest), sum) in lse.iter_mut().zip(&*scratch.largest).zip(&*scratch.sums) {
            *lse = S::Wide::from_f64(largest.to_f64() + sum.to_f64().ln());
        }
        let finish = Finish::<S> {
            y: (&scratch.y, columns),
            sums: &scratch.sums,
            width: value_width,
            to: &self.y,
            strides,
            of: (batch, head),
            queries,
        };
        S::Wide::dispatch(self.given.exec.level, finish);
    }
}

/// Divides results by their sums of weights, and writes them as rows.
struct Finish<'s, 'a, S: Storage> {
    y: (&'s [S::Wide], usize),
    sums: &'s [S::Wide],
    width: usize,
    to: &'s Shared<'a, S>,
    strides: Strides,
    of: (usize, usize),
    queries: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for Finish<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let mut i = 0;
        while i < self.queries.len() {
            let sums = V::load(&self.sums[i..]);
            // A query without visible keys has a sum of 0 and results of 0; NaN stays.
            let factor = V::constant(1.0).div(sums).where_less(V::zero(), sums, sums);
            let mut d = 0;
            while d < self.width {
                let rows = from_columns::<V>(self.y, self.width, (i, d), factor);
                let queries = V::LANES.min(self.queries.len() - i);
                unrolled!(lane < queries, {
                    let at = self.strides.at(self.of.0, self.of.1, self.queries.start + i + lane);
                    // SAFETY: blocks share no query.
                    S::store(rows[lane], unsafe { self.to.part(at + d, V::LANES.min(self.width - d)) });
                });
                d += V::LANES;
            }
            i += V::LANES;
        }
    }
}
