//! The gradient. All states are known, so the gates' pre-activations at all times are products of large matrices, and
//! so are the gradients of the weights. Only the gradient of the state goes from step to step.

use super::super::{EPS, Problem};
use super::{bound, gated, initial, of_state, of_z, repeated, second, size, walk};
use crate::cpu::convert::{rounded, widened};
use crate::cpu::matrix::{Matrix, multiply};
use crate::cpu::panels::Panels;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector, sum};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use std::ops::Range;

pub fn run<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (rows, width) = (problem.batch * problem.length, problem.width);
    let z = widened::<S>(inputs.get("z")?.slice()?, exec)?;
    let before = states_before::<S>(problem, inputs)?;
    let mut sums = sums::<S>(problem, inputs, &z, &before, exec)?;
    let mut carry = initial::<S::Wide>(problem, inputs, "dlast_state")?;
    rounded::<S>(outputs.expect("dz")?.slice()?, exec, |dz| {
        let call = Backward::<S> {
            problem,
            z: &z,
            gamma: inputs.get("gamma")?.slice()?,
            before: &before,
            dh: inputs.get("dh")?.slice()?,
            sums: sums.iter_mut().map(|sums| Shared::new(sums)).collect(),
            dz: Shared::new(dz),
            dgamma: Shared::new(outputs.expect("dgamma")?.slice()?),
        };
        if width > 0 {
            call.run(&of_state(problem, inputs)?, &mut carry, &problem.shared(exec))?;
        }
        match &sums[..] {
            [_, dm] => {
                let w = second::<S>(problem, inputs)?.part(0..width);
                multiply(Matrix::new(dm, rows, width), w, dz, true, exec)
            }
            _ => Ok(()),
        }
    })?;
    if let Some(dinitial_state) = outputs.take("dinitial_state") {
        dinitial_state.slice()?.copy_from_slice(&carry);
    }
    of_weights::<S>(problem, [&z, &before], &sums, outputs, exec)
}

/// For each time the state before it.
fn states_before<S: Storage>(problem: &Problem, inputs: &Named<View>) -> Result<Vec<S::Wide>> {
    let Problem { batch, length, width, .. } = *problem;
    let (first, h) = (initial::<S::Wide>(problem, inputs, "initial_state")?, inputs.get("h")?.slice::<S>()?);
    let mut before = Vec::with_capacity(batch * length * width);
    for i in (0..batch).filter(|_| length > 0) {
        before.extend_from_slice(&first[i * width..][..width]);
        before.extend(h[problem.at(i, 0, 0)..][..(length - 1) * width].iter().map(|h| h.widen()));
    }
    Ok(before)
}

/// The pre-activations of each gate at all times.
fn sums<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    z: &[S::Wide],
    before: &[S::Wide],
    exec: &Exec,
) -> Result<Vec<Vec<S::Wide>>> {
    let rows = problem.batch * problem.length;
    let mut sums = vec![repeated(inputs.get("b_gate")?.slice::<S>()?, rows)];
    if problem.mixed {
        sums.push(of_z::<S>(problem, inputs, z, exec)?);
    }
    for (matrix, sums) in of_state::<S>(problem, inputs)?.iter().zip(&mut sums) {
        multiply(Matrix::new(before, rows, problem.width), matrix.transposed(), sums, true, exec)?;
    }
    Ok(sums)
}

/// The gradients of weights and biases, given those of the gates' pre-activations.
fn of_weights<S: Storage>(
    problem: &Problem,
    [z, before]: [&[S::Wide]; 2],
    sums: &[Vec<S::Wide>],
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (rows, width) = (problem.batch * problem.length, problem.width);
    let by_row = |values| Matrix::new(values, rows, width);
    for (name, sums) in ["db_gate", "db_mix"].into_iter().zip(sums) {
        rounded::<S>(outputs.expect(name)?.slice()?, exec, |db| {
            if rows * width == 0 {
                db.fill(S::Wide::from_f64(0.0));
            }
            sum::columns::<S::Wide>(sums, db, exec)
        })?;
    }
    rounded::<S>(outputs.expect("dw_gate")?.slice()?, exec, |dw| {
        multiply::<S::Wide>(by_row(&sums[0]).transposed(), by_row(before), dw, false, exec)
    })?;
    let [_, dm] = sums else { return Ok(()) };
    let mut halves = [z, before].map(|_| vec![S::Wide::from_f64(0.0); width * width]);
    for (half, of) in halves.iter_mut().zip([z, before]) {
        multiply::<S::Wide>(by_row(dm).transposed(), by_row(of), half, false, exec)?;
    }
    rounded::<S>(outputs.expect("dw_mix")?.slice()?, exec, |dw| {
        let parts = dw.chunks_exact_mut(width.max(1)).zip(0..);
        parts.for_each(|(to, i)| to.copy_from_slice(&halves[i % 2][i / 2 * width..][..width]));
        Ok(())
    })
}

