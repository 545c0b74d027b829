//! The reference: f64, one loop per axis, in the form of the formula.

use super::Problem;
use crate::cpu::math::{silu, silu_slope};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array3, ArrayD};

/// Row `r` of `xp` of one batch and channel.
fn padded(problem: &Problem, inputs: &Named<ArrayD<f64>>, [b, r, d]: [usize; 3]) -> Result<f64> {
    match r.checked_sub(problem.width - 1) {
        Some(t) => Ok(inputs.get("x")?[[b, t, d]]),
        None => Ok(inputs.find("initial_state").map_or(0.0, |state| state[[b, r, d]])),
    }
}

/// The sum `u` of one batch, time and channel.
fn sum(problem: &Problem, inputs: &Named<ArrayD<f64>>, [b, t, d]: [usize; 3]) -> Result<f64> {
    let mut sum = inputs.find("bias").map_or(0.0, |bias| bias[d]);
    for j in 0..problem.width {
        sum += inputs.get("w")?[[d, j]] * padded(problem, inputs, [b, t + j, d])?;
    }
    Ok(sum)
}

/// The convolution: `y` (B, L, D) and `last_state` (B, W-1, D).
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, width, activation, .. } = *problem;
    let mut y = Array3::zeros((batch, length, channels));
    let mut last_state = Array3::zeros((batch, width - 1, channels));
    for b in 0..batch {
        for d in 0..channels {
            for t in 0..length {
                let u = sum(problem, inputs, [b, t, d])?;
                y[[b, t, d]] = if activation.is_some() { silu(u) } else { u };
            }
            for r in 0..width - 1 {
                last_state[[b, r, d]] = padded(problem, inputs, [b, length + r, d])?;
            }
        }
    }
    Ok([("y", y.into_dyn()), ("last_state", last_state.into_dyn())].into_iter().collect())
}

/// The gradients `dx`, `dw`, `dbias` and `dinitial_state`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, width, activation, .. } = *problem;
    let (w, dy) = (inputs.get("w")?, inputs.get("dy")?);
    let mut dxp = ArrayD::zeros(&[batch, problem.rows(), channels][..]);
    let (mut dw, mut dbias) = (ArrayD::zeros(w.shape()), ArrayD::zeros(&[channels][..]));
    for b in 0..batch {
        for d in 0..channels {
            for t in 0..length {
                let slope = if activation.is_some() { silu_slope(sum(problem, inputs, [b, t, d])?) } else { 1.0 };
                let du = dy[[b, t, d]] * slope;
                for j in 0..width {
                    dxp[[b, t + j, d]] += w[[d, j]] * du;
                    dw[[d, j]] += du * padded(problem, inputs, [b, t + j, d])?;
                }
                dbias[d] += du;
            }
            for r in 0..width - 1 {
                dxp[[b, length + r, d]] += inputs.find("dlast_state").map_or(0.0, |cotangent| cotangent[[b, r, d]]);
            }
        }
    }
    let mut dinitial_state = dxp;
    let dx = dinitial_state.slice_axis(ndarray::Axis(1), (width - 1..).into()).to_owned();
    dinitial_state.slice_axis_inplace(ndarray::Axis(1), (..width - 1).into());
    Ok([("dx", dx), ("dw", dw), ("dbias", dbias), ("dinitial_state", dinitial_state)].into_iter().collect())
}
