//! The reference: f64, one query and one key at a time, in the form of the formula.

use super::{Layout, Problem, Repeated};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array1, Array3, Array4, ArrayD, ArrayView1, ArrayView4, ArrayViewMut4, Ix3, Ix4};

/// The inputs, in (batch, heads, length, width).
struct Given<'a> {
    problem: &'a Problem,
    q: ArrayView4<'a, f64>,
    k: ArrayView4<'a, f64>,
    v: ArrayView4<'a, f64>,
    mask: Option<&'a ArrayD<f64>>,
    bias: Option<&'a ArrayD<f64>>,
}

impl<'a> Given<'a> {
    fn new(problem: &'a Problem, inputs: &'a Named<ArrayD<f64>>) -> Result<Given<'a>> {
        let of = |name, layout| heads_first(layout, inputs.get(name)?);
        let (layout, key_layout) = (problem.layout, problem.key_layout);
        let (mask, bias) = (inputs.find("mask"), inputs.find("bias"));
        let [q, k, v] = [of("q", layout)?, of("k", key_layout)?, of("v", key_layout)?];
        Ok(Given { problem, q, k, v, mask, bias })
    }

    /// Batch, head and query index of all rows.
    fn rows(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let Problem { batch, heads, queries, .. } = *self.problem;
        (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..queries).map(move |i| (b, h, i))))
    }

    /// The score of a key, or `None` if it is masked.
    fn score(&self, (b, h, i): (usize, usize, usize), j: usize) -> Option<f64> {
        let hidden = repeated(self.mask, self.problem.mask, [b, h, i, j]) == Some(0.0);
        if hidden || j >= self.problem.visible(i) {
            return None;
        }
        let bias = repeated(self.bias, self.problem.bias, [b, h, i, j]).unwrap_or(0.0);
        let (q, k) = (row(&self.q, b, h, i), row(&self.k, b, self.problem.key_head(h), j));
        Some(self.problem.scale * q.dot(&k) + bias)
    }

    /// The visible keys of a query with their weights `P`, and `lse`.
    fn weights(&self, at: (usize, usize, usize)) -> (Vec<(usize, f64)>, f64) {
        let scores: Vec<_> = (0..self.problem.keys).filter_map(|j| Some((j, self.score(at, j)?))).collect();
        // NaN is left out of the maximum; it reaches the sum.
        let largest = scores.iter().fold(f64::NEG_INFINITY, |m, &(_, s)| m.max(s));
        let shift = if largest.is_finite() { largest } else { 0.0 };
        let sum: f64 = scores.iter().map(|(_, s)| (s - shift).exp()).sum();
        (scores.into_iter().map(|(j, s)| (j, (s - shift).exp() / sum)).collect(), shift + sum.ln())
    }
}

fn heads_first<'a>(layout: Layout, tensor: &'a ArrayD<f64>) -> Result<ArrayView4<'a, f64>> {
    let view = tensor.view().into_dimensionality::<Ix4>().expect("a checked rank");
    Ok(match layout {
        Layout::HeadsFirst => view,
        Layout::HeadsLast => view.permuted_axes([0, 2, 1, 3]),
    })
}

fn in_layout(problem: &Problem, tensor: Array4<f64>) -> ArrayD<f64> {
    match problem.layout {
        Layout::HeadsFirst => tensor.into_dyn(),
        Layout::HeadsLast => tensor.permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned().into_dyn(),
    }
}

fn row<'a>(tensor: &'a ArrayView4<f64>, b: usize, h: usize, i: usize) -> ArrayView1<'a, f64> {
    tensor.slice(ndarray::s![b, h, i, ..])
}

fn add(tensor: &mut Array4<f64>, [b, h, i]: [usize; 3], factor: f64, by: ArrayView1<f64>) {
    let mut view: ArrayViewMut4<f64> = tensor.view_mut();
    view.slice_mut(ndarray::s![b, h, i, ..]).scaled_add(factor, &by);
}

/// An element of a broadcast tensor.
fn repeated(tensor: Option<&ArrayD<f64>>, strides: Option<Repeated>, at: [usize; 4]) -> Option<f64> {
    let values = tensor?.as_slice().expect("values in order");
    Some(values[place(strides?, at)])
}

fn place(strides: Repeated, at: [usize; 4]) -> usize {
    strides.iter().zip(at).map(|(stride, i)| stride * i).sum()
}

/// Attention: `y` and `lse`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let given = Given::new(problem, inputs)?;
    let Problem { batch, heads, queries, value_width, .. } = *problem;
    let mut y = Array4::zeros((batch, heads, queries, value_width));
    let mut lse = Array3::zeros((batch, heads, queries));
    for at @ (b, h, i) in given.rows() {
        let (weights, log_sum) = given.weights(at);
        for (j, p) in weights {
            add(&mut y, [b, h, i], p, row(&given.v, b, problem.key_head(h), j));
        }
        lse[at] = log_sum;
    }
    Ok([("y", in_layout(problem, y)), ("lse", lse.into_dyn())].into_iter().collect())
}

/// The gradients `dq`, `dk`, `dv` and `dbias`. Neither `y` nor `lse` is read: `P` and `delta` are recomputed, because
/// for large scores the rounding of `lse` costs digits of `P`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let given = Given::new(problem, inputs)?;
    let dy = heads_first(problem.layout, inputs.get("dy")?)?;
    let dlse = inputs.find("dlse").map(|d| d.view().into_dimensionality::<Ix3>().expect("a checked rank"));
    let [mut dq, mut dk, mut dv] = [given.q, given.k, given.v].map(|of| Array4::zeros(of.dim()));
    let mut dbias = given.bias.map(|bias| Array1::<f64>::zeros(bias.len()));
    for at @ (b, h, i) in given.rows() {
        let (dy, kh) = (row(&dy, b, h, i), problem.key_head(h));
        let (weights, _) = given.weights(at);
        let dp = |j| dy.dot(&row(&given.v, b, kh, j));
        let mean: f64 = weights.iter().map(|&(j, p)| p * dp(j)).sum();
        let delta = mean - dlse.map_or(0.0, |dlse| dlse[at]);
        for (j, p) in weights {
            let ds = p * (dp(j) - delta);
            add(&mut dq, [b, h, i], problem.scale * ds, row(&given.k, b, kh, j));
            add(&mut dk, [b, kh, j], problem.scale * ds, row(&given.q, b, h, i));
            add(&mut dv, [b, kh, j], p, dy);
            if let (Some(dbias), Some(strides)) = (&mut dbias, problem.bias) {
                dbias[place(strides, [b, h, i, j])] += ds;
            }
        }
    }
    let mut gradients: Named<_> =
        [("dq", dq), ("dk", dk), ("dv", dv)].map(|(name, d)| (name, in_layout(problem, d))).into_iter().collect();
    if let (Some(dbias), Some(bias)) = (dbias, given.bias) {
        gradients.push("dbias", dbias.into_shape_with_order(bias.shape()).expect("as many values").into_dyn());
    }
    Ok(gradients)
}
