//! The recurrence on the CPU: the matrices are packed for the vector units, and the rows of each step are divided among
//! threads that stay awake. A row that is in registers is multiplied with the states of all sequences of the batch.
//!
//! Terms that do not depend on the state are computed beforehand, for all times at once, as products of large matrices;
//! in the gradient, so are terms that depend on known states only. The order of each element's sum is fixed, so the
//! bits do not depend on the number of threads.

mod backward;
mod forward;

use super::{EPS, Problem};
use crate::cpu::math::sigmoid;
use crate::cpu::matrix::{Matrix, multiply};
use crate::cpu::{Exec, Storage, Vector, pool};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;

/// Computes the recurrence on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward::run::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward::run::<S>(problem, inputs, outputs, exec))
}

/// Steps of fewer multiplications are not worth a second thread, even one that is awake.
const WORTH_SHARING: usize = 1 << 16;

impl Problem {
    /// `exec` with the number of threads that a step is worth: one where a second would cost more than it saves.
    fn shared(&self, exec: &Exec) -> Exec {
        let gates = 1 + usize::from(self.mixed);
        let step = self.batch.saturating_mul(self.width).saturating_mul(self.width).saturating_mul(gates);
        let threads = if step < WORTH_SHARING { 1 } else { exec.threads };
        Exec { threads, ..*exec }
    }

    /// The offset of column `first` of a batch and time.
    fn at(&self, batch: usize, t: usize, first: usize) -> usize {
        (batch * self.length + t) * self.width + first
    }
}

/// The matrices that multiply the state, (out, in): `w_gate`, and the second half of `w_mix` if there is a second gate.
fn of_state<'a, S: Storage>(problem: &Problem, inputs: &Named<View<'a>>) -> Result<Vec<Matrix<'a, S>>> {
    let width = problem.width;
    let mut matrices = vec![Matrix::new(inputs.get("w_gate")?.slice()?, width, width)];
    if problem.mixed {
        matrices.push(second(problem, inputs)?.part(width..2 * width));
    }
    Ok(matrices)
}

/// `w_mix`.
fn second<'a, S: Storage>(problem: &Problem, inputs: &Named<View<'a>>) -> Result<Matrix<'a, S>> {
    Ok(Matrix::new(inputs.get("w_mix")?.slice()?, problem.width, 2 * problem.width))
}

/// The part of the second gate's pre-activations that comes from `z` and the bias, for all times.
fn of_z<S: Storage>(problem: &Problem, inputs: &Named<View>, z: &[S::Wide], exec: &Exec) -> Result<Vec<S::Wide>> {
    if !problem.mixed {
        return Ok(Vec::new());
    }
    let (width, rows) = (problem.width, problem.batch * problem.length);
    let mut sums = repeated(inputs.get("b_mix")?.slice::<S>()?, rows);
    let w = second::<S>(problem, inputs)?.part(0..width);
    multiply(Matrix::new(z, rows, width), w.transposed(), &mut sums, true, exec)?;
    Ok(sums)
}

/// `rows` copies of a row, widened.
fn repeated<S: Storage>(row: &[S], rows: usize) -> Vec<S::Wide> {
    let row: Vec<S::Wide> = row.iter().map(|v| v.widen()).collect();
    row.repeat(rows)
}

/// The tensor of that name, such as the initial state, or zeros.
fn initial<E: Element>(problem: &Problem, inputs: &Named<View>, name: &str) -> Result<Vec<E>> {
    match inputs.find(name) {
        Some(state) => Ok(state.slice()?.to_vec()),
        None => Ok(vec![E::from_f64(0.0); problem.batch * problem.width]),
    }
}

/// `s`, `m` and `u` of a step, from the gates' pre-activations `sums`. Without a second gate `m` is 0.
#[inline(always)]
fn gated<V: Vector>([z, gamma, h]: [V; 3], sums: [V; 2], mixed: bool, mix: V) -> [V; 3] {
    let s = sigmoid(sums[0]);
    let kept = gamma.mul(h);
    let core = z.mul_add(s, kept);
    if !mixed {
        return [s, V::zero(), core];
    }
    let m = sigmoid(sums[1]);
    let n = m.mul_add(z.sub(h), h.add(kept));
    [s, m, n.mul_add(mix, core)]
}

/// The norm's divisor of a state with `width` elements and this sum of `squares`: the root mean square plus `EPS`.
fn size<E: Element>(squares: E, width: usize) -> E {
    E::from_f64((squares.to_f64() / width as f64).sqrt() + EPS)
}

/// The bound of the state's elements; infinite if there is none.
fn bound<E: Element>(problem: &Problem) -> E {
    E::from_f64(problem.clip.unwrap_or(f64::INFINITY))
}

/// Calls `step` for each time in order, with threads that stay awake.
fn walk(times: impl Iterator<Item = usize>, exec: &Exec, mut step: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut times = times;
    pool::awake(exec.threads, || times.try_for_each(&mut step))?
}
