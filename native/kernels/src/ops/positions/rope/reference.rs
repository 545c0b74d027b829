//! The reference: f64, pair by pair.

use super::Problem;
use ndarray::ArrayD;

/// Rotates by the angles times `sign`.
pub fn rotate(problem: &Problem, sign: f64, x: &ArrayD<f64>) -> ArrayD<f64> {
    let mut y = x.clone();
    let rows = x.as_slice().expect("values in order").chunks_exact(problem.width.max(1));
    let to = y.as_slice_mut().expect("values in order").chunks_exact_mut(problem.width.max(1));
    for (row, (x, y)) in rows.zip(to).enumerate() {
        let position = row / problem.inner % problem.length;
        for (i, (sin, cos)) in problem.angles.sin_cos(position).enumerate() {
            let (a, b) = problem.pair(i);
            y[a] = x[a] * cos - sign * x[b] * sin;
            y[b] = sign * x[a] * sin + x[b] * cos;
        }
    }
    y
}
