//! The plain truth: f64, one loop per axis, written to be read beside the formula.

use super::{Form, Problem};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::DType;
use ndarray::{Array3, Array4, ArrayD};

/// The scan of `inputs`: `y` (B, L, D), `last_state` (B, D, N) and `states` (B, L, D, N).
pub fn selective_scan(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, channels, state, .. } = *problem;
    let (x, dt, a) = (inputs.get("x")?, inputs.get("dt")?, inputs.get("A")?);
    let (b_t, c_t) = (inputs.get("B")?, inputs.get("C")?);

    let mut y = Array3::zeros((batch, length, channels));
    let mut states = Array4::zeros((batch, length, channels, state));
    let mut h = match inputs.find("h0") {
        Some(h0) => h0.clone(),
        None => Array3::zeros((batch, channels, state)).into_dyn(),
    };
    for b in 0..batch {
        for t in 0..length {
            for d in 0..channels {
                let raw = dt[[b, t, d]] + inputs.find("dt_bias").map_or(0.0, |bias| bias[d]);
                let delta = step_size(problem, raw);
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

/// `B` or `C` of one batch, time, channel and state, whatever its form.
fn at(values: &ArrayD<f64>, form: Form, problem: &Problem, [b, t, d, n]: [usize; 4]) -> f64 {
    match form {
        Form::Constant => values[[d, n]],
        Form::PerStep { .. } if values.ndim() == 3 => values[[b, t, n]],
        Form::PerStep { groups } => values[[b, t, d / (problem.channels / groups), n]],
    }
}

fn step_size(problem: &Problem, raw: f64) -> f64 {
    let size = if problem.options.dt_softplus { softplus(raw) } else { raw };
    let bound = |value: f64| match problem.dtype {
        DType::F64 => value,
        _ => value as f32 as f64,
    };
    match problem.options.dt_clamp {
        // Not f64::clamp, which would turn a NaN bound into a panic; a NaN size stays NaN.
        Some((lo, _)) if size < bound(lo) => bound(lo),
        Some((_, hi)) if size > bound(hi) => bound(hi),
        _ => size,
    }
}

fn softplus(v: f64) -> f64 {
    v.max(0.0) + (-v.abs()).exp().ln_1p()
}

fn silu(v: f64) -> f64 {
    v / (1.0 + (-v).exp())
}
