//! The hierarchy on the CPU: threads divide batches and strips of columns, and each computes all levels of its strip.
//! So intermediate levels stay in the caches and are never rounded.

use super::{Levels, NAMES, Problem, window};
use crate::cpu::pool::Shared;
use crate::cpu::strips::Strips;
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// The most columns per strip: wider ones would push intermediate levels out of the caches.
const WIDEST: usize = 128;

/// Computes the levels on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => {
        let from = [inputs.get("k")?.slice::<S>()?, inputs.get("v")?.slice()?];
        let mut to = [Vec::new(), Vec::new()];
        for names in &NAMES[..problem.levels.sizes.len() - 1] {
            for (to, name) in to.iter_mut().zip(names) {
                to.push(Shared::new(outputs.expect(name)?.slice::<S>()?));
            }
        }
        pool(&problem.levels, &from, &to, exec)
    })
}

/// Computes the levels above each of several banks.
pub fn pool<S: Storage, O: Storage<Wide = S::Wide>>(
    levels: &Levels,
    from: &[&[S]],
    to: &[Vec<Shared<O>>],
    exec: &Exec,
) -> Result<()> {
    strips(levels, from.len(), exec).for_each(|row, columns| {
        let (bank, batch) = (row / levels.batch, row % levels.batch);
        let strip = Strip { levels, batch, columns };
        S::Wide::dispatch(exec.level, Pool::<S, O> { strip, from: from[bank], to: &to[bank] });
    })
}

/// Computes the gradients on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => {
        let levels = &problem.levels;
        let given = |which: usize| {
            let names = NAMES[..levels.sizes.len() - 1].iter();
            names.map(|names| inputs.find(names[which]).map(View::slice).transpose()).collect::<Result<Vec<_>>>()
        };
        let given: [Vec<Option<&[S]>>; 2] = [given(2)?, given(3)?];
        let to = [outputs.expect("dk")?.slice()?, outputs.expect("dv")?.slice()?].map(Shared::new);
        strips(levels, 2, exec).for_each(|row, columns| {
            let (bank, batch) = (row / levels.batch, row % levels.batch);
            let strip = Strip { levels, batch, columns };
            <S as Storage>::Wide::dispatch(exec.level, Spread::<S> { strip, given: &given[bank], to: &to[bank] });
        })
    })
}

fn strips(levels: &Levels, banks: usize, exec: &Exec) -> Strips {
    Strips::new(exec, banks * levels.batch, levels.width, banks * levels.elements(), WIDEST)
}

/// Some columns of one batch.
struct Strip<'l> {
    levels: &'l Levels,
    batch: usize,
    columns: Range<usize>,
}

impl Strip<'_> {
    /// The range of the strip in a row of a level.
    #[inline(always)]
    fn row(&self, level: usize, row: usize) -> Range<usize> {
        let start = (self.batch * self.levels.sizes[level] + row) * self.levels.width + self.columns.start;
        start..start + self.columns.len()
    }

    /// The range of the strip in the bank's row of this age, counted from the oldest row.
    #[inline(always)]
    fn by_age(&self, age: usize) -> Range<usize> {
        let (row, slots) = (self.levels.first + age, self.levels.sizes[0]);
        self.row(0, if row < slots { row } else { row - slots })
    }
}

struct Pool<'a, S: Storage, O> {
    strip: Strip<'a>,
    from: &'a [S],
    to: &'a [Shared<'a, O>],
}

impl<S: Storage, O: Storage<Wide = S::Wide>> Work<S::Wide> for Pool<'_, S, O> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (strip, sizes) = (&self.strip, &self.strip.levels.sizes);
        let vectors = strip.columns.len().div_ceil(V::LANES);
        let mut below: Vec<V> = Vec::new();
        for level in 1..sizes.len() {
            let mut rows = vec![V::zero(); sizes[level] * vectors];
            for j in 0..sizes[level] {
                let window = window(j, sizes[level - 1], sizes[level]);
                let count = V::constant(window.len() as f64);
                let means = &mut rows[j * vectors..][..vectors];
                for r in window {
                    if level == 1 {
                        let row = &self.from[strip.by_age(r)];
                        for (mean, values) in means.iter_mut().zip(row.chunks(V::LANES)) {
                            *mean = mean.add(S::load(values));
                        }
                    } else {
                        for (mean, value) in means.iter_mut().zip(&below[r * vectors..]) {
                            *mean = mean.add(*value);
                        }
                    }
                }
                // SAFETY: strips share no element of (batch, slot, column).
                let to = unsafe { self.to[level - 1].part(strip.row(level, j).start, strip.columns.len()) };
                for (mean, values) in means.iter_mut().zip(to.chunks_mut(V::LANES)) {
                    *mean = mean.div(count);
                    O::store(*mean, values);
                }
            }
            below = rows;
        }
    }
}

struct Spread<'a, S: Storage> {
    strip: Strip<'a>,
    /// The given cotangents of the levels above the bank.
    given: &'a [Option<&'a [S]>],
    to: &'a Shared<'a, S>,
}

impl<S: Storage> Work<S::Wide> for Spread<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (strip, sizes) = (&self.strip, &self.strip.levels.sizes);
        let vectors = strip.columns.len().div_ceil(V::LANES);
        let mut above: Vec<V> = Vec::new();
        for level in (1..sizes.len()).rev() {
            let mut rows = vec![V::zero(); sizes[level] * vectors];
            for j in 0..sizes[level] {
                let sums = &mut rows[j * vectors..][..vectors];
                if let Some(given) = self.given[level - 1] {
                    for (sum, values) in sums.iter_mut().zip(given[strip.row(level, j)].chunks(V::LANES)) {
                        *sum = S::load(values);
                    }
                }
                Self::add(sums, &above, sizes, level, j);
                // Dividing by the size of the window gives the share of each row in it.
                let count = V::constant(window(j, sizes[level - 1], sizes[level]).len() as f64);
                for sum in sums.iter_mut() {
                    *sum = sum.div(count);
                }
            }
            above = rows;
        }
        let mut sums = vec![V::zero(); vectors];
        for age in 0..sizes[0] {
            sums.fill(V::zero());
            Self::add(&mut sums, &above, sizes, 0, age);
            // SAFETY: strips share no element of (batch, slot, column).
            let to = unsafe { self.to.part(strip.by_age(age).start, strip.columns.len()) };
            for (sum, values) in sums.iter().zip(to.chunks_mut(V::LANES)) {
                S::store(*sum, values);
            }
        }
    }
}

impl<S: Storage> Spread<'_, S> {
    /// Adds to row `j` of a level its shares of the rows above whose windows contain it.
    #[inline(always)]
    fn add<V: Vector<Element = S::Wide>>(sums: &mut [V], above: &[V], sizes: &[usize], level: usize, j: usize) {
        if level + 1 == sizes.len() {
            return;
        }
        let vectors = sums.len();
        for of in window(j, sizes[level + 1], sizes[level]) {
            for (sum, share) in sums.iter_mut().zip(&above[of * vectors..]) {
                *sum = sum.add(*share);
            }
        }
    }
}
