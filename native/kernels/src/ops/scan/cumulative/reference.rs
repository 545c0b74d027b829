//! The reference: f64, a column at a time, in the form of the formula.

use super::{Problem, Scan};
use crate::error::Result;
use crate::op::Named;
use ndarray::ArrayD;

/// `y`, and `log_y` of `exp_product_scan`, (B, H, L, W); `last_state` (B, H, W).
pub fn forward(problem: &Problem, [x, _]: [&str; 2], inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let x = inputs.get(x)?;
    let mut last = start(problem, inputs.find("initial_state"));
    let (mut y, mut log_y) = (ArrayD::zeros(x.shape()), ArrayD::zeros(x.shape()));
    for t in times(problem, problem.settings.reverse) {
        for (at, state) in last.indexed_iter_mut() {
            let at = sequence_index(&at, t);
            *state = accumulate(problem.settings.scan, *state, x[&at[..]]);
            log_y[&at[..]] = *state;
            y[&at[..]] = seen(problem.settings.scan, *state);
        }
    }
    Ok([("y", y), ("log_y", log_y), ("last_state", last)].into_iter().collect())
}

/// The state after a step: a sum of logarithms for `exp_product_scan`, else `y` itself.
fn accumulate(scan: Scan, state: f64, x: f64) -> f64 {
    match scan {
        Scan::ExpProduct { eps, log_min, .. } => {
            let log = x.clamp(eps, 1.0).ln();
            state + if log < log_min { log_min } else { log }
        }
        Scan::Product => state * x,
        Scan::LogSumExp => log_add_exp(state, x),
        Scan::Sum => state + x,
    }
}

fn seen(scan: Scan, state: f64) -> f64 {
    match scan {
        Scan::ExpProduct { .. } => state.exp(),
        _ => state,
    }
}

/// `ln(exp(a) + exp(b))`, also of two equal infinities.
fn log_add_exp(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    high + below(low, high).exp().ln_1p()
}

/// The gradients of the sequence and of the initial state.
pub fn backward(problem: &Problem, names: [&str; 2], inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let dy = inputs.get("dy")?;
    let zeros = || ArrayD::zeros(&problem.state.shape[..]);
    let first = start(problem, inputs.find("initial_state")).mapv(|v| seen(problem.settings.scan, v));
    let (x, y) = (inputs.get(names[0])?, results(problem, names, inputs)?);
    let mut dx = ArrayD::zeros(dy.shape());
    // The cotangents carried from later steps: of `y`, and of the sum of logarithms.
    let dlast = inputs.find("dlast_state").cloned().unwrap_or_else(zeros);
    let logs = matches!(problem.settings.scan, Scan::ExpProduct { .. });
    let (mut later, mut log_later) = if logs { (zeros(), dlast) } else { (dlast, zeros()) };
    let order: Vec<usize> = times(problem, problem.settings.reverse).collect();
    for (i, &t) in order.iter().enumerate().rev() {
        for (at, later) in later.indexed_iter_mut() {
            let here = sequence_index(&at, t);
            let before = match i {
                0 => first[&at],
                _ => y[&sequence_index(&at, order[i - 1])[..]],
            };
            log_later[&at] += inputs.find("dlog_y").map_or(0.0, |dlog_y| dlog_y[&here[..]]);
            let total = dy[&here[..]] + *later;
            let x = x[&here[..]];
            (dx[&here[..]], *later) = match problem.settings.scan {
                Scan::ExpProduct { floor, .. } => {
                    let inside = !(x < floor || x > 1.0);
                    let slope = if inside { before * total + log_later[&at] / x } else { 0.0 };
                    (slope, x.clamp(floor, 1.0) * total)
                }
                Scan::Product => (before * total, x * total),
                Scan::LogSumExp => {
                    let share = if x == f64::NEG_INFINITY { 0.0 } else { below(x, y[&here[..]]).exp() };
                    (share * total, below(before, y[&here[..]]).exp() * total)
                }
                Scan::Sum => (total, total),
            };
        }
    }
    let dstart = if logs { first * later + log_later } else { later };
    Ok([(names[1].to_string(), dx), ("dinitial_state".to_string(), dstart)].into_iter().collect())
}

/// The scan's results that its gradient reads: given, or recomputed for `logcumsumexp`. A sum reads none, so they are
/// zeros.
fn results(problem: &Problem, names: [&str; 2], inputs: &Named<ArrayD<f64>>) -> Result<ArrayD<f64>> {
    match (inputs.find("y"), problem.settings.scan) {
        (Some(y), _) => Ok(y.clone()),
        (None, Scan::LogSumExp) => forward(problem, names, inputs)?.expect("y"),
        (None, _) => Ok(ArrayD::zeros(&problem.sequence.shape[..])),
    }
}

/// `a - b`, or 0 for equal infinities.
fn below(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { a - b }
}

fn start(problem: &Problem, given: Option<&ArrayD<f64>>) -> ArrayD<f64> {
    let neutral = match problem.settings.scan {
        Scan::ExpProduct { .. } | Scan::Sum => 0.0,
        Scan::Product => 1.0,
        Scan::LogSumExp => f64::NEG_INFINITY,
    };
    given.cloned().unwrap_or_else(|| ArrayD::from_elem(&problem.state.shape[..], neutral))
}

fn times(problem: &Problem, reverse: bool) -> Box<dyn Iterator<Item = usize>> {
    if reverse { Box::new((0..problem.length).rev()) } else { Box::new(0..problem.length) }
}

/// The index in a sequence at time `t` of the element (batch, head, channel) of a state.
fn sequence_index(state: &ndarray::IxDyn, t: usize) -> [usize; 4] {
    [state[0], state[1], t, state[2]]
}
