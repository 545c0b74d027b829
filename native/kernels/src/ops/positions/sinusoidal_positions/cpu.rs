//! Sinusoidal positions on the CPU. The terms of a position serve the whole batch, so threads divide positions.

use super::Problem;
use crate::cpu::pool::{self, Shared};
use crate::cpu::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::tensor::{Element, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// Below this many elements waking a second thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 15;
/// Positions per task.
const POSITIONS: usize = 16;

/// Adds sines and cosines to each row.
pub fn add(problem: &Problem, x: &View, y: ViewMut, exec: &Exec) -> Result<()> {
    with_type!(problem.x.dtype, S => add_as::<S>(problem, x.slice()?, y.slice()?, exec))
}

fn add_as<S: Storage>(problem: &Problem, x: &[S], y: &mut [S], exec: &Exec) -> Result<()> {
    let threads = if x.len() < WORTH_SHARING { 1 } else { exec.threads };
    let y = &Shared::new(y);
    pool::for_each(threads, problem.length.div_ceil(POSITIONS), |piece| {
        let positions = piece * POSITIONS..problem.length.min((piece + 1) * POSITIONS);
        S::Wide::dispatch(exec.level, Add { problem, x, y, positions });
    })
}

struct Add<'a, S> {
    problem: &'a Problem,
    x: &'a [S],
    y: &'a Shared<'a, S>,
    positions: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for Add<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Problem { batch, length, width, .. } = *self.problem;
        let mut waves = vec![S::Wide::from_f64(0.0); width];
        for position in self.positions.clone() {
            self.waves(position, &mut waves);
            for row in 0..batch {
                let first = (row * length + position) * width;
                // SAFETY: pieces share no position.
                let y = unsafe { self.y.part(first, width) };
                sum::<S, V>(&self.x[first..first + width], &waves, y);
            }
        }
    }
}

impl<S: Storage> Add<'_, S> {
    /// Writes sines and cosines in the order of a row's elements.
    fn waves(&self, position: usize, waves: &mut [S::Wide]) {
        for (pair, (sin, cos)) in waves.chunks_mut(2).zip(self.problem.angles.sin_cos(position)) {
            for (to, wave) in pair.iter_mut().zip([sin, cos]) {
                *to = S::Wide::from_f64(wave);
            }
        }
    }
}

#[inline(always)]
fn sum<S: Storage, V: Vector<Element = S::Wide>>(x: &[S], waves: &[S::Wide], y: &mut [S]) {
    let mut at = 0;
    while at < x.len() {
        let end = x.len().min(at + V::LANES);
        S::store(S::load::<V>(&x[at..end]).add(V::load_partial(&waves[at..end])), &mut y[at..end]);
        at = end;
    }
}
