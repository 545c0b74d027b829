//! Few queries over many keys, as in decoding: bound by memory bandwidth, so keys and values are read once.
//!
//! A task takes a stretch of keys of one key head, for all queries of all heads that read it (split-K). A tile of keys
//! stays in the first-level cache while each query takes its dot products with them, by vectors along the width. Each
//! stretch yields weighted sums of values with their largest score and their sum of weights; these are combined in
//! order. The division into stretches depends on the sizes alone.

use super::cover::Over;
use super::softmax::exp;
use super::tile::{Rows, lanes};
use super::{Given, KEYS, each_range};
use crate::cpu::pool::Shared;
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Real, Storage, Vector, Work, unrolled};
use crate::error::Result;
use crate::ops::attention::Problem;
use crate::tensor::Element;
use std::ops::Range;

/// The fewest keys of a stretch: combining shorter ones would take longer than reading them.
const SHORTEST: usize = 512;

/// The number of tasks, if there are enough keys for them.
const PIECES: usize = 64;

/// Whether this is faster than columns of queries, most of which would be padding: a query costs about a quarter of a
/// vector of columns, if everything is in the caches.
pub fn is_faster<S: Storage>(given: &Given<S>) -> bool {
    let lanes = lanes::<S::Wide>(given.exec.level);
    lanes > 1 && (1..=(lanes / 5).max(1)).contains(&given.problem.queries)
}

/// Computes attention.
pub fn forward<S: Storage>(given: &Given<S>, y: &mut [S], lse: &mut [S::Wide]) -> Result<()> {
    let Problem { batch, heads, key_heads, queries, keys, value_width, .. } = *given.problem;
    let stretches = (PIECES / (batch * key_heads).max(1)).clamp(1, (keys / SHORTEST).max(1));
    let together = heads / key_heads * queries;
    // For each task and query: the sums, the largest score and the sum of weights.
    let stride = value_width + 2;
    let zero = S::Wide::from_f64(0.0);
    let mut partial = vec![zero; batch * key_heads * stretches * together * stride];
    let parts = Shared::new(&mut partial);
    each_range(given.exec.threads, batch * key_heads * stretches, |range| {
        let mut q = vec![zero; given.problem.width.next_multiple_of(MAX_LANES) * together];
        for i in range {
            let (of, stretch) = (i / stretches, i % stretches);
            let keys = stretch * keys / stretches..(stretch + 1) * keys / stretches;
            // SAFETY: each task has a part of its own.
            let to = unsafe { parts.part(i * together * stride, together * stride) };
            let piece = Piece { given, of: (of / key_heads, of % key_heads), keys, q: &mut q, to, stride };
            S::Wide::dispatch(given.exec.level, piece);
        }
    })?;
    let (y, lse) = (Shared::new(y), Shared::new(lse));
    each_range(given.exec.threads, batch * heads * queries, |rows| {
        S::Wide::dispatch(
            given.exec.level,
            Join { given, partial: &partial, stretches, stride, rows, y: &y, lse: &lse },
        );
    })
}

/// A task: one stretch of a key head's keys.
struct Piece<'s, 'a, S: Storage> {
    given: &'s Given<'a, S>,
    /// Batch and key head.
    of: (usize, usize),
    keys: Range<usize>,
    /// Workspace for the queries.
    q: &'s mut [S::Wide],
    to: &'s mut [S::Wide],
    stride: usize,
}

impl<S: Storage> Work<S::Wide> for Piece<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(mut self) {
        let Problem { heads, key_heads, queries, value_width, .. } = *self.given.problem;
        let together = heads / key_heads * queries;
        self.load::<V>();
        for row in 0..together {
            self.to[row * self.stride + value_width] = S::Wide::from_f64(f64::NEG_INFINITY);
        }
        let mut first = self.keys.start;
        while first < self.keys.end {
            let tile = first..self.keys.end.min(first + KEYS);
            let k = self.given.k(self.of, tile.clone());
            let v = self.given.v(self.of, tile.clone());
            for row in 0..together {
                self.row::<V>(row, tile.clone(), k, v);
            }
            first += KEYS;
        }
    }
}

impl<S: Storage> Piece<'_, '_, S> {
    /// The head of row `row` of the queries that share the key head, and its index in that head.
    #[inline(always)]
    fn query(&self, row: usize) -> (usize, usize) {
        let Problem { heads, key_heads, queries, .. } = *self.given.problem;
        (self.of.1 * (heads / key_heads) + row / queries, row % queries)
    }

