//! The norms on the CPU: a row at a time, which stays in the first-level cache after its first read. Rows are divided
//! among threads in pieces that depend on the sizes alone, as does the order of the sums over rows.
//!
//! Bound by memory bandwidth where all rows together exceed the caches: one read and one write.

use super::{EpsMode, Problem, scales};
use crate::cpu::activation::Unary;
use crate::cpu::pool::Shared;
use crate::cpu::rows::{self, row_sum};
use crate::cpu::{Exec, Real, Storage, Vector, Work, Writing, each_vector, fence, line, prefetch, prefetch_to_write};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::{with_activation, with_type};
use std::marker::PhantomData;
use std::ops::Range;

/// Prefetch distance of the output, in bytes.
const WRITTEN_AHEAD: usize = 2048;

/// Computes a norm on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.x.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.x.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

/// The inputs.
#[derive(Clone, Copy)]
struct Given<'a, S: Storage> {
    x: &'a [S],
    w: &'a [S::Wide],
    b: Option<&'a [S::Wide]>,
    columns: usize,
    centered: bool,
    outside: bool,
    eps: f64,
    /// The factor of values before they are squared, and that of the sum of their squares.
    scales: [S::Wide; 2],
    /// Columns, or 1 if there are none.
    count: S::Wide,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        Given::of(inputs.get("x")?.slice()?, problem, inputs)
    }

    fn of(x: &'a [S], problem: &Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        let of = S::Wide::from_f64;
        let (scale, mean) = scales(problem.columns);
        Ok(Given {
            x,
            w: inputs.get("w")?.slice()?,
            b: inputs.find("b").map(View::slice).transpose()?,
            columns: problem.columns,
            centered: problem.centered,
            outside: problem.eps_mode == EpsMode::Outside,
            eps: problem.eps,
            scales: [of(scale), of(mean)],
            count: of(problem.columns.max(1) as f64),
        })
    }
}

/// The statistics of a row, as numbers and as vectors.
struct Statistics<V: Vector> {
    mean: V::Element,
    r: V::Element,
    t: V::Element,
    means: V,
    rs: V,
}

/// The elements of a row from `at` to `end`, minus their mean; 0 past the end of the row.
#[inline(always)]
fn centered<S: Storage, V: Vector<Element = S::Wide>>(x: &[S], at: usize, end: usize, mean: V) -> V {
    let centered = S::load::<V>(&x[at..end]).sub(mean);
    if end - at == V::LANES {
        return centered;
    }
    let mut ones = [S::Wide::from_f64(0.0); crate::cpu::vector::MAX_LANES];
    ones[..end - at].fill(S::Wide::from_f64(1.0));
    centered.mul(V::load(&ones))
}

/// The mean square of a row minus its mean, with factors from [`scales`](super::scales).
#[inline(always)]
pub fn mean_square<S: Storage, V: Vector<Element = S::Wide>>(x: &[S], mean: V, [scale, to_mean]: [S::Wide; 2]) -> V {
    let scales = V::splat(scale);
    let squares = row_sum!(x.len(), |at, end| {
        let scaled = centered::<S, V>(x, at, end, mean).mul(scales);
        scaled.mul(scaled)
    });
    V::splat(squares).mul(V::splat(to_mean))
}

impl<S: Storage> Given<'_, S> {
    #[inline(always)]
    fn statistics<V: Vector<Element = S::Wide>>(&self, x: &[S]) -> Statistics<V> {
        let columns = x.len();
        let mut mean = V::zero();
        if self.centered {
            let sum = row_sum!(columns, |at, end| S::load::<V>(&x[at..end]));
            mean = V::splat(sum).div(V::splat(self.count));
        }
        self.of_square(mean, mean_square::<S, V>(x, mean, self.scales))
    }

    /// The statistics that follow from the mean and the mean square.
    #[inline(always)]
    fn of_square<V: Vector<Element = S::Wide>>(&self, means: V, squares: V) -> Statistics<V> {
        let square = first(squares).to_f64();
        let (r, t) = match (self.outside, square.sqrt()) {
            (false, _) => (1.0 / (square + self.eps).sqrt(), 1.0 / (square + self.eps).sqrt()),
            (true, 0.0) => (1.0 / self.eps, 0.0),
            (true, root) => (1.0 / (root + self.eps), 1.0 / root),
        };
        let (r, t) = (S::Wide::from_f64(r), S::Wide::from_f64(t));
        Statistics { mean: first(means), r, t, means, rs: V::splat(r) }
    }
}

