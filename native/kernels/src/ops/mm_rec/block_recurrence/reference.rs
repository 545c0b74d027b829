//! The reference: f64, one loop per axis, in the form of the formula.

use super::{EPS, Problem};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array1, Array2, Array3, ArrayD, ArrayView1, ArrayView2, Axis, Ix1, Ix2, Ix3, s};

/// The inputs, as arrays of known rank.
struct Given<'a> {
    problem: &'a Problem,
    z: Array3<f64>,
    gamma: Array3<f64>,
    w_gate: Array2<f64>,
    b_gate: Array1<f64>,
    /// Zeros if there is no second gate.
    w_mix: Array2<f64>,
    b_mix: Array1<f64>,
    initial_state: Array2<f64>,
}

/// The intermediate values of a step, for one batch.
struct Step {
    s: Array1<f64>,
    m: Array1<f64>,
    u: Array1<f64>,
    /// The norm's divisor.
    size: f64,
}

fn sigmoid(v: f64) -> f64 {
    if v >= 0.0 { 1.0 / (1.0 + (-v).exp()) } else { v.exp() / (1.0 + v.exp()) }
}

/// `M v + b`.
fn linear(m: ArrayView2<f64>, v: ArrayView1<f64>, b: &Array1<f64>) -> Array1<f64> {
    b + &Array1::from_iter(m.rows().into_iter().map(|row| row.iter().zip(&v).map(|(w, v)| w * v).sum::<f64>()))
}

impl<'a> Given<'a> {
    fn new(problem: &'a Problem, inputs: &Named<ArrayD<f64>>) -> Result<Self> {
        let Problem { batch, width, .. } = *problem;
        let [z, gamma] = ["z", "gamma"].map(|name| inputs.get(name).map(rank::<Ix3>));
        let matrix = |name, dims| inputs.find(name).map_or_else(|| Array2::zeros(dims), rank::<Ix2>);
        let vector = |name| inputs.find(name).map_or_else(|| Array1::zeros(width), rank::<Ix1>);
        Ok(Given {
            problem,
            z: z?,
            gamma: gamma?,
            w_gate: matrix("w_gate", (width, width)),
            b_gate: vector("b_gate"),
            w_mix: matrix("w_mix", (width, 2 * width)),
            b_mix: vector("b_mix"),
            initial_state: matrix("initial_state", (batch, width)),
        })
    }

    fn step(&self, i: usize, t: usize, h: ArrayView1<f64>) -> Step {
        let (width, mix) = (self.problem.width, self.problem.mix);
        let (z, gamma) = (self.z.slice(s![i, t, ..]), self.gamma.slice(s![i, t, ..]));
        let s = linear(self.w_gate.view(), h, &self.b_gate).mapv(sigmoid);
        let of_z = linear(self.w_mix.slice(s![.., ..width]), z, &self.b_mix);
        let m = linear(self.w_mix.slice(s![.., width..]), h, &of_z).mapv(sigmoid);
        let n = |d: usize| m[d] * z[d] + (1.0 - m[d]) * h[d] + gamma[d] * h[d];
        let u = Array1::from_shape_fn(width, |d| z[d] * s[d] + gamma[d] * h[d] + mix * n(d));
        let mean = u.iter().map(|u| u * u).sum::<f64>() / width.max(1) as f64;
        let size = if self.problem.norm { mean.sqrt() + EPS } else { 1.0 };
        Step { s, m, u, size }
    }
}

fn rank<D: ndarray::Dimension>(array: &ArrayD<f64>) -> ndarray::Array<f64, D> {
    array.clone().into_dimensionality().expect("a checked rank")
}

/// The recurrence: `h` (B, L, D) and `last_state` (B, D).
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let given = Given::new(problem, inputs)?;
    let mut h = Array3::zeros(given.z.dim());
    let mut state = given.initial_state.clone();
    for i in 0..problem.batch {
        for t in 0..problem.length {
            let Step { u, size, .. } = given.step(i, t, state.row(i));
            let bound = problem.clip.unwrap_or(f64::INFINITY);
            // Not `clamp`: NaN must stay NaN.
            let new = u.mapv(|u| {
                if u / size > bound {
                    bound
                } else if u / size < -bound {
                    -bound
                } else {
                    u / size
                }
            });
            h.slice_mut(s![i, t, ..]).assign(&new);
            state.row_mut(i).assign(&new);
        }
    }
    Ok([("h", h.into_dyn()), ("last_state", state.into_dyn())].into_iter().collect())
}