    /// Loads the queries, scaled and padded with zeros.
    #[inline(always)]
    fn load<V: Vector<Element = S::Wide>>(&mut self) {
        let Problem { width, scale, .. } = *self.given.problem;
        let stride = width.next_multiple_of(MAX_LANES);
        for row in 0..self.q.len() / stride.max(1) {
            let (head, query) = self.query(row);
            let from = self.given.q((self.of.0, head), query..query + 1).row(0);
            let mut d = 0;
            while d < width {
                S::load::<V>(&from[d..]).mul(V::constant(scale)).store(&mut self.q[row * stride + d..]);
                d += V::LANES;
            }
        }
    }

    /// Adds a tile of keys to the sums of one query.
    #[inline(always)]
    fn row<V: Vector<Element = S::Wide>>(&mut self, row: usize, tile: Range<usize>, k: Rows<S>, v: Rows<S>) {
        let Problem { width, value_width, .. } = *self.given.problem;
        let (head, query) = self.query(row);
        let count = self.given.problem.visible(query).min(tile.end).saturating_sub(tile.start);
        if count == 0 {
            return;
        }
        let mut scores = [S::Wide::from_f64(f64::NEG_INFINITY); KEYS];
        let q = &self.q[row * width.next_multiple_of(MAX_LANES)..];
        dots::<V, S>(q, k, &mut scores[..count]);
        self.cover(head, query, tile.start, &mut scores[..count]);
        let to = &mut self.to[row * self.stride..][..self.stride];
        let (sums, rest) = to.split_at_mut(value_width);
        let (decay, sum) = weigh::<V>(&mut scores, &mut rest[0]);
        rest[1] = Vector::mul_add(rest[1], decay, sum);
        let mut d = 0;
        while d < value_width {
            if value_width - d >= 4 * V::LANES {
                add::<V, S, 4>(&scores[..count], v, d, decay, sums);
                d += 4 * V::LANES;
            } else {
                add::<V, S, 1>(&scores[..count], v, d, decay, sums);
                d += V::LANES;
            }
        }
    }

    /// Adds the bias to scores, and masks them.
    #[inline(always)]
    fn cover(&self, head: usize, query: usize, first: usize, scores: &mut [S::Wide]) {
        let Problem { bias, mask, .. } = *self.given.problem;
        if let (Some(values), Some(strides)) = (self.given.bias, bias) {
            let bias = Over::new(values, strides, self.of.0, head);
            for key in 0..scores.len() {
                scores[key] = Vector::add(scores[key], bias.at(query, first + key));
            }
        }
        if let (Some(values), Some(strides)) = (self.given.mask, mask) {
            let mask = Over::new(values, strides, self.of.0, head);
            for key in 0..scores.len() {
                if mask.at(query, first + key) == 0 {
                    scores[key] = S::Wide::from_f64(f64::NEG_INFINITY);
                }
            }
        }
    }
}

/// The scores of one query.
#[inline(always)]
fn dots<V: Vector<Element = S::Wide>, S: Storage>(q: &[S::Wide], k: Rows<S>, scores: &mut [S::Wide]) {
    let mut key = 0;
    while key < scores.len() {
        let last = scores.len() - 1;
        let rows = [k.row(key), k.row(last.min(key + 1)), k.row(last.min(key + 2)), k.row(last.min(key + 3))];
        let (mut sums, mut d) = ([V::zero(); 4], 0);
        while d < k.width {
            let q = V::load(&q[d..]);
            unrolled!(n < 4, {
                let n = n % 4;
                sums[n] = S::load::<V>(&rows[n][d..]).mul_add(q, sums[n]);
            });
            d += V::LANES;
        }
        let sums = four_sums(sums);
        let count = 4.min(scores.len() - key);
        scores[key..key + count].copy_from_slice(&sums[..count]);
        key += 4;
    }
}

/// The sums over the lanes of four vectors.
#[inline(always)]
fn four_sums<V: Vector>(vectors: [V; 4]) -> [V::Element; 4] {
    if V::LANES >= 4 {
        return V::fold(vectors).fours();
    }
    [vectors[0].sum(), vectors[1].sum(), vectors[2].sum(), vectors[3].sum()]
}

/// Turns scores into weights relative to the largest score so far. Returns the factor by which earlier weights shrink,
/// and the sum of the new ones.
#[inline(always)]
fn weigh<V: Vector>(scores: &mut [V::Element; KEYS], largest: &mut V::Element) -> (V::Element, V::Element)
where
    V::Element: Vector<Element = V::Element>,
{
    let before = *largest;
    let mut most = V::splat(before);
    let mut key = 0;
    while key < KEYS {
        most = most.max(V::load(&scores[key..]));
        key += V::LANES;
    }
    let most = most.lanes();
    let mut now = before;
    for lane in 0..V::LANES {
        now = Vector::max(now, most[lane]);
    }
    *largest = now;
    // Without a visible key so far the maximum is minus infinity, and minus infinity less itself would be NaN.
    let shift = if now.to_f64() == f64::NEG_INFINITY { V::zero() } else { V::splat(now) };
    let (mut sum, mut key) = (V::zero(), 0);
    while key < KEYS {
        let weights = exp(V::load(&scores[key..]).sub(shift));
        weights.store(&mut scores[key..]);
        sum = sum.add(weights);
        key += V::LANES;
    }
    (exp(V::splat(before).sub(shift)).lanes()[0], sum.sum())
}