/// The weights of a row, as slices of its length, so that one bounds check covers the row and its weights.
struct Weights<'a, S: Storage, const BIAS: bool> {
    w: &'a [S::Wide],
    b: &'a [S::Wide],
}

impl<'a, S: Storage, const BIAS: bool> Weights<'a, S, BIAS> {
    #[inline(always)]
    fn of(given: &Given<'a, S>, columns: usize) -> Self {
        let b = if BIAS { &given.b.unwrap_or_default()[..columns] } else { &[] };
        Weights { w: &given.w[..columns], b }
    }

    /// `z` of the elements from `at` to `end`.
    #[inline(always)]
    fn sums<V: Vector<Element = S::Wide>>(&self, unit: V, at: usize, end: usize) -> V {
        let w = V::load_partial(&self.w[at..end]);
        if BIAS { w.mul_add(unit, V::load_partial(&self.b[at..end])) } else { w.mul(unit) }
    }

    /// `w dz` of the elements from `at` to `end`.
    #[inline(always)]
    fn times<V: Vector<Element = S::Wide>>(&self, dz: &[S::Wide], at: usize, end: usize) -> V {
        V::load_partial(&dz[at..end]).mul(V::load_partial(&self.w[at..end]))
    }
}

/// The first lane.
#[inline(always)]
pub fn first<V: Vector>(vector: V) -> V::Element {
    vector.lanes()[0]
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs)?;
    let y = outputs.expect("y")?.slice::<S>()?;
    let writing = Writing::of(std::mem::size_of_val(y), exec);
    let mut statistic = |name| Ok(outputs.take(name).map(ViewMut::slice::<S::Wide>).transpose()?.map(Shared::new));
    let (y, mean, rstd) = (Shared::new(y), statistic("mean")?, statistic("rstd")?);
    rows::for_each([problem.rows, problem.columns], exec, |rows| {
        let (given, y, statistics) = (&given, &y, [mean.as_ref(), rstd.as_ref()]);
        with_activation!(problem.activation, F => {
            let work = Forward::<S, F> { given, rows, y, statistics, writing, activation: PhantomData };
            S::Wide::dispatch(exec.level, work);
        });
    })
}

struct Forward<'a, S: Storage, F> {
    given: &'a Given<'a, S>,
    rows: Range<usize>,
    y: &'a Shared<'a, S>,
    statistics: [Option<&'a Shared<'a, S::Wide>>; 2],
    writing: Writing,
    activation: PhantomData<F>,
}

impl<S: Storage, F: Unary> Work<S::Wide> for Forward<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let columns = self.given.columns;
        for row in self.rows.clone() {
            let x = &self.given.x[row * columns..(row + 1) * columns];
            let statistics = self.given.statistics::<V>(x);
            // SAFETY: pieces share no row.
            let y = unsafe { self.y.part(row * columns, columns) };
            match self.given.b {
                Some(_) => self.normalise::<V, true>(x, &statistics, y),
                None => self.normalise::<V, false>(x, &statistics, y),
            }
            for (to, value) in self.statistics.iter().zip([statistics.mean, statistics.r]) {
                if let Some(to) = to {
                    // SAFETY: as above.
                    unsafe { to.part(row, 1)[0] = value };
                }
            }
        }
        if self.writing == Writing::Past {
            fence();
        }
    }
}

