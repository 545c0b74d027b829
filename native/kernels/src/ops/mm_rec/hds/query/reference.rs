//! The reference: f64, in the order of the description.

use super::Problem;
use crate::error::Result;
use crate::op::Named;
use crate::ops::mm_rec::hds::reference::next;
use ndarray::{Array3, ArrayD, Ix3};
use std::cmp::Ordering;

/// Computes `context` and `slots`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (q, v) = (inputs.get("q")?, inputs.get("v")?);
    let mut levels = vec![inputs.get("k")?.clone()];
    for &size in &problem.levels.sizes[1..] {
        levels.push(next(&levels[levels.len() - 1], size));
    }
    let width = problem.levels.width;
    let score = |level: &ArrayD<f64>, b: usize, t: usize, slot: usize| -> f64 {
        (0..width).map(|d| q[[b, t, d]] * level[[problem.memory(b), slot, d]]).sum::<f64>() * problem.scale()
    };
    let mut context = ArrayD::zeros(q.shape()).into_dimensionality::<Ix3>().expect("batch, queries and width");
    let mut slots = Array3::zeros((problem.batch, problem.length, problem.candidates()[0]));
    for (b, t) in (0..problem.batch).flat_map(|b| (0..problem.length).map(move |t| (b, t))) {
        let mut candidates: Vec<usize> = (0..problem.levels.sizes[levels.len() - 1]).collect();
        for level in levels[1..].iter().rev() {
            let mut scored: Vec<_> = candidates.iter().map(|&slot| (score(level, b, t, slot), slot)).collect();
            scored.sort_by(order);
            scored.truncate(problem.top_k);
            scored.sort_by_key(|&(_, slot)| slot);
            let children = |(_, slot): (f64, usize)| slot * problem.ratio..(slot + 1) * problem.ratio;
            candidates = scored.into_iter().flat_map(children).collect();
        }
        let scores: Vec<f64> = candidates.iter().map(|&slot| score(&levels[0], b, t, slot)).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (i, (&slot, weight)) in candidates.iter().zip(&weights).enumerate() {
            slots[[b, t, i]] = slot as f64;
            for d in 0..width {
                context[[b, t, d]] += weight / sum * v[[problem.memory(b), slot, d]];
            }
        }
    }
    Ok([("context", context.into_dyn()), ("slots", slots.into_dyn())].into_iter().collect())
}

/// The order of ranks: larger scores first, NaN last, ties by the lower slot.
pub fn order<E: PartialOrd>(a: &(E, usize), b: &(E, usize)) -> Ordering {
    #[allow(clippy::eq_op)]
    let nan = |score: &E| score != score;
    let by_score = b.0.partial_cmp(&a.0).unwrap_or_else(|| nan(&a.0).cmp(&nan(&b.0)));
    by_score.then(a.1.cmp(&b.1))
}
