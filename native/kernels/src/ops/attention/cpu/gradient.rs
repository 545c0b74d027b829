//! The common part of the gradient's passes: blocks of queries with their rows of `dy`, `lse` and `delta`, and for a
//! tile of keys the weights, recomputed from `lse`, and the cotangents of the scores.

use super::product::{AreFinite, Computed, Product};
use super::softmax::Differentiate;
use super::tile::{Room, Rows, ToColumns, Widen, lanes};
use super::{Given, KEYS, QUERIES};
use crate::cpu::aligned::Aligned;
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::ops::attention::Problem;
use crate::tensor::{Element, View};
use std::ops::Range;

/// The inputs of weights and of their cotangents.
pub struct Backward<'a, S: Storage> {
    /// The inputs of scores.
    pub given: Given<'a, S>,
    y: &'a [S],
    lse: &'a [S::Wide],
    dy: &'a [S],
    dlse: Option<&'a [S::Wide]>,
}

/// A block of queries with their cotangents, `lse` and `delta`.
pub struct Block<E> {
    lanes: usize,
    /// The range of queries.
    pub queries: Range<usize>,
    /// Columns of its matrices: a whole number of vectors.
    pub columns: usize,
    /// Scaled queries, one per column.
    q: Aligned<E>,
    /// Cotangents of results, one per column.
    dy: Aligned<E>,
    lse: Aligned<E>,
    delta: Aligned<E>,
    /// Queries as rows, and their row stride.
    pub q_rows: (Aligned<E>, usize),
    /// Cotangents as rows, and their row stride.
    pub dy_rows: (Aligned<E>, usize),
    are_finite: bool,
}

/// Workspace for a tile of scores and of their cotangents.
pub struct Tiles<E> {
    /// Scores; then weights.
    pub scores: Aligned<E>,
    /// Cotangents of weights; then of scores.
    pub cotangents: Aligned<E>,
    cover: Aligned<E>,
    /// Workspace for a copy of a tile of keys.
    pub k: Room<E>,
    v: Room<E>,
}

impl<E: Real> Block<E> {
    /// Allocates a block.
    pub fn new<S: Storage<Wide = E>>(given: &Given<S>) -> Self {
        let Problem { width, value_width, .. } = *given.problem;
        let lanes = lanes::<E>(given.exec.level);
        let rows = |width: usize| {
            let stride = width.next_multiple_of(lanes);
            (Aligned::new(QUERIES * stride + MAX_LANES), stride)
        };
        Block {
            lanes,
            queries: 0..0,
            columns: 0,
            q: Aligned::new(width * QUERIES),
            dy: Aligned::new(value_width * QUERIES),
            lse: Aligned::new(QUERIES),
            delta: Aligned::new(QUERIES),
            q_rows: rows(width),
            dy_rows: rows(value_width),
            are_finite: true,
        }
    }
}

impl<E: Real> Tiles<E> {
    /// Allocates nothing yet.
    pub fn new() -> Self {
        let tile = || Aligned::new(KEYS * QUERIES);
        Tiles { scores: tile(), cotangents: tile(), cover: tile(), k: Room::new(), v: Room::new() }
    }
}