impl<S: Storage, F: Unary> Forward<'_, S, F> {
    #[inline(always)]
    fn normalise<V: Vector<Element = S::Wide>, const BIAS: bool>(
        &self,
        x: &[S],
        statistics: &Statistics<V>,
        y: &mut [S],
    ) {
        let columns = y.len();
        let (x, weights) = (&x[..columns], Weights::<S, BIAS>::of(self.given, columns));
        let (ahead, past) = (self.writing == Writing::Ahead, self.writing == Writing::Past);
        let first = S::to_alignment::<V>(y).min(columns);
        each_vector!(first, columns, |at, end| {
            if ahead && at % line::<S>() < V::LANES {
                // Prefetches the next row.
                prefetch(x.as_ptr(), columns + at);
                prefetch_to_write(y.as_ptr(), at + WRITTEN_AHEAD / size_of::<S>());
            }
            let unit = S::load::<V>(&x[at..end]).sub(statistics.means).mul(statistics.rs);
            let value = F::value(weights.sums(unit, at, end));
            if past && end == at + V::LANES {
                S::stream(value, &mut y[at..end]);
            } else {
                S::store(value, &mut y[at..end]);
            }
        });
    }
}

/// Adds `x` to `sum`, and computes the norm of that.
pub fn add(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.x.dtype, S => add_as::<S>(problem, inputs, outputs, exec))
}

fn add_as<S: Storage>(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    // The rows to normalise are the sums, which this call computes row by row, so there is no `x` to pass here.
    let given = Given::<S::Wide>::of(&[], problem, inputs)?;
    let x = inputs.get("x")?.slice::<S>()?;
    let sum = Shared::new(outputs.expect("sum")?.slice::<S::Wide>()?);
    let y = Shared::new(outputs.expect("y")?.slice::<S>()?);
    rows::for_each([problem.rows, problem.columns], exec, |rows| {
        let work = Adding::<S> { given: &given, x, rows, sum: &sum, y: &y };
        S::Wide::dispatch(exec.level, work);
    })
}

struct Adding<'a, S: Storage> {
    given: &'a Given<'a, S::Wide>,
    x: &'a [S],
    rows: Range<usize>,
    sum: &'a Shared<'a, S::Wide>,
    y: &'a Shared<'a, S>,
}

impl<S: Storage> Work<S::Wide> for Adding<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let columns = self.given.columns;
        let w = &self.given.w[..columns];
        for row in self.rows.clone() {
            let x = &self.x[row * columns..][..columns];
            // SAFETY: pieces share no row.
            let (sum, y) = unsafe { (self.sum.part(row * columns, columns), self.y.part(row * columns, columns)) };
            each_vector!(columns, |at, end| {
                let total = V::load_partial(&sum[at..end]).add(S::load::<V>(&x[at..end]));
                total.store_partial(&mut sum[at..end]);
            });
            let r = self.given.statistics::<V>(sum).rs;
            each_vector!(columns, |at, end| {
                let unit = V::load_partial(&sum[at..end]).mul(r);
                S::store(unit.mul(V::load_partial(&w[at..end])), &mut y[at..end]);
            });
        }
    }
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (given, dy) = (Given::<S>::new(problem, inputs)?, inputs.get("dy")?.slice::<S>()?);
    let columns = problem.columns;
    let dx = Shared::new(outputs.expect("dx")?.slice::<S>()?);
    let kinds = if given.b.is_some() { 2 } else { 1 };
    let total = rows::with_sums([problem.rows, columns], kinds * columns, exec, |rows, sums: &mut [S::Wide]| {
        let (given, dx) = (&given, &dx);
        with_activation!(problem.activation, F => {
            let work = Reverse::<S, F> { given, dy, rows, dx, sums, activation: PhantomData };
            S::Wide::dispatch(exec.level, work);
        });
    })?;
    for (name, values) in ["dw", "db"].iter().zip(total.chunks(columns.max(1))) {
        outputs.expect(name)?.slice()?.copy_from_slice(values);
    }
    Ok(())
}

