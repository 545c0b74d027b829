//! What lies over the scores of a tile: the bias, and minus infinity where a query sees no key.

use super::tile::transpose;
use crate::attention::Repeated;
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Real, Vector, Work};
use std::ops::Range;

/// A tensor over all scores, some of whose axes are repeated.
#[derive(Clone, Copy)]
pub struct Over<'a, T> {
    /// Its elements from that of the batch and head on.
    pub values: &'a [T],
    /// From query to query.
    pub query: usize,
    /// From key to key: 1, or 0 where it is repeated.
    pub key: usize,
}

impl<'a, T: Copy> Over<'a, T> {
    /// That of a batch and a head.
    pub fn new(values: &'a [T], strides: Repeated, batch: usize, head: usize) -> Self {
        let [of_batch, of_head, query, key] = strides;
        Over { values: &values[batch * of_batch + head * of_head..], query, key }
    }

    /// That of a query and a key.
    #[inline(always)]
    pub fn at(&self, query: usize, key: usize) -> T {
        self.values[query * self.query + key * self.key]
    }
}

/// Fills the cover of a tile: a row a key, a column a query.
pub struct Cover<'a, E> {
    /// The bias.
    pub bias: Option<Over<'a, E>>,
    /// Which keys are seen: not 0.
    pub mask: Option<Over<'a, u8>>,
    /// The position of the first query of all among the keys, if they see no later ones.
    pub causal: Option<i64>,
    /// The tile's queries.
    pub queries: Range<usize>,
    /// The tile's keys.
    pub keys: Range<usize>,
    /// What is filled, and its columns. Those beyond the last query see nothing.
    pub to: (&'a mut [E], usize),
}

impl<E: Real> Work<E> for Cover<'_, E> {
    /// Whether any query sees any key.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) -> bool {
        let (mut seen, columns) = (V::zero(), self.to.1);
        let mut first = 0;
        while first < columns {
            let mut key = 0;
            while key < self.keys.len() {
                let square = self.square::<V>(first, key);
                for k in 0..V::LANES.min(self.keys.len() - key) {
                    let cover = self.hide_later::<V>(first, key + k, square[k]);
                    cover.store(&mut self.to.0[(key + k) * columns + first..]);
                    seen = seen.add(is_seen(cover));
                }
                key += V::LANES;
            }
            first += V::LANES;
        }
        seen.sum().to_f64() != 0.0
    }
}

/// 1, or 0 for minus infinity; NaN is a bias of something seen, and stays.
#[inline(always)]
fn is_seen<V: Vector>(cover: V) -> V {
    V::constant(1.0).where_less(V::constant(f64::NEG_INFINITY), cover, cover).max(V::zero())
}

/// A score under its cover: minus infinity hides whatever it is.
#[inline(always)]
pub fn covered<V: Vector>(score: V, cover: V) -> V {
    score.add(cover).where_less(V::constant(f64::NEG_INFINITY), cover, cover)
}

impl<E: Real> Cover<'_, E> {
    /// Bias and mask of as many keys as a vector has lanes for as many queries, a vector a key.
    #[inline(always)]
    fn square<V: Vector<Element = E>>(&self, first: usize, key: usize) -> [V; MAX_LANES] {
        let mut square = [V::constant(f64::NEG_INFINITY); MAX_LANES];
        let rows = V::LANES.min(self.queries.len().saturating_sub(first));
        for lane in 0..rows {
            square[lane] = self.row::<V>(self.queries.start + first + lane, key);
        }
        if self.bias.is_some() || self.mask.is_some() || first + V::LANES > self.queries.len() {
            transpose(&mut square);
        }
        square
    }

    /// Bias and mask of a query for the keys from one of the tile's on.
    #[inline(always)]
    fn row<V: Vector<Element = E>>(&self, query: usize, key: usize) -> V {
        let keys = self.keys.start + key..self.keys.end.min(self.keys.start + key + V::LANES);
        let mut row = V::zero();
        if let Some(bias) = &self.bias {
            row = if bias.key == 1 {
                V::load_partial(&bias.values[query * bias.query..][keys.clone()])
            } else {
                V::splat(bias.at(query, 0))
            };
        }
        if let Some(mask) = &self.mask {
            let mut seen = [E::from_f64(0.0); MAX_LANES];
            for lane in 0..keys.len() {
                seen[lane] = E::from_f64(if mask.at(query, keys.start + lane) == 0 { 0.0 } else { 1.0 });
            }
            row = row.where_less(V::zero(), V::load(&seen), V::constant(f64::NEG_INFINITY));
        }
        row
    }

    /// Hides a key from the queries before it.
    #[inline(always)]
    fn hide_later<V: Vector<Element = E>>(&self, first: usize, key: usize, cover: V) -> V {
        let Some(offset) = self.causal else { return cover };
        let of_first = (self.queries.start + first) as i64;
        // Lanes below this one are earlier queries; it is cut off where numbers may not fit.
        let hidden = ((self.keys.start + key) as i64).saturating_sub(offset).saturating_sub(of_first);
        let hidden = V::constant(hidden.clamp(0, MAX_LANES as i64) as f64);
        let mut lanes = [E::from_f64(0.0); MAX_LANES];
        for lane in 0..V::LANES {
            lanes[lane] = E::from_f64(lane as f64);
        }
        V::constant(f64::NEG_INFINITY).where_less(V::load(&lanes), hidden, cover)
    }
}
