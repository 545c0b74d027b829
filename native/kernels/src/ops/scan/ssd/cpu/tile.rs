//! A tile of time: `B` and `C` of a group as vectors, and each step's scalars and inputs of a head.

use super::{Given, Head};
use crate::cpu::sum::write_sums;
use crate::cpu::vector::Loops;
use crate::cpu::{Storage, Vector, each_vector, unrolled};
use crate::ops::scan::ssd::Problem;
use crate::tensor::Element;
use std::ops::Range;

/// The buffers of a tile: the vectors or rows of the first step, then those of the second, and so on.
pub struct Tile<V: Vector> {
    /// The number of steps.
    pub steps: usize,
    /// Rows of the head.
    pub rows: usize,
    /// Vectors of states in a row; lanes past the last state are zero.
    pub vectors: usize,
    pub b: Vec<V>,
    pub c: Vec<V>,
    /// One element for each step.
    pub delta: Vec<V::Element>,
    pub decay: Vec<V::Element>,
    /// `delta x` of all rows.
    pub input: Vec<V::Element>,
    /// Sums over states of one row, lane by lane.
    sums: Vec<V>,
}

impl<V: Vector> Tile<V> {
    /// Allocates a tile of at most `steps` steps.
    #[inline(always)]
    pub fn new(problem: &Problem, head: &Head, steps: usize) -> Tile<V> {
        let (steps, vectors) = (steps.min(problem.length), problem.state.div_ceil(V::LANES));
        let (rows, zero) = (head.rows.len(), V::Element::from_f64(0.0));
        Tile {
            steps,
            rows,
            vectors,
            b: vec![V::zero(); steps * vectors],
            c: vec![V::zero(); steps * vectors],
            delta: vec![zero; steps],
            decay: vec![zero; steps],
            input: vec![zero; steps * rows],
            sums: vec![V::zero(); steps],
        }
    }

    /// Reads the range `time` of a head.
    #[inline(always)]
    pub fn read<S: Storage<Wide = V::Element>>(&mut self, given: &Given<S>, head: &Head, time: Range<usize>) {
        self.steps = time.len();
        for (step, t) in time.enumerate() {
            let at = given.step_offset(head, t);
            (self.delta[step], self.decay[step]) = (given.delta[at], given.decay[at]);
            self.read_states(given, step, given.group_offset(head, t));
            self.read_rows(given, step, given.offset(head, t));
        }
    }

    #[inline(always)]
    fn read_states<S: Storage<Wide = V::Element>>(&mut self, given: &Given<S>, step: usize, from: usize) {
        let state = given.problem.state;
        for k in 0..self.vectors {
            let lanes = from + k * V::LANES..from + state.min((k + 1) * V::LANES);
            self.b[step * self.vectors + k] = S::load(&given.b[lanes.clone()]);
            self.c[step * self.vectors + k] = S::load(&given.c[lanes]);
        }
    }

    #[inline(always)]
    fn read_rows<S: Storage<Wide = V::Element>>(&mut self, given: &Given<S>, step: usize, from: usize) {
        let (rows, delta) = (self.rows, V::splat(self.delta[step]));
        let input = &mut self.input[step * rows..][..rows];
        each_vector!(rows, |at, end| {
            S::load::<V>(&given.x[from + at..from + end]).mul(delta).store_partial(&mut input[at..end]);
        });
    }

    /// Advances the states of a row over the tile, and writes the sums of `C S` to column `row` of `to`.
    #[inline(always)]
    fn advance(&mut self, row: usize, states: &mut [V::Element], to: &mut [V::Element]) {
        self.sums[..self.steps].fill(V::zero());
        held!(self.vectors, |first, K| self.advance_held::<K>(row, first, part::<V, K>(states, first)));
        write_sums(&self.sums[..self.steps], &mut to[row..], self.rows);
    }

    /// Advances `K` vectors of states from vector `first` on.
    #[inline(always)]
    fn advance_held<const K: usize>(&mut self, row: usize, first: usize, states: &mut [V::Element]) {
        let mut held = load::<V, K>(states);
        for step in 0..self.steps {
            let at = step * self.vectors + first;
            let (b, c) = (chunk::<V, K>(&self.b, at), chunk::<V, K>(&self.c, at));
            let (decay, input) = (V::splat(self.decay[step]), V::splat(self.input[step * self.rows + row]));
            // Two sums, since one would be a chain of dependent additions.
            let mut sums = [self.sums[step], V::zero()];
            unrolled!(k < K, {
                held[k] = input.mul_add(b[k], decay.mul(held[k]));
                sums[k % 2] = c[k].mul_add(held[k], sums[k % 2]);
            });
            self.sums[step] = sums[0].add(sums[1]);
        }
        store(&held, states);
    }
}

/// Advances the states of all rows over a tile, and writes the sums of `C S`: a row of `sums` for each step.
pub struct Advance<'a, V: Vector> {
    pub tile: &'a mut Tile<V>,
    pub states: &'a mut [V::Element],
    pub sums: &'a mut [V::Element],
}

impl<V: Vector> Loops for Advance<'_, V> {
    #[inline(always)]
    fn run(self) {
        let state = (self.states.len() / self.tile.rows.max(1)).max(1);
        for (row, states) in self.states.chunks_exact_mut(state).enumerate() {
            self.tile.advance(row, states, self.sums);
        }
    }
}

/// Runs `$body` for all vectors of a row: for eight at a time, which fit in registers, then for four, two and one.
/// `$first` is the first of these vectors, and `$K` their number, a constant.
macro_rules! held {
    ($vectors:expr, |$first:ident, $K:ident| $body:expr) => {{
        let (mut $first, vectors) = (0, $vectors);
        held!(@ vectors, $first, $K, 8, $body);
        held!(@ vectors, $first, $K, 4, $body);
        held!(@ vectors, $first, $K, 2, $body);
        held!(@ vectors, $first, $K, 1, $body);
    }};
    (@ $vectors:ident, $first:ident, $K:ident, $count:literal, $body:expr) => {
        while $vectors - $first >= $count {
            const $K: usize = $count;
            $body;
            $first += $K;
        }
    };
}
pub(super) use held;

/// The elements of `K` vectors from vector `first` on, up to the end of the row.
#[inline(always)]
pub fn part<V: Vector, const K: usize>(row: &mut [V::Element], first: usize) -> &mut [V::Element] {
    let end = row.len().min((first + K) * V::LANES);
    &mut row[first * V::LANES..end]
}

/// `K` vectors; lanes past the end of the slice are zero.
#[inline(always)]
pub fn load<V: Vector, const K: usize>(values: &[V::Element]) -> [V; K] {
    let mut vectors = [V::zero(); K];
    unrolled!(k < K, {
        vectors[k] = V::load_partial(&values[values.len().min(k * V::LANES)..]);
    });
    vectors
}

/// Writes `K` vectors; lanes past the end of the slice are dropped.
#[inline(always)]
pub fn store<V: Vector, const K: usize>(vectors: &[V; K], values: &mut [V::Element]) {
    let len = values.len();
    unrolled!(k < K, {
        vectors[k].store_partial(&mut values[len.min(k * V::LANES)..len.min((k + 1) * V::LANES)]);
    });
}

/// `K` vectors from vector `first` on.
#[inline(always)]
pub fn chunk<V, const K: usize>(of: &[V], first: usize) -> &[V; K] {
    of[first..].first_chunk().expect("a full row")
}
