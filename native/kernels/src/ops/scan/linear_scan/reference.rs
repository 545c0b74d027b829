//! The reference: f64, one loop per axis, in the form of the formula.

use super::Problem;
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array2, Array3, ArrayD};

/// The recurrence: `h` (B, L, K) and `last_state` (B, K).
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, .. } = *problem;
    let (a, b) = (inputs.get("a")?, inputs.get("b")?);
    let mut h = Array3::zeros((batch, length, channels));
    let mut state =
        inputs.find("initial_state").cloned().unwrap_or_else(|| Array2::zeros((batch, channels)).into_dyn());
    for i in 0..batch {
        for t in 0..length {
            for k in 0..channels {
                state[[i, k]] = a[[i, t, k]] * state[[i, k]] + b[[i, t, k]];
                h[[i, t, k]] = state[[i, k]];
            }
        }
    }
    Ok([("h", h.into_dyn()), ("last_state", state)].into_iter().collect())
}

/// The gradients `da`, `db` and `dinitial_state`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, .. } = *problem;
    let (a, h, dh) = (inputs.get("a")?, inputs.get("h")?, inputs.get("dh")?);
    let before = |i: usize, t: usize, k: usize| match t {
        0 => inputs.find("initial_state").map_or(0.0, |initial_state| initial_state[[i, k]]),
        _ => h[[i, t - 1, k]],
    };
    let (mut da, mut db) = (ArrayD::zeros(a.shape()), ArrayD::zeros(a.shape()));
    // a[t+1] g[t+1], which ends as the gradient of the initial state.
    let mut carry = inputs.find("dlast_state").cloned().unwrap_or_else(|| Array2::zeros((batch, channels)).into_dyn());
    for i in 0..batch {
        for t in (0..length).rev() {
            for k in 0..channels {
                let g = dh[[i, t, k]] + carry[[i, k]];
                db[[i, t, k]] = g;
                da[[i, t, k]] = g * before(i, t, k);
                carry[[i, k]] = a[[i, t, k]] * g;
            }
        }
    }
    Ok([("da", da), ("db", db), ("dinitial_state", carry)].into_iter().collect())
}
