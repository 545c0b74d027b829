//! The reference: f64, one loop per axis, written to be read beside the formula.

use super::{EPS, Problem};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array2, ArrayD, Axis, s};

/// The recurrence of `inputs`: `y` and `last_state`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let mut y = ArrayD::zeros(inputs.get("v")?.shape());
    let mut last_state = zero_states(problem);
    for b in 0..problem.batch {
        for h in 0..problem.heads {
            let states = states(problem, inputs, [b, h])?;
            for t in 0..problem.length {
                let q = key(problem, inputs, "q", [b, t, h])?;
                for j in 0..problem.values {
                    let sum: f64 = (0..problem.keys).map(|i| states[t + 1][[i, j]] * q[i]).sum();
                    y[[b, t, h, j]] = problem.scale * sum;
                }
            }
            last_state.slice_mut(s![b, h, .., ..]).assign(&states[problem.length]);
        }
    }
    Ok([("y", y), ("last_state", last_state)].into_iter().collect())
}

fn zero_states(problem: &Problem) -> ArrayD<f64> {
    ArrayD::zeros(&[problem.batch, problem.heads, problem.keys, problem.values][..])
}

/// `q` or `k` of a step of a head, normalized with `qk_l2norm`.
fn key(problem: &Problem, inputs: &Named<ArrayD<f64>>, name: &str, [b, t, h]: [usize; 3]) -> Result<Vec<f64>> {
    let group = h / problem.heads_per_group();
    let x = inputs.get(name)?;
    let x: Vec<f64> = (0..problem.keys).map(|i| x[[b, t, group, i]]).collect();
    let length = length(problem, &x);
    Ok(x.iter().map(|x| x / length).collect())
}

/// The L2 norm that `q` or `k` is divided by, or 1 without `qk_l2norm`.
fn length(problem: &Problem, x: &[f64]) -> f64 {
    if problem.qk_l2norm { (x.iter().map(|x| x * x).sum::<f64>() + EPS).sqrt() } else { 1.0 }
}

/// `a` of a step of a head.
fn decay(inputs: &Named<ArrayD<f64>>, at: [usize; 3]) -> f64 {
    inputs.find("g").map_or(1.0, |g| g[at].exp())
}

/// `e` of a step, from the state before it.
fn errors(problem: &Problem, inputs: &Named<ArrayD<f64>>, at: [usize; 3], before: &Array2<f64>) -> Result<Vec<f64>> {
    let ([b, t, h], v) = (at, inputs.get("v")?);
    let (k, a) = (key(problem, inputs, "k", at)?, decay(inputs, at));
    let had = |j: usize| (0..problem.keys).map(|i| a * before[[i, j]] * k[i]).sum::<f64>();
    Ok((0..problem.values).map(|j| v[[b, t, h, j]] - had(j)).collect())
}

/// The states of a head before the first step and after each.
fn states(problem: &Problem, inputs: &Named<ArrayD<f64>>, [b, h]: [usize; 2]) -> Result<Vec<Array2<f64>>> {
    let mut state = Array2::zeros((problem.keys, problem.values));
    if let Some(initial_state) = inputs.find("initial_state") {
        state.assign(&initial_state.slice(s![b, h, .., ..]));
    }
    let mut states = vec![state.clone()];
    for t in 0..problem.length {
        let at = [b, t, h];
        let (k, a, beta) = (key(problem, inputs, "k", at)?, decay(inputs, at), inputs.get("beta")?[at]);
        let e = errors(problem, inputs, at, &state)?;
        for ((i, j), s) in state.indexed_iter_mut() {
            *s = a * *s + k[i] * beta * e[j];
        }
        states.push(state.clone());
    }
    Ok(states)
}

/// The gradients of [`forward`] for each of its `inputs`, given the cotangents among them.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (dy, betas) = (inputs.get("dy")?, inputs.get("beta")?);
    let [mut dq, mut dk, mut dv, mut dbeta] =
        ["q", "k", "v", "beta"].map(|name| ArrayD::zeros(inputs.find(name).map_or(&[][..], |input| input.shape())));
    let mut dg = dbeta.clone();
    // a[t+1] G'[t+1], which ends as the gradient of the initial state.
    let mut carry = inputs.find("dlast_state").cloned().unwrap_or_else(|| zero_states(problem));
    for b in 0..problem.batch {
        for h in 0..problem.heads {
            let states = states(problem, inputs, [b, h])?;
            let mut carry = carry.index_axis_mut(Axis(0), b);
            let mut carry = carry.index_axis_mut(Axis(0), h);
            let group = h / problem.heads_per_group();
            for t in (0..problem.length).rev() {
                let at = [b, t, h];
                let (q, k) = (key(problem, inputs, "q", at)?, key(problem, inputs, "k", at)?);
                let (a, beta) = (decay(inputs, at), betas[at]);
                let e = errors(problem, inputs, at, &states[t])?;
                let mut g = Array2::zeros((problem.keys, problem.values));
                for ((i, j), g) in g.indexed_iter_mut() {
                    *g = problem.scale * q[i] * dy[[b, t, h, j]] + carry[[i, j]];
                }
                let de: Vec<f64> =
                    (0..problem.values).map(|j| (0..problem.keys).map(|i| g[[i, j]] * k[i]).sum()).collect();
                for j in 0..problem.values {
                    dv[[b, t, h, j]] = beta * de[j];
                    dbeta[at] += de[j] * e[j];
                }
                for ((i, j), g) in g.indexed_iter() {
                    let (before, in_group) = (a * states[t][[i, j]], [b, t, group, i]);
                    let g_before = g - k[i] * beta * de[j];
                    dq[in_group] += problem.scale * states[t + 1][[i, j]] * dy[[b, t, h, j]];
                    dk[in_group] += g * beta * e[j] - before * beta * de[j];
                    dg[at] += g_before * before;
                    carry[[i, j]] = a * g_before;
                }
            }
        }
    }
    for (name, gradient) in [("q", &mut dq), ("k", &mut dk)] {
        through_length(problem, inputs.get(name)?, gradient);
    }
    let all = [("dq", dq), ("dk", dk), ("dv", dv), ("dbeta", dbeta), ("dg", dg), ("dinitial_state", carry)];
    Ok(all.into_iter().collect())
}

/// Turns the gradient of the normalized `q` or `k` into that of the input `x`.
fn through_length(problem: &Problem, x: &ArrayD<f64>, gradient: &mut ArrayD<f64>) {
    if !problem.qk_l2norm {
        return;
    }
    let last = Axis(x.ndim() - 1);
    for (mut gradient, x) in gradient.lanes_mut(last).into_iter().zip(x.lanes(last)) {
        let length = length(problem, &x.to_vec());
        let along = (&gradient * &x).sum() / length;
        gradient.zip_mut_with(&x, |d, x| *d = (*d - x / length * along) / length);
    }
}