struct Backward<'a, S: Storage> {
    problem: &'a Problem,
    z: &'a [S::Wide],
    gamma: &'a [S],
    before: &'a [S::Wide],
    dh: &'a [S],
    /// The pre-activations of the gates, overwritten by their gradients once a time is done.
    sums: Vec<Shared<'a, S::Wide>>,
    dz: Shared<'a, S::Wide>,
    dgamma: Shared<'a, S>,
}

impl<S: Storage> Backward<'_, S> {
    /// `carry` is the gradient of the state, without the part through the gates of the next time.
    fn run(&self, matrices: &[Matrix<S>], carry: &mut [S::Wide], exec: &Exec) -> Result<()> {
        let packed = matrices.iter().map(|m| Panels::pack(m.transposed(), exec)).collect::<Result<Vec<_>>>()?;
        // The gradients of the gates' pre-activations, for the next time and for the current one.
        let zeros = || matrices.iter().map(|_| vec![S::Wide::from_f64(0.0); carry.len()]).collect::<Vec<_>>();
        let (mut after, mut now) = (zeros(), zeros());
        let carry = &Shared::new(carry);
        let each = vec![(S::Wide::from_f64(1.0), S::Wide::from_f64(0.0)); self.problem.batch];
        walk((0..self.problem.length).rev(), exec, |t| {
            let gates: Vec<_> = now.iter_mut().map(|now| Shared::new(now)).collect();
            let update = |columns, norms: &[_]| {
                let update = Update { of: self, t, columns, norms, carry, gates: &gates };
                S::Wide::dispatch(exec.level, update);
            };
            pool::for_each(exec.threads, packed[0].count(), |panel| {
                through(&packed, panel, &after, carry);
                if !self.problem.norm {
                    update(packed[0].rows(panel), &each);
                }
            })?;
            if self.problem.norm {
                let norms = S::Wide::dispatch(exec.level, Norms { of: self, t, carry });
                update(0..self.problem.width, &norms);
            }
            std::mem::swap(&mut after, &mut now);
            Ok(())
        })?;
        pool::for_each(exec.threads, packed[0].count(), |panel| through(&packed, panel, &after, carry))
    }

    /// The values of some columns at a time.
    ///
    /// # Safety
    /// No other reference to the pre-activations of these columns may exist meanwhile.
    #[inline(always)]
    unsafe fn row(&self, batch: usize, t: usize, columns: &Range<usize>) -> Row<'_, S> {
        let (at, count) = (self.problem.at(batch, t, columns.start), columns.len());
        // SAFETY: as the caller promises.
        let (first, second) = unsafe {
            (self.sums[0].part(at, count), if self.problem.mixed { self.sums[1].part(at, count) } else { &mut [] })
        };
        Row {
            z: &self.z[at..][..count],
            gamma: &self.gamma[at..][..count],
            h: &self.before[at..][..count],
            dh: &self.dh[at..][..count],
            sums: [first, second],
        }
    }
}

/// Adds the gradient through the next time's gates to the columns of a panel.
fn through<S: Storage>(packed: &[Panels<S>], panel: usize, after: &[Vec<S::Wide>], carry: &Shared<S::Wide>) {
    for (panels, after) in packed.iter().zip(after) {
        // SAFETY: panels share no column.
        unsafe { panels.multiply(panel, after, carry, true) };
    }
}

/// The values of some columns at a time.
struct Row<'r, S: Storage> {
    z: &'r [S::Wide],
    gamma: &'r [S],
    h: &'r [S::Wide],
    dh: &'r [S],
    sums: [&'r mut [S::Wide]; 2],
}

impl<S: Storage> Row<'_, S> {
    /// `z`, `gamma` and the previous state.
    #[inline(always)]
    fn values<V: Vector<Element = S::Wide>>(&self, at: usize, end: usize) -> [V; 3] {
        [V::load_partial(&self.z[at..end]), S::load(&self.gamma[at..end]), V::load_partial(&self.h[at..end])]
    }

    /// The gates `s` and `m`, and `u`.
    #[inline(always)]
    fn gated<V: Vector<Element = S::Wide>>(&self, at: usize, end: usize, problem: &Problem) -> [V; 3] {
        let [first, second] = &self.sums;
        let second = if problem.mixed { V::load_partial(&second[at..end]) } else { V::zero() };
        let sums = [V::load_partial(&first[at..end]), second];
        gated(self.values(at, end), sums, problem.mixed, V::constant(problem.mix))
    }
}

/// `g` where the state is within its bounds, otherwise 0.
#[inline(always)]
fn through_clip<V: Vector>(g: V, state: V, bound: V) -> V {
    V::zero().where_less(bound, state.abs(), g)
}

