//! The recurrence itself.

use super::super::Problem;
use super::{bound, gated, initial, of_state, of_z, repeated, second, size, walk};
use crate::cpu::convert::widened;
use crate::cpu::matrix::{self, Matrix, multiply};
use crate::cpu::panels::Panels;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work, each_vector};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use std::ops::Range;

/// The fewest steps for which packing the matrices pays off.
const WORTH_PACKING: usize = 8;

pub fn run<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let mut state = initial::<S::Wide>(problem, inputs, "initial_state")?;
    let h = outputs.expect("h")?.slice::<S>()?;
    if problem.width > 0 && is_short(problem) {
        let z = widened::<S>(inputs.get("z")?.slice()?, exec)?;
        let of_z = of_z::<S>(problem, inputs, &z, exec)?;
        let call = Forward::new(problem, inputs, (&z, of_z), h)?;
        call.run_as_stored(&of_state(problem, inputs)?, &mut state, &problem.shared(exec))?;
    } else if problem.width > 0 {
        let exec = &problem.shared(exec);
        // All steps in one call, because threads that went to sleep between steps would be slow to wake.
        pool::awake(exec.threads, || -> Result<()> {
            let z = widened::<S>(inputs.get("z")?.slice()?, exec)?;
            let of_z = packed_of_z::<S>(problem, inputs, &z, exec)?;
            let call = Forward::new(problem, inputs, (&z, of_z), h)?;
            call.run(&of_state(problem, inputs)?, &mut state, exec)
        })??;
    }
    outputs.expect("last_state")?.slice()?.copy_from_slice(&state);
    Ok(())
}

/// Whether there are too few steps for packing the matrices to pay off.
fn is_short(problem: &Problem) -> bool {
    problem.length < WORTH_PACKING && problem.batch < matrix::SEVERAL
}

/// The part of the second gate's pre-activations that comes from `z` and the bias, computed by this crate's threads.
fn packed_of_z<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    z: &[S::Wide],
    exec: &Exec,
) -> Result<Vec<S::Wide>> {
    if !problem.mixed {
        return Ok(Vec::new());
    }
    let mut sums = repeated(inputs.get("b_mix")?.slice::<S>()?, problem.batch * problem.length);
    let w = second::<S>(problem, inputs)?.part(0..problem.width);
    Panels::pack(w, exec)?.add_all(z, &mut sums, exec.threads)?;
    Ok(sums)
}

struct Forward<'a, S: Storage> {
    problem: &'a Problem,
    z: &'a [S::Wide],
    gamma: &'a [S],
    bias: Vec<S::Wide>,
    of_z: Vec<S::Wide>,
    h: Shared<'a, S>,
}

impl<'a, S: Storage> Forward<'a, S> {
    fn new(
        problem: &'a Problem,
        inputs: &Named<View<'a>>,
        (z, of_z): (&'a [S::Wide], Vec<S::Wide>),
        h: &'a mut [S],
    ) -> Result<Self> {
        let (gamma, bias) = (inputs.get("gamma")?.slice()?, repeated(inputs.get("b_gate")?.slice::<S>()?, 1));
        Ok(Forward { problem, z, gamma, bias, of_z, h: Shared::new(h) })
    }

    fn run(&self, matrices: &[Matrix<S>], state: &mut Vec<S::Wide>, exec: &Exec) -> Result<()> {
        let packed = matrices.iter().map(|m| Panels::pack(*m, exec)).collect::<Result<Vec<_>>>()?;
        self.walk(state, matrices.len(), exec, |t, states, sums| self.step(t, &packed, states, sums, exec))
    }

    fn run_as_stored(&self, matrices: &[Matrix<S>], state: &mut Vec<S::Wide>, exec: &Exec) -> Result<()> {
        self.walk(state, matrices.len(), exec, |t, states, sums| self.step_as_stored(t, matrices, states, sums, exec))
    }

    /// Calls `step` for each time, with the previous state, the new state and a buffer for pre-activations.
    fn walk(
        &self,
        state: &mut Vec<S::Wide>,
        gates: usize,
        exec: &Exec,
        step: impl Fn(usize, [&mut Vec<S::Wide>; 2], &mut [Vec<S::Wide>]) -> Result<()>,
    ) -> Result<()> {
        let (mut next, mut sums) = (state.clone(), vec![state.clone(); gates]);
        walk(0..self.problem.length, exec, |t| {
            step(t, [state, &mut next], &mut sums)?;
            if self.problem.norm {
                S::Wide::dispatch(exec.level, Normalised { of: self, t, state: &mut next });
            }
            std::mem::swap(state, &mut next);
            Ok(())
        })
    }

    /// A step with packed matrices: each panel updates its columns of the state as soon as their pre-activations are
    /// known.
    fn step(
        &self,
        t: usize,
        packed: &[Panels<S>],
        [before, next]: [&mut Vec<S::Wide>; 2],
        sums: &mut [Vec<S::Wide>],
        exec: &Exec,
    ) -> Result<()> {
        let sums: Vec<_> = sums.iter_mut().map(|sums| Shared::new(sums)).collect();
        let next = Shared::new(next);
        pool::for_each(exec.threads, packed[0].count(), |panel| {
            for (panels, sums) in packed.iter().zip(&sums) {
                // SAFETY: panels share no column.
                unsafe { panels.multiply(panel, before, sums, false) };
            }
            let update = Update { of: self, t, columns: packed[0].rows(panel), before, sums: &sums, next: &next };
            S::Wide::dispatch(exec.level, update);
        })
    }

    /// A step with the matrices as they are stored, where there are too few steps to pack them.
    fn step_as_stored(
        &self,
        t: usize,
        matrices: &[Matrix<S>],
        [before, next]: [&mut Vec<S::Wide>; 2],
        sums: &mut [Vec<S::Wide>],
        exec: &Exec,
    ) -> Result<()> {
        let Problem { batch, width, .. } = *self.problem;
        for (matrix, sums) in matrices.iter().zip(&mut *sums) {
            multiply(Matrix::new(before, batch, width), matrix.transposed(), sums, false, exec)?;
        }
        let sums: Vec<_> = sums.iter_mut().map(|sums| Shared::new(sums)).collect();
        let update = Update { of: self, t, columns: 0..width, before, sums: &sums, next: &Shared::new(next) };
        S::Wide::dispatch(exec.level, update);
        Ok(())
    }

    /// Some columns of a row of `h`.
    ///
    /// # Safety
    /// No other reference to these elements may exist meanwhile.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    unsafe fn h(&self, batch: usize, t: usize, columns: &Range<usize>) -> &mut [S] {
        // SAFETY: as the caller promises.
        unsafe { self.h.part(self.problem.at(batch, t, columns.start), columns.len()) }
    }
}