/// Scales a query's sums and adds weighted values, for `N` vectors of columns, or fewer at the end.
#[inline(always)]
fn add<V: Vector<Element = S::Wide>, S: Storage, const N: usize>(
    weights: &[S::Wide],
    v: Rows<S>,
    d: usize,
    decay: S::Wide,
    sums: &mut [S::Wide],
) {
    let mut vectors = [V::zero(); N];
    unrolled!(n < N, {
        vectors[n] = V::load_partial(&sums[d + n * V::LANES..]).mul(V::splat(decay));
    });
    for key in 0..weights.len() {
        // A masked key has weight 0; its value is skipped, since it may be NaN.
        if weights[key].to_f64() == 0.0 {
            continue;
        }
        let (weight, row) = (V::splat(weights[key]), v.row(key));
        unrolled!(n < N, {
            vectors[n] = S::load::<V>(&row[d + n * V::LANES..]).mul_add(weight, vectors[n]);
        });
    }
    let end = sums.len().min(d + N * V::LANES);
    unrolled!(n < N, {
        let first = d + n * V::LANES;
        vectors[n].store_partial(&mut sums[first..end.min(first + V::LANES)]);
    });
}

/// Combines the results of all stretches for some queries, in order.
struct Join<'s, 'a, S: Storage> {
    given: &'s Given<'a, S>,
    partial: &'s [S::Wide],
    stretches: usize,
    stride: usize,
    rows: Range<usize>,
    y: &'s Shared<'s, S>,
    lse: &'s Shared<'s, S::Wide>,
}

impl<S: Storage> Work<S::Wide> for Join<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for row in self.rows.clone() {
            let (largest, sum) = self.sum(row);
            // SAFETY: calls share no row.
            let lse = unsafe { self.lse.part(row, 1) };
            lse[0] = S::Wide::from_f64(largest + sum.ln());
            self.write::<V>(row, largest, sum);
        }
    }
}

impl<S: Storage> Join<'_, '_, S> {
    /// The partial results of a stretch for one query.
    #[inline(always)]
    fn part(&self, row: usize, stretch: usize) -> &[S::Wide] {
        let Problem { heads, key_heads, queries, .. } = *self.given.problem;
        let together = heads / key_heads * queries;
        let piece = row / together * self.stretches + stretch;
        &self.partial[(piece * together + row % together) * self.stride..][..self.stride]
    }

    /// The largest score over all stretches, and the sum of weights relative to it.
    #[inline(always)]
    fn sum(&self, row: usize) -> (f64, f64) {
        let at = self.given.problem.value_width;
        let mut largest = f64::NEG_INFINITY;
        for stretch in 0..self.stretches {
            largest = largest.max(self.part(row, stretch)[at].to_f64());
        }
        let mut sum = 0.0;
        for stretch in 0..self.stretches {
            let part = self.part(row, stretch);
            sum += share(part[at].to_f64(), largest) * part[at + 1].to_f64();
        }
        (largest, sum)
    }

    #[inline(always)]
    fn write<V: Vector<Element = S::Wide>>(&self, row: usize, largest: f64, sum: f64) {
        let Problem { heads, queries, value_width, y, .. } = *self.given.problem;
        let (head, query) = (row / queries, row % queries);
        let at = y.at(head / heads, head % heads, query);
        // SAFETY: calls share no row.
        let to = unsafe { self.y.part(at, value_width) };
        let mut d = 0;
        while d < value_width {
            let mut total = V::zero();
            for stretch in 0..self.stretches {
                let part = self.part(row, stretch);
                let share = share(part[value_width].to_f64(), largest);
                let share = if sum == 0.0 { 0.0 } else { share / sum };
                total = V::load_partial(&part[d..value_width]).mul_add(V::constant(share), total);
            }
            S::store(total, &mut to[d..]);
            d += V::LANES;
        }
    }
}

/// The factor that rescales weights relative to one score to weights relative to the largest.
#[inline(always)]
fn share(score: f64, largest: f64) -> f64 {
    if score == f64::NEG_INFINITY { 0.0 } else { (score - largest).exp() }
}