/// The gradients of all inputs.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let Problem { batch, length, width, mix, .. } = *problem;
    let given = Given::new(problem, inputs)?;
    let (h, dh) = (rank::<Ix3>(inputs.get("h")?), rank::<Ix3>(inputs.get("dh")?));
    let (mut dz, mut dgamma) = (Array3::zeros(given.z.dim()), Array3::zeros(given.z.dim()));
    let (mut dw_gate, mut dw_mix) = (Array2::zeros((width, width)), Array2::zeros((width, 2 * width)));
    let (mut db_gate, mut db_mix) = (Array1::zeros(width), Array1::zeros(width));
    let mut carry = inputs.find("dlast_state").map_or_else(|| Array2::zeros((batch, width)), rank::<Ix2>);
    for i in 0..batch {
        for t in (0..length).rev() {
            let before = if t > 0 { h.slice(s![i, t - 1, ..]) } else { given.initial_state.row(i) };
            let step = given.step(i, t, before);
            let g = through_guards(problem, &step, &carry.row(i) + &dh.slice(s![i, t, ..]));
            let (s, m, z, gamma) = (&step.s, &step.m, given.z.slice(s![i, t, ..]), given.gamma.slice(s![i, t, ..]));
            let ds = Array1::from_shape_fn(width, |d| g[d] * z[d] * s[d] * (1.0 - s[d]));
            let dm = Array1::from_shape_fn(width, |d| mix * g[d] * (z[d] - before[d]) * m[d] * (1.0 - m[d]));
            for d in 0..width {
                let of_z: f64 = (0..width).map(|o| dm[o] * given.w_mix[[o, d]]).sum();
                let of_h: f64 =
                    (0..width).map(|o| ds[o] * given.w_gate[[o, d]] + dm[o] * given.w_mix[[o, width + d]]).sum();
                dz[[i, t, d]] = g[d] * s[d] + mix * g[d] * m[d] + of_z;
                dgamma[[i, t, d]] = (1.0 + mix) * g[d] * before[d];
                carry[[i, d]] = g[d] * ((1.0 + mix) * gamma[d] + mix * (1.0 - m[d])) + of_h;
            }
            for o in 0..width {
                dw_gate.row_mut(o).scaled_add(ds[o], &before);
                dw_mix.slice_mut(s![o, ..width]).scaled_add(dm[o], &z);
                dw_mix.slice_mut(s![o, width..]).scaled_add(dm[o], &before);
            }
            db_gate += &ds;
            db_mix += &dm;
        }
    }
    let matrices =
        [("dw_gate", dw_gate), ("dw_mix", dw_mix), ("dinitial_state", carry)].map(|(name, g)| (name, g.into_dyn()));
    let vectors = [("db_gate", db_gate), ("db_mix", db_mix)].map(|(name, g)| (name, g.into_dyn()));
    let sequences = [("dz", dz), ("dgamma", dgamma)].map(|(name, g)| (name, g.into_dyn()));
    Ok(matrices.into_iter().chain(vectors).chain(sequences).collect())
}

/// The gradient of `u`, back through clip and norm.
fn through_guards(problem: &Problem, step: &Step, g: Array1<f64>) -> Array1<f64> {
    let (u, size) = (&step.u, step.size);
    let bound = problem.clip.unwrap_or(f64::INFINITY);
    let g = Array1::from_shape_fn(u.len(), |d| if (u[d] / size).abs() > bound { 0.0 } else { g[d] });
    if !problem.norm {
        return g;
    }
    let root = size - EPS;
    let dot = (&g * u).sum_axis(Axis(0)).into_scalar();
    let slope = if root > 0.0 { dot / (u.len() as f64 * root * size * size) } else { 0.0 };
    Array1::from_shape_fn(u.len(), |d| g[d] / size - u[d] * slope)
}
