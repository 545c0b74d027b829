//! The reference: f64, one loop per axis, written to be read beside the formula.

use super::Problem;
use crate::cpu::math::{silu, silu_slope};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array5, ArrayD};

/// The scan of `inputs`: `y` and `last_state`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let x = inputs.get("x")?;
    let states = states(problem, inputs)?;
    let mut y = ArrayD::zeros(x.shape());
    for (at, y) in y.indexed_iter_mut() {
        let at = [at[0], at[1], at[2], at[3]];
        *y = ungated(problem, inputs, &states, at)? * inputs.find("z").map_or(1.0, |z| silu(z[at]));
    }
    let last_state = states.index_axis(ndarray::Axis(1), problem.length).to_owned().into_dyn();
    Ok([("y", y), ("last_state", last_state)].into_iter().collect())
}

/// The states before the first step and after each.
fn states(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Array5<f64>> {
    let Problem { batch, length, heads, width, state, .. } = *problem;
    let mut states = Array5::zeros((batch, length + 1, heads, width, state));
    if let Some(initial_state) = inputs.find("initial_state") {
        states.index_axis_mut(ndarray::Axis(1), 0).assign(initial_state);
    }
    let (x, b_t) = (inputs.get("x")?, inputs.get("B")?);
    for b in 0..batch {
        for t in 0..length {
            for h in 0..heads {
                let (delta, decay) = step(problem, inputs, [b, t, h])?;
                let g = h / problem.heads_per_group();
                for p in 0..width {
                    for n in 0..state {
                        states[[b, t + 1, h, p, n]] =
                            decay * states[[b, t, h, p, n]] + delta * x[[b, t, h, p]] * b_t[[b, t, g, n]];
                    }
                }
            }
        }
    }
    Ok(states)
}

/// `s`, the step size before softplus and clamp.
fn raw(inputs: &Named<ArrayD<f64>>, [b, t, h]: [usize; 3]) -> Result<f64> {
    Ok(inputs.get("dt")?[[b, t, h]] + inputs.find("dt_bias").map_or(0.0, |bias| bias[h]))
}

/// The step size, and the decay of a head.
fn step(problem: &Problem, inputs: &Named<ArrayD<f64>>, at: [usize; 3]) -> Result<(f64, f64)> {
    let delta = problem.step_size.reference(raw(inputs, at)?, problem.dtype);
    Ok((delta, (delta * inputs.get("A")?[at[2]]).exp()))
}

/// `D` of a row of a head.
fn skip(problem: &Problem, inputs: &Named<ArrayD<f64>>, h: usize, p: usize) -> f64 {
    inputs.find("D").map_or(0.0, |d| if problem.wide_skip { d[[h, p]] } else { d[h] })
}

/// The output before its gate.
fn ungated(
    problem: &Problem,
    inputs: &Named<ArrayD<f64>>,
    states: &Array5<f64>,
    [b, t, h, p]: [usize; 4],
) -> Result<f64> {
    let (c_t, g) = (inputs.get("C")?, h / problem.heads_per_group());
    let sum: f64 = (0..problem.state).map(|n| c_t[[b, t, g, n]] * states[[b, t + 1, h, p, n]]).sum();
    Ok(sum + skip(problem, inputs, h, p) * inputs.get("x")?[[b, t, h, p]])
}

/// The gradients of [`forward`] for each of its `inputs`, given the cotangents among them.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, heads, width, state, .. } = *problem;
    let (x, a, dy) = (inputs.get("x")?, inputs.get("A")?, inputs.get("dy")?);
    let (b_t, c_t) = (inputs.get("B")?, inputs.get("C")?);
    let states = states(problem, inputs)?;
    let zeros = |like: &str| ArrayD::zeros(inputs.find(like).map_or(&[][..], |input| input.shape()));
    let [mut dx, mut ddt, mut da, mut db, mut dc] = ["x", "dt", "A", "B", "C"].map(zeros);
    let [mut dz, mut dd, mut dbias] = ["z", "D", "dt_bias"].map(zeros);
    // a[t+1] g[t+1], which ends as the gradient of the initial state.
    let mut carry = match inputs.find("dlast_state") {
        Some(cotangent) => cotangent.clone(),
        None => ArrayD::zeros(&[batch, heads, width, state][..]),
    };
    for b in 0..batch {
        for t in (0..length).rev() {
            for h in 0..heads {
                let (delta, decay) = step(problem, inputs, [b, t, h])?;
                let group = h / problem.heads_per_group();
                let mut ddelta = 0.0;
                for p in 0..width {
                    let at = [b, t, h, p];
                    let dy_ungated = dy[at] * inputs.find("z").map_or(1.0, |z| silu(z[at]));
                    let mut dinput = 0.0;
                    for n in 0..state {
                        let (in_group, of_state) = ([b, t, group, n], [b, h, p, n]);
                        let g = dy_ungated * c_t[in_group] + carry[of_state];
                        let through_decay = g * decay * states[[b, t, h, p, n]];
                        ddelta += through_decay * a[h];
                        da[h] += through_decay * delta;
                        dinput += g * b_t[in_group];
                        db[in_group] += g * delta * x[at];
                        dc[in_group] += dy_ungated * states[[b, t + 1, h, p, n]];
                        carry[of_state] = decay * g;
                    }
                    ddelta += dinput * x[at];
                    dx[at] = dinput * delta + skip(problem, inputs, h, p) * dy_ungated;
                    if let Some(z) = inputs.find("z") {
                        dz[at] = dy[at] * ungated(problem, inputs, &states, at)? * silu_slope(z[at]);
                    }
                    if inputs.find("D").is_some() {
                        let of_skip = if problem.wide_skip { &mut dd[[h, p]] } else { &mut dd[h] };
                        *of_skip += dy_ungated * x[at];
                    }
                }
                ddt[[b, t, h]] = ddelta * problem.step_size.reference_slope(raw(inputs, [b, t, h])?, problem.dtype);
                if inputs.find("dt_bias").is_some() {
                    dbias[h] += ddt[[b, t, h]];
                }
            }
        }
    }
    let all = [("dx", dx), ("ddt", ddt), ("dA", da), ("dB", db), ("dC", dc), ("dD", dd), ("dz", dz)];
    Ok(all.into_iter().chain([("ddt_bias", dbias), ("dinitial_state", carry)]).collect())
}
