//! The reference: f64, one row at a time, in the form of the formula.

use super::{EpsMode, Problem};
use crate::error::Result;
use crate::op::Named;
use crate::ops::activations;
use ndarray::{Array1, ArrayD};

/// A row's statistics and normalised values: `x^`, `mean`, `r` and `t`.
struct Row {
    unit: Array1<f64>,
    mean: f64,
    r: f64,
    t: f64,
}

fn row(problem: &Problem, x: &[f64]) -> Row {
    let columns = problem.columns.max(1) as f64;
    let mean = if problem.centered { x.iter().sum::<f64>() / columns } else { 0.0 };
    let square = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / columns;
    let r = match problem.eps_mode {
        EpsMode::Inside => 1.0 / (square + problem.eps).sqrt(),
        EpsMode::Outside => 1.0 / (square.sqrt() + problem.eps),
    };
    let t = match problem.eps_mode {
        EpsMode::Inside => r,
        EpsMode::Outside if square == 0.0 => 0.0,
        EpsMode::Outside => 1.0 / square.sqrt(),
    };
    Row { unit: x.iter().map(|v| (v - mean) * r).collect(), mean, r, t }
}

/// All rows of a tensor in order.
fn rows<'a>(problem: &Problem, tensor: &'a ArrayD<f64>) -> impl Iterator<Item = &'a [f64]> + use<'a> {
    tensor.as_slice().expect("values in order").chunks_exact(problem.columns.max(1))
}

fn sums(inputs: &Named<ArrayD<f64>>, unit: &Array1<f64>) -> Result<Array1<f64>> {
    let w = inputs.get("w")?;
    Ok(unit.iter().enumerate().map(|(i, v)| w[i] * v + inputs.find("b").map_or(0.0, |b| b[i])).collect())
}

/// `y`, `mean` and `rstd`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (x, mut y, mut mean, mut rstd) = (inputs.get("x")?, Vec::new(), Vec::new(), Vec::new());
    let all: Vec<Row> = match problem.columns {
        0 => vec![(); problem.rows].iter().map(|()| row(problem, &[])).collect(),
        _ => rows(problem, x).map(|x| row(problem, x)).collect(),
    };
    for row in all {
        y.extend(sums(inputs, &row.unit)?.iter().map(|&z| problem.activation.map_or(z, |f| activations::value(f, z))));
        mean.push(row.mean);
        rstd.push(row.r);
    }
    let leading = &x.shape()[..x.ndim() - 1];
    let shaped = |dims: &[usize], values| ArrayD::from_shape_vec(dims, values).expect("as many values");
    Ok([("y", shaped(x.shape(), y)), ("mean", shaped(leading, mean)), ("rstd", shaped(leading, rstd))]
        .into_iter()
        .collect())
}

/// The gradients `dx`, `dw` and `db`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (x, w) = (inputs.get("x")?, inputs.get("w")?);
    let [mut dw, mut db] = [0, 1].map(|_| ArrayD::zeros(&[problem.columns][..]));
    let mut dx = Vec::new();
    for (x, dy) in rows(problem, x).zip(rows(problem, inputs.get("dy")?)) {
        let Row { unit, mean, r, t } = row(problem, x);
        let slopes = sums(inputs, &unit)?.mapv(|z| problem.activation.map_or(1.0, |f| activations::slope(f, z)));
        let dz: Array1<f64> = dy.iter().zip(&slopes).map(|(dy, slope)| dy * slope).collect();
        let u: Array1<f64> = dz.iter().enumerate().map(|(i, dz)| dz * w[i]).collect();
        let columns = problem.columns as f64;
        let mean_u = if problem.centered { u.sum() / columns } else { 0.0 };
        let along = u.dot(&unit) / columns;
        for (i, x) in x.iter().enumerate() {
            dx.push(r * (u[i] - mean_u - t * (x - mean) * along));
            dw[i] += dz[i] * unit[i];
            db[i] += dz[i];
        }
    }
    let dx = ArrayD::from_shape_vec(x.shape(), dx).expect("as many values");
    Ok([("dx", dx), ("dw", dw), ("db", db)].into_iter().collect())
}
