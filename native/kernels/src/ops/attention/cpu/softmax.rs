//! The softmax of a tile of scores, and its gradient. A row is a key, a column a query.

use super::cover::covered;
use crate::cpu::{Real, Vector, Work};
use std::f64::consts::LOG2_E;

/// Turns scores into weights relative to the largest score so far, and updates the running statistics of each query.
pub struct Weigh<'a, E> {
    /// Scores; then weights.
    pub scores: &'a mut [E],
    /// The terms added to the scores: see [`cover`](super::cover).
    pub cover: Option<&'a [E]>,
    /// Number of keys.
    pub keys: usize,
    /// The largest scores so far.
    pub largest: &'a mut [E],
    /// The sums of weights so far.
    pub sums: &'a mut [E],
    /// Output: the factor by which earlier weights shrink, as the largest score has grown.
    pub decay: &'a mut [E],
}

/// Calls a method for several vectors of columns at once, then for single ones.
macro_rules! each_column {
    ($self:ident, $columns:expr, $method:ident) => {
        let (mut column, columns) = (0, $columns);
        while columns - column >= 4 * V::LANES {
            $self.$method::<V, 4>(column);
            column += 4 * V::LANES;
        }
        while column < columns {
            $self.$method::<V, 1>(column);
            column += V::LANES;
        }
    };
}

impl<E: Real> Work<E> for Weigh<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(mut self) {
        each_column!(self, self.largest.len(), weigh);
    }
}

impl<E: Real> Weigh<'_, E> {
    #[inline(always)]
    fn weigh<V: Vector<Element = E>, const N: usize>(&mut self, column: usize) {
        let before = load::<V, N>(&self.largest[column..]);
        let mut largest = before;
        match self.cover {
            Some(cover) => self.lay::<V, N>(column, cover, &mut largest),
            None => self.search::<V, N>(column, &mut largest),
        }
        store(largest, &mut self.largest[column..]);
        // Without a visible key so far the maximum is minus infinity, and minus infinity less itself would be NaN.
        for n in 0..N {
            largest[n] = largest[n].where_less(V::constant(f64::NEG_INFINITY), largest[n], V::zero());
        }
        let mut sums = load::<V, N>(&self.sums[column..]);
        let mut decay = before;
        for n in 0..N {
            decay[n] = exp(before[n].sub(largest[n]));
            sums[n] = sums[n].mul(decay[n]);
        }
        store(decay, &mut self.decay[column..]);
        let mut added = [V::zero(); N];
        for key in 0..self.keys {
            let row = &mut self.scores[key * self.largest.len() + column..][..N * V::LANES];
            let mut weights = load::<V, N>(row);
            for n in 0..N {
                weights[n] = exp(weights[n].sub(largest[n]));
                added[n] = added[n].add(weights[n]);
            }
            store(weights, row);
        }
        for n in 0..N {
            sums[n] = sums[n].add(added[n]);
        }
        store(sums, &mut self.sums[column..]);
    }

    #[inline(always)]
    fn search<V: Vector<Element = E>, const N: usize>(&self, column: usize, largest: &mut [V; N]) {
        for key in 0..self.keys {
            let scores = load::<V, N>(&self.scores[key * self.largest.len() + column..]);
            for n in 0..N {
                largest[n] = largest[n].max(scores[n]);
            }
        }
    }

    #[inline(always)]
    fn lay<V: Vector<Element = E>, const N: usize>(&mut self, column: usize, cover: &[E], largest: &mut [V; N]) {
        for key in 0..self.keys {
            let at = key * self.largest.len() + column;
            let mut scores = load::<V, N>(&self.scores[at..]);
            let cover = load::<V, N>(&cover[at..]);
            for n in 0..N {
                scores[n] = covered(scores[n], cover[n]);
                largest[n] = largest[n].max(scores[n]);
            }
            store(scores, &mut self.scores[at..]);
        }
    }
}

/// Turns scores into weights by the known `lse`, and cotangents of weights into those of scores.
pub struct Differentiate<'a, E> {
    /// Scores; then weights.
    pub scores: &'a mut [E],
    /// The terms added to the scores: see [`cover`](super::cover).
    pub cover: Option<&'a [E]>,
    /// Number of keys.
    pub keys: usize,
    /// Cotangents of weights; then of scores.
    pub cotangents: &'a mut [E],
    /// `lse` of each query; infinity where it has no visible keys.
    pub lse: &'a [E],
    /// `delta` of each query.
    pub delta: &'a [E],
}

impl<E: Real> Work<E> for Differentiate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(mut self) {
        each_column!(self, self.lse.len(), differentiate);
    }
}

impl<E: Real> Differentiate<'_, E> {
    #[inline(always)]
    fn differentiate<V: Vector<Element = E>, const N: usize>(&mut self, column: usize) {
        match self.cover {
            Some(cover) => self.rows::<V, N, true>(column, cover),
            None => self.rows::<V, N, false>(column, &[]),
        }
    }

    #[inline(always)]
    fn rows<V: Vector<Element = E>, const N: usize, const COVERED: bool>(&mut self, column: usize, cover: &[E]) {
        let lse = load::<V, N>(&self.lse[column..]);
        let delta = load::<V, N>(&self.delta[column..]);
        for key in 0..self.keys {
            let at = key * self.lse.len() + column;
            let mut weights = load::<V, N>(&self.scores[at..]);
            let mut cotangents = load::<V, N>(&self.cotangents[at..]);
            for n in 0..N {
                let mut score = weights[n];
                if COVERED {
                    score = covered(score, V::load(&cover[at + n * V::LANES..]));
                }
                weights[n] = exp(score.sub(lse[n]));
                cotangents[n] = weights[n].mul(cotangents[n].sub(delta[n]));
                if COVERED {
                    // A masked key has weight 0. Where the weight is 0 so is the cotangent, even if it was NaN.
                    let hidden = score.max(V::zero());
                    weights[n] = weights[n].where_less(V::constant(f64::NEG_INFINITY), score, hidden);
                    let tiny = V::constant(f32::MIN_POSITIVE as f64);
                    cotangents[n] = V::zero().where_less(weights[n], tiny, cotangents[n]);
                }
            }
            store(weights, &mut self.scores[at..]);
            store(cotangents, &mut self.cotangents[at..]);
        }
    }
}

/// `e^v` for v up to 0, except for rounding. The last digit does not matter, but 0 must give 1.
#[inline(always)]
pub fn exp<V: Vector>(v: V) -> V {
    v.mul(V::constant(LOG2_E)).exp2()
}

#[inline(always)]
fn load<V: Vector, const N: usize>(values: &[V::Element]) -> [V; N] {
    let values = &values[..N * V::LANES];
    let mut vectors = [V::zero(); N];
    for n in 0..N {
        vectors[n] = V::load(&values[n * V::LANES..]);
    }
    vectors
}

#[inline(always)]
fn store<V: Vector, const N: usize>(vectors: [V; N], values: &mut [V::Element]) {
    let values = &mut values[..N * V::LANES];
    for n in 0..N {
        vectors[n].store(&mut values[n * V::LANES..]);
    }
}
