//! Rotation on the CPU. The angles of a position serve all rows at that position, so threads divide positions.

use super::{Pairing, Problem};
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

/// Rotates by the angles times `sign`.
pub fn rotate(problem: &Problem, sign: f64, x: &View, y: ViewMut, exec: &Exec) -> Result<()> {
    with_type!(problem.x.dtype, S => rotate_as::<S>(problem, sign, x.slice()?, y.slice()?, exec))
}

fn rotate_as<S: Storage>(problem: &Problem, sign: f64, x: &[S], y: &mut [S], exec: &Exec) -> Result<()> {
    let threads = if x.len() < WORTH_SHARING { 1 } else { exec.threads };
    let y = &Shared::new(y);
    pool::for_each(threads, problem.length.div_ceil(POSITIONS), |piece| {
        let positions = piece * POSITIONS..problem.length.min((piece + 1) * POSITIONS);
        S::Wide::dispatch(exec.level, Rotate { problem, sign, x, y, positions });
    })
}

struct Rotate<'a, S> {
    problem: &'a Problem,
    sign: f64,
    x: &'a [S],
    y: &'a Shared<'a, S>,
    positions: Range<usize>,
}

/// Cosine and sine of each pair at a position.
struct Angles<E> {
    cos: Vec<E>,
    sin: Vec<E>,
}

impl<S: Storage> Work<S::Wide> for Rotate<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let Problem { inner, length, outer, width, .. } = *self.problem;
        let zeros = || vec![S::Wide::from_f64(0.0); width / 2];
        let mut angles = Angles { cos: zeros(), sin: zeros() };
        for position in self.positions.clone() {
            self.angles(position, &mut angles);
            for row in 0..outer * inner {
                let first = ((row / inner * length + position) * inner + row % inner) * width;
                let x = &self.x[first..first + width];
                // SAFETY: pieces share no position.
                let y = unsafe { self.y.part(first, width) };
                match self.problem.pairing {
                    Pairing::Half => half::<S, V>(x, y, &angles),
                    Pairing::Interleaved => interleaved(x, y, &angles),
                }
            }
        }
    }
}

impl<S: Storage> Rotate<'_, S> {
    fn angles(&self, position: usize, angles: &mut Angles<S::Wide>) {
        for (i, (sin, cos)) in self.problem.angles.sin_cos(position).enumerate() {
            (angles.sin[i], angles.cos[i]) = (S::Wide::from_f64(self.sign * sin), S::Wide::from_f64(cos));
        }
    }
}

#[inline(always)]
fn half<S: Storage, V: Vector<Element = S::Wide>>(x: &[S], y: &mut [S], angles: &Angles<S::Wide>) {
    let pairs = angles.cos.len();
    let ((first, second), (to_first, to_second)) = (x.split_at(pairs), y.split_at_mut(pairs));
    let mut at = 0;
    while at < pairs {
        let end = pairs.min(at + V::LANES);
        let (a, b) = (S::load::<V>(&first[at..end]), S::load::<V>(&second[at..end]));
        let (cos, sin) = (V::load_partial(&angles.cos[at..end]), V::load_partial(&angles.sin[at..end]));
        S::store(a.mul(cos).sub(b.mul(sin)), &mut to_first[at..end]);
        S::store(a.mul(sin).add(b.mul(cos)), &mut to_second[at..end]);
        at = end;
    }
}

/// Plain loops, which the compiler vectorizes over adjacent pairs.
#[inline(always)]
fn interleaved<S: Storage>(x: &[S], y: &mut [S], angles: &Angles<S::Wide>) {
    for i in 0..angles.cos.len() {
        let (a, b, cos, sin) = (x[2 * i].widen(), x[2 * i + 1].widen(), angles.cos[i], angles.sin[i]);
        let turned = [Vector::sub(a.mul(cos), b.mul(sin)), Vector::add(a.mul(sin), b.mul(cos))];
        for (to, value) in y[2 * i..2 * i + 2].iter_mut().zip(turned) {
            S::store(value, std::slice::from_mut(to));
        }
    }
}