impl<'a, S: Storage> Backward<'a, S> {
    /// The inputs, from a checked call.
    pub fn new(problem: &'a Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        Ok(Backward {
            given: Given::new(problem, inputs, exec)?,
            y: inputs.get("y")?.slice()?,
            lse: inputs.get("lse")?.slice()?,
            dy: inputs.get("dy")?.slice()?,
            dlse: inputs.find("dlse").map(View::slice).transpose()?,
        })
    }

    /// Loads a block of a head's queries.
    pub fn load(&self, of: (usize, usize), queries: Range<usize>, block: &mut Block<S::Wide>) {
        let Problem { y, value_width, scale, .. } = *self.given.problem;
        let level = self.given.exec.level;
        block.columns = queries.len().next_multiple_of(block.lanes);
        block.queries = queries.clone();
        let q = self.given.q(of, queries.clone());
        let dy = Rows::of(self.dy, &y, value_width, of, queries.clone());
        let (scale, one) = (S::Wide::from_f64(scale), S::Wide::from_f64(1.0));
        S::Wide::dispatch(level, ToColumns { from: q, factor: scale, to: (&mut block.q, block.columns) });
        S::Wide::dispatch(level, ToColumns { from: dy, factor: one, to: (&mut block.dy, block.columns) });
        block.are_finite = true;
        for (from, to) in [(q, &mut block.q_rows), (dy, &mut block.dy_rows)] {
            let stride = to.1;
            S::Wide::dispatch(level, Widen { from, to: (&mut to.0, stride) });
            let rows = AreFinite { values: (&to.0, stride), rows: from.count, width: from.width };
            block.are_finite &= S::Wide::dispatch(level, rows);
        }
        self.load_sums(of, Rows::of(self.y, &y, value_width, of, queries), block);
    }

    /// Loads `lse` and `delta`.
    fn load_sums(&self, (batch, head): (usize, usize), y: Rows<S>, block: &mut Block<S::Wide>) {
        let Problem { heads, queries, .. } = *self.given.problem;
        let first = (batch * heads + head) * queries + block.queries.start;
        // With infinity all weights are 0: for queries without visible keys, and for the padding columns.
        block.lse.fill(S::Wide::from_f64(f64::INFINITY));
        block.delta.fill(S::Wide::from_f64(0.0));
        for i in 0..y.count {
            if self.lse[first + i].to_f64() != f64::NEG_INFINITY {
                block.lse[i] = self.lse[first + i];
            }
        }
        let dlse = self.dlse.map(|dlse| &dlse[first..]);
        let delta = Delta { y, dy: (&block.dy_rows.0, block.dy_rows.1), dlse, to: &mut block.delta };
        S::Wide::dispatch(self.given.exec.level, delta);
    }

    /// Computes the weights of a tile and the cotangents of its scores. Returns whether products with them must guard
    /// masked keys against NaN and infinity, or `None` if the whole tile is masked.
    pub fn tile(
        &self,
        of @ (batch, head): (usize, usize),
        block: &Block<S::Wide>,
        keys: Range<usize>,
        tiles: &mut Tiles<S::Wide>,
    ) -> Option<bool> {
        let Problem { width, value_width, .. } = *self.given.problem;
        let (level, columns) = (self.given.exec.level, block.columns);
        let is_covered = self.given.is_covered(&block.queries, &keys);
        if is_covered {
            let cover = self.given.cover(of, block.queries.clone(), keys.clone(), (&mut tiles.cover, columns));
            if !S::Wide::dispatch(level, cover) {
                return None;
            }
        }
        let (key_head, count) = (self.given.problem.key_head(head), keys.len());
        let k = self.given.k_tile((batch, key_head), keys.clone(), &mut tiles.k);
        let v = self.given.v_tile((batch, key_head), keys, &mut tiles.v);
        let product = |left, right, depth, to, computed: Computed| {
            let product = Product::new(left, (right, columns), [count, depth, columns], (to, columns));
            Product { computed: computed.of::<S>(), ..product }.run(level);
        };
        product(k, &block.q, width, &mut tiles.scores, self.given.scaled());
        product(v, &block.dy, value_width, &mut tiles.cotangents, Computed::Neither);
        let differentiate = Differentiate {
            scores: &mut tiles.scores,
            cover: is_covered.then_some(&*tiles.cover),
            keys: count,
            cotangents: &mut tiles.cotangents,
            lse: &block.lse[..columns],
            delta: &block.delta[..columns],
        };
        S::Wide::dispatch(level, differentiate);
        let are_finite = || S::Wide::dispatch(level, AreFinite { values: (k.values, k.down), rows: count, width });
        Some(is_covered && !(block.are_finite && are_finite()))
    }
}

/// Computes `delta` of rows.
struct Delta<'a, S: Storage> {
    y: Rows<'a, S>,
    dy: (&'a [S::Wide], usize),
    dlse: Option<&'a [S::Wide]>,
    to: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Delta<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for i in 0..self.y.count {
            let (y, dy) = (self.y.row(i), &self.dy.0[i * self.dy.1..]);
            let (mut sum, mut d) = (V::zero(), 0);
            while d < y.len() {
                sum = S::load::<V>(&y[d..]).mul_add(V::load(&dy[d..]), sum);
                d += V::LANES;
            }
            let dlse = match self.dlse {
                Some(dlse) => dlse[i],
                None => S::Wide::from_f64(0.0),
            };
            self.to[i] = Vector::sub(sum.sum(), dlse);
        }
    }
}
