//! A tile of time: `q` and `k` of the formula (normalized with `qk_l2norm`), `q` times the scale, and the decays and
//! scalars of each step.

use super::{Given, Head};
use crate::cpu::{Real, Storage, Vector, each_vector};
use crate::ops::scan::matrix_state::{EPS, Problem};
use crate::tensor::Element;
use std::ops::Range;

/// The buffers of a tile.
pub struct Tile<W> {
    /// The number of steps.
    pub steps: usize,
    keys: usize,
    q: Vec<W>,
    k: Vec<W>,
    /// `a` of each step: a number, or one for each key.
    decay: Vec<W>,
    pub beta: Vec<W>,
    /// `q . k`.
    pub qk: Vec<W>,
}

impl<W> Tile<W> {
    /// `q` of a step, times the scale.
    #[inline(always)]
    pub fn q(&self, step: usize) -> &[W] {
        &self.q[step * self.keys..][..self.keys]
    }

    /// `k` of a step.
    #[inline(always)]
    pub fn k(&self, step: usize) -> &[W] {
        &self.k[step * self.keys..][..self.keys]
    }

    /// `a` of a step.
    #[inline(always)]
    pub fn decay(&self, problem: &Problem, step: usize) -> &[W] {
        &self.decay[step * problem.decays()..][..problem.decays()]
    }
}

impl<W: Real> Tile<W> {
    /// Allocates a tile of at most `steps` steps.
    pub fn new(problem: &Problem, steps: usize) -> Tile<W> {
        let (steps, keys) = (steps.min(problem.length), problem.keys);
        let zeros = |count| vec![W::from_f64(0.0); count];
        Tile {
            steps,
            keys,
            q: zeros(steps * keys),
            k: zeros(steps * keys),
            decay: zeros(steps * problem.decays()),
            beta: zeros(steps),
            qk: zeros(steps),
        }
    }

    /// Reads the range `time` of a head.
    #[inline(always)]
    pub fn read<S: Storage<Wide = W>, V: Vector<Element = W>>(
        &mut self,
        given: &Given<S>,
        head: &Head,
        time: Range<usize>,
    ) {
        self.steps = time.len();
        for (step, t) in time.enumerate() {
            let (at, from) = (given.step_offset(head, t), given.key_offset(head, t));
            self.beta[step] = given.beta.map_or(W::from_f64(1.0), |beta| beta[at].widen());
            let decays = &mut self.decay[step * given.problem.decays()..][..given.problem.decays()];
            match given.g {
                Some(g) => decays.copy_from_slice(&g[at * decays.len()..][..decays.len()]),
                None => decays.fill(W::from_f64(1.0)),
            }
            let rows = step * self.keys..(step + 1) * self.keys;
            let scale = given.problem.scale;
            read_key::<S, V>(given.problem, &given.q[from..][..self.keys], scale, &mut self.q[rows.clone()]);
            read_key::<S, V>(given.problem, &given.k[from..][..self.keys], 1.0, &mut self.k[rows]);
            self.qk[step] = dot::<V>(self.q(step), self.k(step));
        }
        if given.g.is_some() {
            let decays = self.steps * given.problem.decays();
            each_vector!(decays, |at, end| {
                V::load_partial(&self.decay[at..end]).exp().store_partial(&mut self.decay[at..end]);
            });
        }
    }
}

/// Reads `q` or `k` of a step, normalized with `qk_l2norm`, times a factor.
#[inline(always)]
fn read_key<S: Storage, V: Vector<Element = S::Wide>>(problem: &Problem, from: &[S], factor: f64, to: &mut [S::Wide]) {
    let factor = if problem.qk_l2norm { factor / length::<S, V>(from) } else { factor };
    let factor = V::constant(factor);
    each_vector!(from.len(), |at, end| {
        S::load::<V>(&from[at..end]).mul(factor).store_partial(&mut to[at..end]);
    });
}

/// The L2 norm that `q` or `k` of a step is divided by; `EPS` keeps it above 0.
#[inline(always)]
pub fn length<S: Storage, V: Vector<Element = S::Wide>>(x: &[S]) -> f64 {
    let mut sum = V::zero();
    each_vector!(x.len(), |at, end| {
        let x = S::load::<V>(&x[at..end]);
        sum = x.mul_add(x, sum);
    });
    (sum.sum().to_f64() + EPS).sqrt()
}

/// The dot product of two rows.
#[inline(always)]
pub fn dot<V: Vector>(a: &[V::Element], b: &[V::Element]) -> V::Element {
    let mut sum = V::zero();
    each_vector!(a.len(), |at, end| {
        sum = V::load_partial(&a[at..end]).mul_add(V::load_partial(&b[at..end]), sum);
    });
    sum.sum()
}