/// Computes for each batch the norm's divisor, and the factor of `u` in the term that the norm's gradient subtracts.
struct Norms<'c, 'a, S: Storage> {
    of: &'c Backward<'a, S>,
    t: usize,
    carry: &'c Shared<'c, S::Wide>,
}

impl<S: Storage> Work<S::Wide> for Norms<'_, '_, S> {
    type Output = Vec<(S::Wide, S::Wide)>;

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) -> Self::Output {
        let Problem { batch, width, .. } = *self.of.problem;
        let mut norms = Vec::with_capacity(batch);
        for i in 0..batch {
            // SAFETY: one thread does this, after all others have finished their products.
            let (row, carry) = unsafe { (self.of.row(i, self.t, &(0..width)), self.carry.part(i * width, width)) };
            norms.push(self.norm::<V>(&row, carry));
        }
        norms
    }
}

impl<S: Storage> Norms<'_, '_, S> {
    #[inline(always)]
    fn norm<V: Vector<Element = S::Wide>>(&self, row: &Row<S>, carry: &[S::Wide]) -> (S::Wide, S::Wide) {
        let (problem, width) = (self.of.problem, self.of.problem.width);
        let mut squares = V::zero();
        each_vector!(width, |at, end| {
            let [_, _, u] = row.gated::<V>(at, end, problem);
            squares = u.mul_add(u, squares);
        });
        let size = size(squares.sum(), width);
        let (bound, mut dot) = (V::splat(bound(problem)), V::zero());
        each_vector!(width, |at, end| {
            let [_, _, u] = row.gated::<V>(at, end, problem);
            let g = V::load_partial(&carry[at..end]).add(S::load(&row.dh[at..end]));
            dot = through_clip(g, u.div(V::splat(size)), bound).mul_add(u, dot);
        });
        let (root, whole) = (size.to_f64() - EPS, size.to_f64());
        let slope = if root > 0.0 { dot.sum().to_f64() / (width as f64 * root * whole * whole) } else { 0.0 };
        (size, S::Wide::from_f64(slope))
    }
}

/// One step of the gradient for some columns.
struct Update<'c, 'a, S: Storage> {
    of: &'c Backward<'a, S>,
    t: usize,
    columns: Range<usize>,
    norms: &'c [(S::Wide, S::Wide)],
    carry: &'c Shared<'c, S::Wide>,
    gates: &'c [Shared<'c, S::Wide>],
}

impl<S: Storage> Work<S::Wide> for Update<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        for i in 0..self.of.problem.batch {
            self.row::<V>(i);
        }
    }
}

impl<S: Storage> Update<'_, '_, S> {
    #[inline(always)]
    fn row<V: Vector<Element = S::Wide>>(&self, i: usize) {
        let (of, problem, count) = (self.of, self.of.problem, self.columns.len());
        let (mix, one, bound) = (V::constant(problem.mix), V::constant(1.0), V::splat(bound(problem)));
        let (size, slope) = (V::splat(self.norms[i].0), V::splat(self.norms[i].1));
        let (from, at) = (problem.at(i, self.t, self.columns.start), i * problem.width + self.columns.start);
        // SAFETY: only the thread that computes these columns accesses them, in all of these tensors.
        let (row, carry, dz, dgamma, first, second) = unsafe {
            (
                of.row(i, self.t, &self.columns),
                self.carry.part(at, count),
                of.dz.part(from, count),
                of.dgamma.part(from, count),
                self.gates[0].part(at, count),
                if problem.mixed { self.gates[1].part(at, count) } else { &mut [] },
            )
        };
        each_vector!(count, |at, end| {
            let [z, gamma, h] = row.values::<V>(at, end);
            let [s, m, u] = row.gated::<V>(at, end, problem);
            let mut g = V::load_partial(&carry[at..end]).add(S::load(&row.dh[at..end]));
            if problem.clip.is_some() || problem.norm {
                g = through_clip(g, u.div(size), bound).div(size).sub(u.mul(slope));
            }
            let mixed = mix.mul(g);
            let ds = g.mul(z).mul(s).mul(one.sub(s));
            ds.store_partial(&mut first[at..end]);
            ds.store_partial(&mut row.sums[0][at..end]);
            if problem.mixed {
                let dm = mixed.mul(z.sub(h)).mul(m).mul(one.sub(m));
                dm.store_partial(&mut second[at..end]);
                dm.store_partial(&mut row.sums[1][at..end]);
            }
            mixed.mul_add(m, g.mul(s)).store_partial(&mut dz[at..end]);
            let all = g.add(mixed);
            S::store(all.mul(h), &mut dgamma[at..end]);
            all.mul_add(gamma, mixed.mul(one.sub(m))).store_partial(&mut carry[at..end]);
        });
    }
}
