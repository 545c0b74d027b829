//! The gated norm on the CPU: one part of a row at a time, whose `u` stays in the first-level cache. The division among
//! threads and the order of sums are those of the norms.
//!
//! Bound by the exponentials of the gate within the caches, and by memory bandwidth beyond: two reads and one write.

use super::Problem;
use crate::cpu::activation::{Silu, Unary};
use crate::cpu::pool::Shared;
use crate::cpu::rows::{self, row_sum};
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector};
use crate::error::Result;
use crate::op::Named;
use crate::ops::norm::cpu::{first, mean_square};
use crate::ops::norm::scales;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// Computes the op on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs)?;
    let y = Shared::new(outputs.expect("y")?.slice::<S>()?);
    rows::for_each([problem.parts, problem.columns], exec, |parts| {
        S::Wide::dispatch(exec.level, Forward { given: &given, parts, y: &y });
    })
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (given, dy) = (Given::<S>::new(problem, inputs)?, inputs.get("dy")?.slice::<S>()?);
    let mut output = |name| Ok(Shared::new(outputs.expect(name)?.slice::<S>()?));
    let to = [output("dx")?, output("dz")?];
    let (groups, width) = (problem.groups, problem.groups * problem.columns);
    let sums = rows::with_sums([problem.parts / groups, width], width, exec, |rows, dw: &mut [S::Wide]| {
        let parts = rows.start * groups..rows.end * groups;
        S::Wide::dispatch(exec.level, Reverse { given: &given, dy, parts, to: &to, dw });
    })?;
    outputs.expect("dw")?.slice()?.copy_from_slice(&sums);
    Ok(())
}

/// The inputs.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    x: &'a [S],
    z: &'a [S],
    w: &'a [S::Wide],
    scales: [S::Wide; 2],
}

/// A part of a row, with `u` and `r` computed.
struct Part<'a, S: Storage, V> {
    x: &'a [S],
    z: &'a [S],
    w: &'a [S::Wide],
    /// `u`.
    inner: &'a [S::Wide],
    r: V,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>) -> Result<Self> {
        let (scale, to_mean) = scales(problem.columns);
        Ok(Given {
            problem,
            x: inputs.get("x")?.slice()?,
            z: inputs.get("z")?.slice()?,
            w: inputs.get("w")?.slice()?,
            scales: [S::Wide::from_f64(scale), S::Wide::from_f64(to_mean)],
        })
    }

    fn zeros(&self) -> Vec<S::Wide> {
        vec![S::Wide::from_f64(0.0); self.problem.columns]
    }

    /// Part `i`, counted over all rows; `u` is written to `inner`.
    #[inline(always)]
    fn part<'b, V: Vector<Element = S::Wide>>(&'b self, i: usize, inner: &'b mut [S::Wide]) -> Part<'b, S, V> {
        let columns = inner.len();
        let (x, z) = (&self.x[i * columns..][..columns], &self.z[i * columns..][..columns]);
        let w = &self.w[i % self.problem.groups * columns..][..columns];
        each_vector!(columns, |at, end| {
            let mut u = S::load::<V>(&x[at..end]);
            if !self.problem.norm_before_gate {
                u = u.mul(Silu::value(S::load::<V>(&z[at..end])));
            }
            u.store_partial(&mut inner[at..end]);
        });
        let square = first(mean_square::<S::Wide, V>(inner, V::zero(), self.scales)).to_f64();
        Part { x, z, w, inner, r: V::constant(1.0 / (square + self.problem.eps).sqrt()) }
    }
}

impl<S: Storage, V: Vector<Element = S::Wide>> Part<'_, S, V> {
    /// `u^` of the elements from `at` to `end`.
    #[inline(always)]
    fn unit(&self, at: usize, end: usize) -> V {
        V::load_partial(&self.inner[at..end]).mul(self.r)
    }

    #[inline(always)]
    fn weights(&self, at: usize, end: usize) -> V {
        V::load_partial(&self.w[at..end])
    }

    #[inline(always)]
    fn gate(&self, at: usize, end: usize) -> V {
        S::load::<V>(&self.z[at..end])
    }
}

struct Forward<'a, S: Storage> {
    given: &'a Given<'a, S>,
    parts: Range<usize>,
    y: &'a Shared<'a, S>,
}