/// Computes some columns of the next state, clips them, and stores them as results.
struct Update<'c, 'a, S: Storage> {
    of: &'c Forward<'a, S>,
    t: usize,
    columns: Range<usize>,
    before: &'c [S::Wide],
    sums: &'c [Shared<'c, S::Wide>],
    next: &'c Shared<'c, S::Wide>,
}

impl<S: Storage> Work<S::Wide> for Update<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Update { of, t, columns, before, .. } = self;
        let Problem { batch, width, mixed, .. } = *of.problem;
        let (mix, bound) = (V::constant(of.problem.mix), V::splat(bound(of.problem)));
        let (clipped, count) = (of.problem.clip.is_some() && !of.problem.norm, columns.len());
        for i in 0..batch {
            let (row, at) = (of.problem.at(i, t, columns.start), i * width + columns.start);
            let (z, gamma) = (&of.z[row..][..count], &of.gamma[row..][..count]);
            let (h, bias) = (&before[at..][..count], &of.bias[columns.start..][..count]);
            let of_z = if mixed { &of.of_z[row..][..count] } else { bias };
            // SAFETY: only the thread that computes these columns accesses them, in all of these tensors.
            let (sums, next, to) = unsafe {
                let second = if mixed { 1 } else { 0 };
                let sums = [&*self.sums[0].part(at, count), &*self.sums[second].part(at, count)];
                (sums, self.next.part(at, count), of.h(i, t, &columns))
            };
            each_vector!(count, |at, end| {
                let values = [V::load_partial(&z[at..end]), S::load(&gamma[at..end]), V::load_partial(&h[at..end])];
                let first = V::load_partial(&sums[0][at..end]).add(V::load_partial(&bias[at..end]));
                let second = V::load_partial(&sums[1][at..end]).add(V::load_partial(&of_z[at..end]));
                let [_, _, mut u] = gated(values, [first, second], mixed, mix);
                if clipped {
                    u = u.min(bound).max(V::zero().sub(bound));
                }
                u.store_partial(&mut next[at..end]);
                S::store(u, &mut to[at..end]);
            });
        }
    }
}

/// Normalises and clips a whole new state, and stores it as a result.
struct Normalised<'c, 'a, S: Storage> {
    of: &'c Forward<'a, S>,
    t: usize,
    state: &'c mut [S::Wide],
}

impl<S: Storage> Work<S::Wide> for Normalised<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let width = self.of.problem.width;
        let bound = V::splat(bound(self.of.problem));
        for (i, state) in self.state.chunks_exact_mut(width).enumerate() {
            let mut squares = V::zero();
            each_vector!(width, |at, end| {
                let u = V::load_partial(&state[at..end]);
                squares = u.mul_add(u, squares);
            });
            let size = V::splat(size(squares.sum(), width));
            // SAFETY: one thread does this, after all others have finished the step.
            let to = unsafe { self.of.h(i, self.t, &(0..width)) };
            each_vector!(width, |at, end| {
                let n = V::load_partial(&state[at..end]).div(size);
                let n = n.min(bound).max(V::zero().sub(bound));
                n.store_partial(&mut state[at..end]);
                S::store(n, &mut to[at..end]);
            });
        }
    }
}
