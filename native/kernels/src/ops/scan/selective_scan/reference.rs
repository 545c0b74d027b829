//! The reference: f64, one loop per axis, in the form of the formula.

use super::{Form, Problem};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array3, Array4, ArrayD, IxDyn};

/// The scan of `inputs`: `y` (B, L, D), `last_state` (B, D, N) and `states` (B, L, D, N).
pub fn selective_scan(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, state, .. } = *problem;
    let (x, dt, a) = (inputs.get("x")?, inputs.get("dt")?, inputs.get("A")?);
    let (b_t, c_t) = (inputs.get("B")?, inputs.get("C")?);

    let mut y = Array3::zeros((batch, length, channels));
    let mut states = Array4::zeros((batch, length, channels, state));
    let mut h = match inputs.find("initial_state") {
        Some(initial_state) => initial_state.clone(),
        None => Array3::zeros((batch, channels, state)).into_dyn(),
    };
    for b in 0..batch {
        for t in 0..length {
            for d in 0..channels {
                let raw = dt[[b, t, d]] + inputs.find("dt_bias").map_or(0.0, |bias| bias[d]);
                let delta = problem.options.step_size().reference(raw, problem.dtype);
                let mut sum = 0.0;
                for n in 0..state {
                    let decay = (delta * a[[d, n]]).exp();
                    let input = delta * at(b_t, problem.b, problem, [b, t, d, n]) * x[[b, t, d]];
                    h[[b, d, n]] = decay * h[[b, d, n]] + input;
                    sum += at(c_t, problem.c, problem, [b, t, d, n]) * h[[b, d, n]];
                    states[[b, t, d, n]] = h[[b, d, n]];
                }
                let skip = inputs.find("D").map_or(0.0, |skip| skip[d] * x[[b, t, d]]);
                let gate = inputs.find("z").map_or(1.0, |z| silu(z[[b, t, d]]));
                y[[b, t, d]] = (sum + skip) * gate;
            }
        }
    }
    Ok([("y", y.into_dyn()), ("last_state", h), ("states", states.into_dyn())].into_iter().collect())
}

/// `B` or `C` of one batch, time, channel and state, in any form.
fn at(values: &ArrayD<f64>, form: Form, problem: &Problem, place: [usize; 4]) -> f64 {
    values[index(values, form, problem, place)]
}

/// The index in `values` of one batch, time, channel and state.
fn index(values: &ArrayD<f64>, form: Form, problem: &Problem, [b, t, d, n]: [usize; 4]) -> IxDyn {
    match form {
        Form::Constant => IxDyn(&[d, n]),
        Form::PerStep { .. } if values.ndim() == 3 => IxDyn(&[b, t, n]),
        Form::PerStep { groups } => IxDyn(&[b, t, d / (problem.channels / groups), n]),
    }
}

/// The gradients of [`selective_scan`] for each of its `inputs`, given the cotangents among them.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, state, .. } = *problem;
    let (x, dt, a) = (inputs.get("x")?, inputs.get("dt")?, inputs.get("A")?);
    let (b_t, c_t, dy) = (inputs.get("B")?, inputs.get("C")?, inputs.get("dy")?);
    let states = selective_scan(problem, inputs)?.expect("states")?;
    let before = |[b, t, d, n]: [usize; 4]| match t {
        0 => inputs.find("initial_state").map_or(0.0, |initial_state| initial_state[[b, d, n]]),
        _ => states[[b, t - 1, d, n]],
    };

    let zeros = |like: &str| ArrayD::zeros(inputs.find(like).map_or(&[][..], |input| input.shape()));
    let (mut dx, mut ddt, mut da, mut db, mut dc) = (zeros("x"), zeros("dt"), zeros("A"), zeros("B"), zeros("C"));
    let (mut dz, mut dd, mut dbias) = (zeros("z"), zeros("D"), zeros("dt_bias"));
    // a[t+1] g[t+1], which ends as the gradient of the initial state.
    let mut carry = match inputs.find("dlast_state") {
        Some(cotangent) => cotangent.clone(),
        None => ArrayD::zeros(&[batch, channels, state][..]),
    };
    for b in 0..batch {
        for t in (0..length).rev() {
            for d in 0..channels {
                let raw = dt[[b, t, d]] + inputs.find("dt_bias").map_or(0.0, |bias| bias[d]);
                let delta = problem.options.step_size().reference(raw, problem.dtype);
                let skip = inputs.find("D").map_or(0.0, |skip| skip[d]);
                let gate = inputs.find("z").map_or(1.0, |z| silu(z[[b, t, d]]));
                let dy_ungated = dy[[b, t, d]] * gate;
                let mut y_ungated = skip * x[[b, t, d]];
                let (mut ddelta, mut dinput) = (0.0, 0.0);
                for n in 0..state {
                    let at_b = index(b_t, problem.b, problem, [b, t, d, n]);
                    let at_c = index(c_t, problem.c, problem, [b, t, d, n]);
                    let decay = (delta * a[[d, n]]).exp();
                    let h = states[[b, t, d, n]];
                    let from_states = inputs.find("dstates").map_or(0.0, |cotangent| cotangent[[b, t, d, n]]);
                    let g = dy_ungated * c_t[at_c.clone()] + from_states + carry[[b, d, n]];
                    let dlog_decay = g * decay * before([b, t, d, n]);
                    ddelta += dlog_decay * a[[d, n]];
                    dinput += g * b_t[at_b.clone()];
                    da[[d, n]] += dlog_decay * delta;
                    db[at_b] += g * delta * x[[b, t, d]];
                    y_ungated += c_t[at_c.clone()] * h;
                    dc[at_c] += dy_ungated * h;
                    carry[[b, d, n]] = decay * g;
                }
                ddelta += dinput * x[[b, t, d]];
                dx[[b, t, d]] = dinput * delta + skip * dy_ungated;
                ddt[[b, t, d]] = ddelta * problem.options.step_size().reference_slope(raw, problem.dtype);
                if let Some(z) = inputs.find("z") {
                    dz[[b, t, d]] = dy[[b, t, d]] * y_ungated * silu_slope(z[[b, t, d]]);
                }
                if inputs.find("D").is_some() {
                    dd[d] += dy_ungated * x[[b, t, d]];
                }
                if inputs.find("dt_bias").is_some() {
                    dbias[d] += ddt[[b, t, d]];
                }
            }
        }
    }
    let all = [("dx", dx), ("ddt", ddt), ("dA", da), ("dB", db), ("dC", dc), ("dD", dd), ("dz", dz)];
    Ok(all.into_iter().chain([("ddt_bias", dbias), ("dinitial_state", carry)]).collect())
}

fn sigmoid(v: f64) -> f64 {
    1.0 / (1.0 + (-v).exp())
}

fn silu(v: f64) -> f64 {
    v * sigmoid(v)
}

fn silu_slope(v: f64) -> f64 {
    sigmoid(v) * (1.0 + v * (1.0 - sigmoid(v)))
}