impl<S: Storage> Work<S::Wide> for Forward<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let (mut inner, norm_first) = (self.given.zeros(), self.given.problem.norm_before_gate);
        let columns = inner.len();
        for i in self.parts {
            let part = self.given.part::<V>(i, &mut inner);
            // SAFETY: pieces share no part.
            let y = unsafe { self.y.part(i * columns, columns) };
            each_vector!(columns, |at, end| {
                let mut value = part.unit(at, end).mul(part.weights(at, end));
                if norm_first {
                    value = value.mul(Silu::value(part.gate(at, end)));
                }
                S::store(value, &mut y[at..end]);
            });
        }
    }
}

struct Reverse<'a, S: Storage> {
    given: &'a Given<'a, S>,
    dy: &'a [S],
    parts: Range<usize>,
    /// `dx` and `dz`.
    to: &'a [Shared<'a, S>; 2],
    dw: &'a mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Reverse<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Problem { columns, groups, norm_before_gate, .. } = *self.given.problem;
        let (mut inner, mut e) = (self.given.zeros(), self.given.zeros());
        for i in self.parts {
            let part = self.given.part::<V>(i, &mut inner);
            let dy = &self.dy[i * columns..][..columns];
            each_vector!(columns, |at, end| {
                let mut value = S::load::<V>(&dy[at..end]);
                if norm_before_gate {
                    value = value.mul(Silu::value(part.gate(at, end)));
                }
                value.store_partial(&mut e[at..end]);
            });
            add_products(&part, &e, &mut self.dw[i % groups * columns..][..columns]);
            // SAFETY: pieces share no part.
            let [dx, dz] = unsafe { [&self.to[0], &self.to[1]].map(|to| to.part(i * columns, columns)) };
            if norm_before_gate { through_norm(&part, &e, dy, dx, dz) } else { through_gate(&part, &e, dx, dz) }
        }
    }
}

/// Adds `e u^` to `dw`.
#[inline(always)]
fn add_products<S: Storage, V: Vector<Element = S::Wide>>(part: &Part<S, V>, e: &[S::Wide], dw: &mut [S::Wide]) {
    let columns = dw.len();
    each_vector!(columns, |at, end| {
        let sum = part.unit(at, end).mul_add(V::load_partial(&e[at..end]), V::load_partial(&dw[at..end]));
        sum.store_partial(&mut dw[at..end]);
    });
}

/// `du` of the elements from `at` to `end`, given `mean(w e u^)`.
#[inline(always)]
fn inner_gradient<S: Storage, V: Vector<Element = S::Wide>>(
    part: &Part<S, V>,
    e: &[S::Wide],
    along: V,
    at: usize,
    end: usize,
) -> V {
    let straight = part.weights(at, end).mul(V::load_partial(&e[at..end]));
    straight.sub(part.unit(at, end).mul(along)).mul(part.r)
}

/// `mean(w e u^)`.
#[inline(always)]
fn along<S: Storage, V: Vector<Element = S::Wide>>(part: &Part<S, V>, e: &[S::Wide]) -> V {
    let columns = e.len();
    let sum = row_sum!(columns, |at, end| {
        part.weights(at, end).mul(V::load_partial(&e[at..end])).mul(part.unit(at, end))
    });
    V::splat(sum).div(V::constant(columns as f64))
}

/// `dx` and `dz` where the gate comes first.
#[inline(always)]
fn through_gate<S: Storage, V: Vector<Element = S::Wide>>(
    part: &Part<S, V>,
    e: &[S::Wide],
    dx: &mut [S],
    dz: &mut [S],
) {
    let (columns, along) = (e.len(), along(part, e));
    each_vector!(columns, |at, end| {
        let (du, z) = (inner_gradient(part, e, along, at, end), part.gate(at, end));
        S::store(du.mul(Silu::value(z)), &mut dx[at..end]);
        S::store(du.mul(S::load(&part.x[at..end])).mul(Silu::slope(z)), &mut dz[at..end]);
    });
}

/// `dx` and `dz` where the norm comes first.
#[inline(always)]
fn through_norm<S: Storage, V: Vector<Element = S::Wide>>(
    part: &Part<S, V>,
    e: &[S::Wide],
    dy: &[S],
    dx: &mut [S],
    dz: &mut [S],
) {
    let (columns, along) = (e.len(), along(part, e));
    each_vector!(columns, |at, end| {
        S::store(inner_gradient(part, e, along, at, end), &mut dx[at..end]);
        let of_gate = S::load::<V>(&dy[at..end]).mul(part.weights(at, end)).mul(part.unit(at, end));
        S::store(of_gate.mul(Silu::slope(part.gate(at, end))), &mut dz[at..end]);
    });
}
