//! Training on the CPU. These loops are simple, because they take far less time than the ops around them.

use super::Update;
use super::learn::ByRow;
use sidewinder_kernels::cpu::pool::{self, Shared};
use sidewinder_kernels::cpu::{Exec, Storage};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::{Described, Element, View, ViewMut};
use sidewinder_kernels::with_type;

/// Rows, or elements, per task.
const ROWS: usize = 16;
const ELEMENTS: usize = 1 << 14;

pub fn cross_entropy(logits: ViewMut, targets: &[u32], scale: Option<f64>, exec: &Exec) -> Result<f64> {
    with_type!(logits.spec().dtype, S => entropies::<S>(logits.slice()?, targets, scale, exec))
}

fn entropies<S: Storage>(logits: &mut [S], targets: &[u32], scale: Option<f64>, exec: &Exec) -> Result<f64> {
    let width = logits.len() / targets.len().max(1);
    let mut losses = vec![0.0; targets.len()];
    let (rows, to) = (Shared::new(logits), Shared::new(&mut losses));
    pool::for_each(exec.threads, targets.len().div_ceil(ROWS), |chunk| {
        let first = chunk * ROWS;
        for (row, &target) in targets[first..].iter().take(ROWS).enumerate().map(|(i, target)| (first + i, target)) {
            // SAFETY: each row is taken by one task.
            let (row, loss) = unsafe { (rows.part(row * width, width), to.part(row, 1)) };
            loss[0] = entropy(row, target as usize, scale);
        }
    })?;
    Ok(losses.iter().sum())
}

fn entropy<S: Storage>(row: &mut [S], target: usize, scale: Option<f64>) -> f64 {
    let largest = row.iter().fold(f64::NEG_INFINITY, |most, v| most.max(v.to_f64()));
    let sum: f64 = row.iter().map(|v| (v.to_f64() - largest).exp()).sum();
    let loss = sum.ln() + largest - row[target].to_f64();
    if let Some(scale) = scale {
        let by = scale / sum;
        row.iter_mut().for_each(|v| *v = S::from_f64((v.to_f64() - largest).exp() * by));
        row[target] = S::from_f64(row[target].to_f64() - scale);
    }
    loss
}

pub fn scatter(from: &View, rows: &ByRow, to: ViewMut, exec: &Exec) -> Result<()> {
    with_type!(to.spec().dtype, S => add_rows::<S>(from.slice()?, rows, to.slice()?, exec))
}

fn add_rows<S: Storage>(from: &[S], rows: &ByRow, to: &mut [S], exec: &Exec) -> Result<()> {
    let count = rows.starts.len() - 1;
    let (width, to) = (to.len() / count.max(1), Shared::new(to));
    pool::for_each(exec.threads, count, |row| {
        // SAFETY: each row of the table is taken by one task.
        let to = unsafe { to.part(row * width, width) };
        for &at in &rows.order[rows.starts[row] as usize..rows.starts[row + 1] as usize] {
            let from = &from[at as usize * width..][..width];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = S::from_f64(to.to_f64() + from.to_f64()));
        }
    })
}

pub fn squares(of: &View, _exec: &Exec) -> Result<f64> {
    with_type!(of.spec().dtype, S => {
        let sum = |values: &[S]| values.iter().map(|v| v.to_f64() * v.to_f64()).sum::<f64>();
        Ok(of.slice::<S>()?.chunks(ELEMENTS).map(sum).sum())
    })
}

pub fn update(changed: [ViewMut; 3], gradient: &View, update: &Update, exec: &Exec) -> Result<()> {
    with_type!(gradient.spec().dtype, S => {
        let [weights, mean, square] = changed.map(ViewMut::slice::<S>);
        update_as([weights?, mean?, square?], gradient.slice()?, update, exec)
    })
}

fn update_as<S: Storage>(changed: [&mut [S]; 3], gradient: &[S], update: &Update, exec: &Exec) -> Result<()> {
    let changed = changed.map(Shared::new);
    pool::for_each(exec.threads, gradient.len().div_ceil(ELEMENTS), |chunk| {
        let start = chunk * ELEMENTS;
        let gradient = &gradient[start..gradient.len().min(start + ELEMENTS)];
        // SAFETY: chunks do not overlap.
        let [weights, means, squares] = changed.each_ref().map(|all| unsafe { all.part(start, gradient.len()) });
        for (i, g) in gradient.iter().enumerate() {
            let keep = if start + i < update.decayed { update.keep } else { 1.0 };
            let state = [weights[i], means[i], squares[i]].map(Element::to_f64);
            let [weight, mean, square] = changed_by(state, g.to_f64(), keep, update);
            (weights[i], means[i], squares[i]) = (S::from_f64(weight), S::from_f64(mean), S::from_f64(square));
        }
    })
}

fn changed_by([weight, mean, square]: [f64; 3], gradient: f64, keep: f64, update: &Update) -> [f64; 3] {
    let Update { scale, beta1, beta2, rate, correction, eps, .. } = *update;
    let g = gradient * scale;
    let mean = beta1 * mean + (1.0 - beta1) * g;
    let square = beta2 * square + (1.0 - beta2) * g * g;
    [weight * keep - rate * mean / ((square * correction).sqrt() + eps), mean, square]
}
