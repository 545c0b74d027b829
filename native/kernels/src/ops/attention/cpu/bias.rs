//! `dbias`: cotangents of scores, summed over the axes along which the bias is broadcast.
//!
//! This is a separate pass, which recomputes the scores. A task owns a part of the bias and sums everything that
//! contributes to it, in an order that does not depend on the thread.

use super::backward::{STRETCH, range};
use super::gradient::{Backward, Block, Tiles};
use super::tile::from_columns;
use super::{KEYS, QUERIES, each_range};
use crate::cpu::pool::Shared;
use crate::cpu::{Real, Storage, Vector, Work};
use crate::error::Result;
use crate::ops::attention::{Problem, Repeated};
use crate::tensor::Element;
use std::ops::Range;

/// Computes `dbias`.
pub fn gradient<S: Storage>(given: &Backward<S>, dbias: &mut [S::Wide]) -> Result<()> {
    let Problem { batch, heads, queries, keys, bias, .. } = *given.given.problem;
    let strides = bias.expect("a bias has a gradient");
    dbias.fill(S::Wide::from_f64(0.0));
    let sums = Sums { given, strides, dbias: Shared::new(dbias) };
    let all = [batch, heads, queries.div_ceil(QUERIES), keys.div_ceil(STRETCH)];
    // A broadcast axis is not divided; any other axis is divided into its parts.
    let pieces: [usize; 4] = std::array::from_fn(|axis| if strides[axis] == 0 { 1 } else { all[axis] });
    each_range(given.given.exec.threads, pieces.iter().product(), |range| {
        let (mut block, mut tiles) = (Block::new(&given.given), Tiles::new());
        for mut i in range {
            let mut parts = [const { 0..0 }; 4];
            for axis in (0..4).rev() {
                let at = i % pieces[axis];
                parts[axis] = if strides[axis] == 0 { 0..all[axis] } else { at..at + 1 };
                i /= pieces[axis];
            }
            sums.piece(parts, &mut block, &mut tiles);
        }
    })
}

struct Sums<'s, 'a, S: Storage> {
    given: &'s Backward<'a, S>,
    strides: Repeated,
    dbias: Shared<'s, S::Wide>,
}

impl<S: Storage> Sums<'_, '_, S> {
    /// Sums over ranges of batches, heads, blocks of queries and stretches of keys.
    fn piece(&self, parts: [Range<usize>; 4], block: &mut Block<S::Wide>, tiles: &mut Tiles<S::Wide>) {
        let [batches, heads, blocks, keys] = parts;
        for batch in batches {
            for head in heads.clone() {
                for of in blocks.clone() {
                    self.given.load((batch, head), range(of, QUERIES, self.given.given.problem.queries), block);
                    self.add_all((batch, head), keys.clone(), block, tiles);
                }
            }
        }
    }

    /// Adds the contributions of the loaded block of queries with stretches of keys.
    fn add_all(&self, of: (usize, usize), parts: Range<usize>, block: &mut Block<S::Wide>, tiles: &mut Tiles<S::Wide>) {
        let problem = self.given.given.problem;
        let visible = problem.visible(block.queries.end - 1);
        let all = parts.start * STRETCH..visible.min(parts.end * STRETCH);
        for first in all.clone().step_by(KEYS) {
            let keys = first..all.end.min(first + KEYS);
            if self.given.tile(of, block, keys.clone(), tiles).is_some() {
                self.add(of, keys, block, tiles);
            }
        }
    }

    fn add(&self, of: (usize, usize), keys: Range<usize>, block: &Block<S::Wide>, tiles: &Tiles<S::Wide>) {
        let [of_batch, of_head, query, key] = self.strides;
        let start = of.0 * of_batch + of.1 * of_head + block.queries.start * query + keys.start * key;
        let from = (&*tiles.cotangents, block.columns);
        let (queries, keys) = (block.queries.len(), keys.len());
        let add = AddTile { from, queries, keys, to: &self.dbias, start, query, key };
        S::Wide::dispatch(self.given.given.exec.level, add);
    }
}

/// Adds a tile to the gradient of the bias.
struct AddTile<'s, E> {
    /// The tile: a key per row; columns without a query are 0.
    from: (&'s [E], usize),
    queries: usize,
    keys: usize,
    to: &'s Shared<'s, E>,
    start: usize,
    query: usize,
    key: usize,
}

impl<E: Real> Work<E> for AddTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) {
        match (self.query, self.key) {
            (0, _) => self.sums_of_keys::<V>(),
            (_, 0) => self.sums_of_queries::<V>(),
            _ => self.all::<V>(),
        }
    }
}

impl<E: Real> AddTile<'_, E> {
    #[inline(always)]
    fn sums_of_keys<V: Vector<Element = E>>(&self) {
        for key in 0..self.keys {
            let row = &self.from.0[key * self.from.1..][..self.from.1];
            let (mut sum, mut i) = (V::zero(), 0);
            while i < row.len() {
                sum = sum.add(V::load(&row[i..]));
                i += V::LANES;
            }
            self.put(key * self.key, sum.sum());
        }
    }

    #[inline(always)]
    fn sums_of_queries<V: Vector<Element = E>>(&self) {
        let mut first = 0;
        while first < self.queries {
            let mut sum = V::zero();
            for key in 0..self.keys {
                sum = sum.add(V::load(&self.from.0[key * self.from.1 + first..]));
            }
            let sums = sum.lanes();
            for lane in 0..V::LANES.min(self.queries - first) {
                self.put((first + lane) * self.query, sums[lane]);
            }
            first += V::LANES;
        }
    }

    #[inline(always)]
    fn all<V: Vector<Element = E>>(&self) {
        let (mut i, one) = (0, V::constant(1.0));
        while i < self.queries {
            let mut key = 0;
            while key < self.keys {
                let rows = from_columns::<V>(self.from, self.keys, (i, key), one);
                for lane in 0..V::LANES.min(self.queries - i) {
                    let at = self.start + (i + lane) * self.query + key;
                    // SAFETY: pieces share no part of the bias.
                    let to = unsafe { self.to.part(at, V::LANES.min(self.keys - key)) };
                    V::load_partial(to).add(rows[lane]).store_partial(to);
                }
                key += V::LANES;
            }
            i += V::LANES;
        }
    }

    #[inline(always)]
    fn put(&self, at: usize, value: E) {
        // SAFETY: pieces share no part of the bias.
        let to = unsafe { self.to.part(self.start + at, 1) };
        to[0] = Vector::add(to[0], value);
    }
}