struct Reverse<'a, S: Storage, F> {
    given: &'a Given<'a, S>,
    dy: &'a [S],
    rows: Range<usize>,
    dx: &'a Shared<'a, S>,
    /// The sums for `dw`, then those for `db` if there is a `b`.
    sums: &'a mut [S::Wide],
    activation: PhantomData<F>,
}

impl<S: Storage, F: Unary> Work<S::Wide> for Reverse<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(mut self) {
        let columns = self.given.columns;
        let mut dz = vec![S::Wide::from_f64(0.0); columns];
        for row in self.rows.clone() {
            let place = row * columns..(row + 1) * columns;
            let (x, dy) = (&self.given.x[place.clone()], &self.dy[place.clone()]);
            let statistics = self.given.statistics::<V>(x);
            match self.given.b {
                Some(_) => self.through_activation::<V, true>(x, dy, &statistics, &mut dz),
                None => self.through_activation::<V, false>(x, dy, &statistics, &mut dz),
            }
            // SAFETY: parts share no row.
            let dx = unsafe { self.dx.part(place.start, columns) };
            self.through_norm(x, &dz, &statistics, dx);
        }
    }
}

impl<S: Storage, F: Unary> Reverse<'_, S, F> {
    /// Computes `dz` from `dy`, and adds to `dw` and `db`.
    #[inline(always)]
    fn through_activation<V: Vector<Element = S::Wide>, const BIAS: bool>(
        &mut self,
        x: &[S],
        dy: &[S],
        statistics: &Statistics<V>,
        dz: &mut [S::Wide],
    ) {
        let columns = dz.len();
        let (x, dy, weights) = (&x[..columns], &dy[..columns], Weights::<S, BIAS>::of(self.given, columns));
        let (dw, db) = self.sums.split_at_mut(columns);
        let db = if BIAS { &mut db[..columns] } else { db };
        each_vector!(columns, |at, end| {
            let unit = S::load::<V>(&x[at..end]).sub(statistics.means).mul(statistics.rs);
            let slope = F::slope(weights.sums(unit, at, end));
            let value = S::load::<V>(&dy[at..end]).mul(slope);
            value.store_partial(&mut dz[at..end]);
            let sum = value.mul_add(unit, V::load_partial(&dw[at..end]));
            sum.store_partial(&mut dw[at..end]);
            if BIAS {
                value.add(V::load_partial(&db[at..end])).store_partial(&mut db[at..end]);
            }
        });
    }

    #[inline(always)]
    fn through_norm<V: Vector<Element = S::Wide>>(
        &self,
        x: &[S],
        dz: &[S::Wide],
        statistics: &Statistics<V>,
        dx: &mut [S],
    ) {
        let columns = dx.len();
        let (x, dz, weights) = (&x[..columns], &dz[..columns], Weights::<S, false>::of(self.given, columns));
        let count = V::splat(self.given.count);
        let along = row_sum!(columns, |at, end| {
            weights.times::<V>(dz, at, end).mul(S::load::<V>(&x[at..end]).sub(statistics.means).mul(statistics.rs))
        });
        let along = V::splat(along).div(count);
        let mut mean = V::zero();
        if self.given.centered {
            mean = V::splat(row_sum!(columns, |at, end| weights.times::<V>(dz, at, end))).div(count);
        }
        let t = V::splat(statistics.t);
        each_vector!(columns, |at, end| {
            let around = S::load::<V>(&x[at..end]).sub(statistics.means).mul(t);
            let value = weights.times::<V>(dz, at, end).sub(mean).sub(around.mul(along)).mul(statistics.rs);
            S::store(value, &mut dx[at..end]);
        });
    }
}
