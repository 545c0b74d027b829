//! The plain truth: f64, pair by pair.

use super::Problem;
use ndarray::ArrayD;

/// Rotates by the angles times `sign`.
pub fn rotate(problem: &Problem, sign: f64, x: &ArrayD<f64>) -> ArrayD<f64> {
    let mut y = x.clone();
    let rows = x.as_slice().expect("values in order").chunks_exact(problem.width.max(1));
    let to = y.as_slice_mut().expect("values in order").chunks_exact_mut(problem.width.max(1));
    for (row, (x, y)) in rows.zip(to).enumerate() {
        let position = problem.first_position as f64 + (row / problem.inner % problem.length) as f64;
        for (i, rate) in problem.rates.iter().enumerate() {
            let (sin, cos) = (sign * position * rate).sin_cos();
            let (a, b) = problem.pair(i);
            y[a] = x[a] * cos - x[b] * sin;
            y[b] = x[a] * sin + x[b] * cos;
        }
    }
    y
}
