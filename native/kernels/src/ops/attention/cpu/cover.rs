//! The cover of a tile of scores: the terms to be added to them, which are the bias, or minus infinity where a key is
//! masked.

use crate::cpu::vector::{MAX_LANES, transpose};
use crate::cpu::{Real, Vector, Work};
use crate::ops::attention::Repeated;
use std::ops::Range;

/// A tensor over all scores, broadcast along some axes.
#[derive(Clone, Copy)]
pub struct Over<'a, T> {
    /// The elements from the given batch and head on.
    pub values: &'a [T],
    /// Stride between queries.
    pub query: usize,
    /// Stride between keys: 1, or 0 if broadcast.
    pub key: usize,
}

impl<'a, T: Copy> Over<'a, T> {
    /// The part of the tensor for a batch and a head.
    pub fn new(values: &'a [T], strides: Repeated, batch: usize, head: usize) -> Self {
        let [of_batch, of_head, query, key] = strides;
        Over { values: &values[batch * of_batch + head * of_head..], query, key }
    }

    /// The element of a query and a key.
    #[inline(always)]
    pub fn at(&self, query: usize, key: usize) -> T {
        self.values[query * self.query + key * self.key]
    }
}

/// Computes the cover of a tile, with a key per row and a query per column.
pub struct Cover<'a, E> {
    /// The bias.
    pub bias: Option<Over<'a, E>>,
    /// The mask: a key is visible where it is not 0.
    pub mask: Option<Over<'a, u8>>,
    /// With a causal mask, the position of the first query among the keys.
    pub causal: Option<i64>,
    /// The tile's queries.
    pub queries: Range<usize>,
    /// The tile's keys.
    pub keys: Range<usize>,
    /// The output, and its number of columns. In columns beyond the last query all keys are masked.
    pub to: (&'a mut [E], usize),
}

impl<E: Real> Work<E> for Cover<'_, E> {
    /// Whether any key of the tile is visible to any query.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<Element = E>>(mut self) -> bool {
        let mut key = 0;
        let mut seen = V::zero();
        while key < self.keys.len() {
            seen = seen.add(if self.is_alike() { self.alike(key) } else { self.squares(key) });
            key += V::LANES;
        }
        seen.sum().to_f64() != 0.0
    }
}

/// 1 for a visible key, 0 for minus infinity. NaN is the bias of a visible key, and stays.
#[inline(always)]
fn is_seen<V: Vector>(cover: V) -> V {
    V::constant(1.0).where_less(V::constant(f64::NEG_INFINITY), cover, cover).max(V::zero())
}

/// Adds the cover to a score. Minus infinity masks every score, even NaN.
#[inline(always)]
pub fn covered<V: Vector>(score: V, cover: V) -> V {
    score.add(cover).where_less(V::constant(f64::NEG_INFINITY), cover, cover)
}

impl<E: Real> Cover<'_, E> {
    /// Whether bias and mask are broadcast along queries.
    #[inline(always)]
    fn is_alike(&self) -> bool {
        let of_bias = match &self.bias {
            Some(bias) => bias.query,
            None => 0,
        };
        match &self.mask {
            Some(mask) => of_bias + mask.query == 0,
            None => of_bias == 0,
        }
    }

    /// Writes the rows of a vector of keys, where bias and mask are broadcast along queries.
    #[inline(always)]
    fn alike<V: Vector<Element = E>>(&mut self, key: usize) -> V {
        let row = self.row::<V>(self.queries.start, key).lanes();
        let mut seen = V::zero();
        for k in 0..V::LANES.min(self.keys.len() - key) {
            let mut first = 0;
            while first < self.to.1 {
                seen = seen.add(self.put(first, key + k, V::splat(row[k])));
                first += V::LANES;
            }
        }
        seen
    }

    /// Writes the rows of a vector of keys, by transposing squares.
    #[inline(always)]
    fn squares<V: Vector<Element = E>>(&mut self, key: usize) -> V {
        let (mut seen, mut first) = (V::zero(), 0);
        while first < self.to.1 {
            let mut square = [V::constant(f64::NEG_INFINITY); MAX_LANES];
            for lane in 0..V::LANES.min(self.queries.len().saturating_sub(first)) {
                square[lane] = self.row::<V>(self.queries.start + first + lane, key);
            }
            transpose(&mut square);
            for k in 0..V::LANES.min(self.keys.len() - key) {
                seen = seen.add(self.put(first, key + k, square[k]));
            }
            first += V::LANES;
        }
        seen
    }

    /// Bias and mask of one query for a vector of keys, from a key of the tile on.
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
            let seen = if mask.key == 1 {
                load_bytes(&mask.values[query * mask.query..][keys])
            } else {
                V::constant(f64::from(mask.at(query, 0)))
            };
            row = row.where_less(V::zero(), seen, V::constant(f64::NEG_INFINITY));
        }
        row
    }

    /// Writes the cover of one key for a vector of queries, with the causal mask applied. Returns 1 for each query that
    /// sees the key.
    #[inline(always)]
    fn put<V: Vector<Element = E>>(&mut self, first: usize, key: usize, cover: V) -> V {
        let cover = match self.causal {
            Some(offset) => {
                let of_first = (self.queries.start + first) as i64;
                // Lanes below `hidden` are queries before the key. Subtractions saturate, since any i64 is a valid
                // offset.
                let hidden = ((self.keys.start + key) as i64).saturating_sub(offset).saturating_sub(of_first);
                let hidden = V::constant(hidden.clamp(0, MAX_LANES as i64) as f64);
                V::constant(f64::NEG_INFINITY).where_less(numbers(), hidden, cover)
            }
            None => cover,
        };
        cover.store(&mut self.to.0[key * self.to.1 + first..]);
        is_seen(cover)
    }
}

/// The indices of the lanes.
#[inline(always)]
fn numbers<V: Vector>() -> V {
    const NUMBERS: [u8; MAX_LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    V::load_u8(&NUMBERS)
}

/// Loads bytes as numbers; lanes past the end of the slice are zero.
#[inline(always)]
fn load_bytes<V: Vector>(values: &[u8]) -> V {
    if values.len() >= V::LANES {
        return V::load_u8(values);
    }
    let mut bytes = [0; MAX_LANES];
    bytes[..values.len()].copy_from_slice(values);
    V::load_u8(&bytes)
}
