//! The reference: f64, in the form of the formula.

use super::{NAMES, Problem, window};
use crate::error::Result;
use crate::op::Named;
use ndarray::{ArrayD, Axis, Ix3, Slice};

/// The keys and values of each level.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let mut outputs = Named::default();
    for (which, name) in ["k", "v"].into_iter().enumerate() {
        let mut level = by_age(inputs.get(name)?, problem.levels.first);
        for (&size, names) in problem.levels.sizes[1..].iter().zip(NAMES) {
            level = next(&level, size);
            outputs.push(names[which], level.clone());
        }
    }
    Ok(outputs)
}

/// A bank with its oldest slot first.
pub fn by_age(bank: &ArrayD<f64>, first: usize) -> ArrayD<f64> {
    let slots = bank.len_of(Axis(1));
    let order: Vec<usize> = (0..slots).map(|age| (first + age) % slots).collect();
    bank.select(Axis(1), &order)
}

/// The level above a level.
pub fn next(level: &ArrayD<f64>, size: usize) -> ArrayD<f64> {
    let slots = level.len_of(Axis(1));
    let mut next = ArrayD::zeros([level.len_of(Axis(0)), size, level.len_of(Axis(2))].as_slice());
    for (j, mut mean) in next.axis_iter_mut(Axis(1)).enumerate() {
        let window = window(j, slots, size);
        let count = window.len() as f64;
        mean.assign(&(level.slice_axis(Axis(1), Slice::from(window)).sum_axis(Axis(1)) / count));
    }
    next
}

/// The gradients `dk` and `dv`.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let sizes = &problem.levels.sizes;
    let mut outputs = Named::default();
    for (which, (name, gradient)) in [("k", "dk"), ("v", "dv")].into_iter().enumerate() {
        let bank = inputs.get(name)?;
        let shape = |size| [bank.len_of(Axis(0)), size, bank.len_of(Axis(2))];
        let of_level = |level: usize| {
            let given = inputs.find(NAMES[level - 1][2 + which]);
            given.cloned().unwrap_or_else(|| ArrayD::zeros(shape(sizes[level]).as_slice()))
        };
        let mut g = of_level(sizes.len() - 1);
        for level in (0..sizes.len() - 1).rev() {
            let below = if level > 0 { of_level(level) } else { ArrayD::zeros(shape(sizes[0]).as_slice()) };
            g = spread(&g, below);
        }
        let first = problem.levels.first;
        // Rotates the gradient back to the bank's own order.
        outputs.push(gradient, by_age(&g, (sizes[0] - first) % sizes[0]));
    }
    Ok(outputs)
}

/// Adds to the cotangents of a level their shares of the cotangents of the level above.
fn spread(above: &ArrayD<f64>, below: ArrayD<f64>) -> ArrayD<f64> {
    let (from, to) = (below.len_of(Axis(1)), above.len_of(Axis(1)));
    let mut below = below.into_dimensionality::<Ix3>().expect("batch, slots and width");
    for j in 0..to {
        let window = window(j, from, to);
        let share = above.index_axis(Axis(1), j).to_owned() / window.len() as f64;
        for r in window {
            let mut slot = below.index_axis_mut(Axis(1), r);
            slot += &share.view().into_dimensionality::<ndarray::Ix2>().expect("batch and width");
        }
    }
    below.into_dyn()
}
