//! The reference: f64, one part of a row at a time, in the form of the formula.

use super::Problem;
use crate::error::Result;
use crate::op::Named;
use crate::ops::activations::{Activation, slope, value};
use ndarray::ArrayD;

/// `silu(v)` and `silu'(v)`.
fn gate(v: f64) -> (f64, f64) {
    (value(Activation::Silu, v), slope(Activation::Silu, v))
}

/// `u^` and `r` of a part.
fn normalised(problem: &Problem, x: &[f64], z: &[f64]) -> (Vec<f64>, f64) {
    let first = |(x, z): (&f64, &f64)| if problem.norm_before_gate { *x } else { x * gate(*z).0 };
    let u: Vec<f64> = x.iter().zip(z).map(first).collect();
    let r = 1.0 / (u.iter().map(|u| u * u).sum::<f64>() / u.len() as f64 + problem.eps).sqrt();
    (u.iter().map(|u| u * r).collect(), r)
}

/// The elements of part `i`, counted over all rows.
fn part<'a>(problem: &Problem, tensor: &'a ArrayD<f64>, i: usize) -> &'a [f64] {
    &tensor.as_slice().expect("values in order")[i * problem.columns..][..problem.columns]
}

/// Computes `y`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (all_x, all_z, all_w) = (inputs.get("x")?, inputs.get("z")?, inputs.get("w")?);
    let mut y = Vec::new();
    for i in 0..problem.parts {
        let (x, z, w) = (part(problem, all_x, i), part(problem, all_z, i), part(problem, all_w, i % problem.groups));
        let (unit, _) = normalised(problem, x, z);
        for j in 0..problem.columns {
            let last = if problem.norm_before_gate { gate(z[j]).0 } else { 1.0 };
            y.push(w[j] * unit[j] * last);
        }
    }
    let y = ArrayD::from_shape_vec(all_x.shape(), y).expect("as many values");
    Ok([("y", y)].into_iter().collect())
}

/// The gradients `dx`, `dz` and `dw`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (all_x, all_z, all_w, all_dy) = (inputs.get("x")?, inputs.get("z")?, inputs.get("w")?, inputs.get("dy")?);
    let (mut dx, mut dz, mut dw) = (Vec::new(), Vec::new(), ArrayD::zeros(all_w.raw_dim()));
    for i in 0..problem.parts {
        let group = i % problem.groups;
        let (x, z, w) = (part(problem, all_x, i), part(problem, all_z, i), part(problem, all_w, group));
        let dy = part(problem, all_dy, i);
        let (unit, r) = normalised(problem, x, z);
        let e: Vec<f64> =
            dy.iter().zip(z).map(|(dy, z)| if problem.norm_before_gate { dy * gate(*z).0 } else { *dy }).collect();
        let along = (0..e.len()).map(|j| w[j] * e[j] * unit[j]).sum::<f64>() / e.len() as f64;
        for j in 0..problem.columns {
            let (silu, slope) = gate(z[j]);
            let du = r * (w[j] * e[j] - unit[j] * along);
            dx.push(if problem.norm_before_gate { du } else { du * silu });
            dz.push(if problem.norm_before_gate { dy[j] * w[j] * unit[j] * slope } else { du * x[j] * slope });
            dw[group * problem.columns + j] += e[j] * unit[j];
        }
    }
    let shaped = |values| ArrayD::from_shape_vec(all_x.shape(), values).expect("as many values");
    Ok([("dx", shaped(dx)), ("dz", shaped(dz)), ("dw", dw)].into_iter().collect())
}
