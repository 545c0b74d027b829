//! The reference: f64, one loop per axis, written to be read beside the formula.

use super::{EPS, Problem};
use crate::error::Result;
use crate::op::Named;
use ndarray::{Array2, ArrayD};

/// A head of a batch, and its inputs.
struct Head<'a> {
    problem: &'a Problem,
    inputs: &'a Named<ArrayD<f64>>,
    at: [usize; 2],
}

/// `S`, and `z` of a head after a step.
#[derive(Clone)]
struct State {
    s: Array2<f64>,
    z: Vec<f64>,
}

impl Head<'_> {
    fn zeros(&self) -> State {
        let (keys, values) = (self.problem.of_values.keys, self.problem.of_values.values);
        State { s: Array2::zeros((keys, values)), z: vec![0.0; keys] }
    }

    /// The state in the inputs `s` and `z`; zero where they are absent.
    fn state(&self, s: &str, z: &str) -> State {
        let ([b, h], mut state) = (self.at, self.zeros());
        if let Some(given) = self.inputs.find(s) {
            state.s.indexed_iter_mut().for_each(|((i, j), to)| *to = given[[b, h, i, j]]);
        }
        if let Some(given) = self.inputs.find(z) {
            state.z.iter_mut().enumerate().for_each(|(i, to)| *to = given[[b, h, i]]);
        }
        state
    }

    /// The place of a step of the head's group in `q` and `k`.
    fn of_group(&self, t: usize, i: usize) -> [usize; 4] {
        [self.at[0], t, self.at[1] / self.problem.of_values.heads_per_group(), i]
    }

    /// The place of a step of the head in `v` and `y`.
    fn of_values(&self, t: usize, j: usize) -> [usize; 4] {
        [self.at[0], t, self.at[1], j]
    }

    /// The place of a step of the head in `g`, which has one number for a head or one for each key.
    fn of_decay<'p>(&self, place: &'p mut [usize; 4], t: usize, i: usize) -> &'p [usize] {
        *place = [self.at[0], t, self.at[1], i];
        let by_key = self.inputs.find("g").is_some_and(|g| g.ndim() == 4);
        if by_key { &place[..] } else { &place[..3] }
    }

    fn decay(&self, t: usize, i: usize) -> f64 {
        self.inputs.find("g").map_or(1.0, |g| g[self.of_decay(&mut [0; 4], t, i)].exp())
    }

    /// The states before the first step and after each.
    fn states(&self) -> Result<Vec<State>> {
        let (k, v) = (self.inputs.get("k")?, self.inputs.get("v")?);
        let mut state = self.state("initial_state", "initial_z");
        let mut states = vec![state.clone()];
        for t in 0..self.problem.of_values.length {
            for ((i, j), s) in state.s.indexed_iter_mut() {
                *s = self.decay(t, i) * *s + k[self.of_group(t, i)] * v[self.of_values(t, j)];
            }
            for (i, z) in state.z.iter_mut().enumerate() {
                *z = self.decay(t, i) * *z + k[self.of_group(t, i)];
            }
            states.push(state.clone());
        }
        Ok(states)
    }

    /// `scale S^T q`, and the divisor of it.
    fn product(&self, state: &State, t: usize) -> Result<(Vec<f64>, f64)> {
        let (q, of) = (self.inputs.get("q")?, &self.problem.of_values);
        let product = |column: &dyn Fn(usize) -> f64| {
            of.scale * (0..of.keys).map(|i| column(i) * q[self.of_group(t, i)]).sum::<f64>()
        };
        let divisor = if self.problem.normalize { product(&|i| state.z[i]) + EPS } else { 1.0 };
        Ok(((0..of.values).map(|j| product(&|i| state.s[[i, j]])).collect(), divisor))
    }
}

fn heads<'a>(problem: &'a Problem, inputs: &'a Named<ArrayD<f64>>) -> impl Iterator<Item = Head<'a>> {
    let (batch, heads) = (problem.of_values.batch, problem.of_values.heads);
    (0..batch * heads).map(move |i| Head { problem, inputs, at: [i / heads, i % heads] })
}

/// Zeros for the states of all heads: `S`, and `z`.
fn zeros(problem: &Problem) -> [ArrayD<f64>; 2] {
    let of = &problem.of_values;
    [ArrayD::zeros(&[of.batch, of.heads, of.keys, of.values][..]), ArrayD::zeros(&[of.batch, of.heads, of.keys][..])]
}

fn write(state: &State, [b, h]: [usize; 2], [s, z]: [&mut ArrayD<f64>; 2]) {
    state.s.indexed_iter().for_each(|((i, j), &from)| s[[b, h, i, j]] = from);
    state.z.iter().enumerate().for_each(|(i, &from)| z[[b, h, i]] = from);
}

/// The recurrence of `inputs`: `y`, `last_state` and `last_z`.
pub fn forward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let mut y = ArrayD::zeros(inputs.get("v")?.shape());
    let [mut last_state, mut last_z] = zeros(problem);
    for head in heads(problem, inputs) {
        let states = head.states()?;
        for t in 0..problem.of_values.length {
            let (products, divisor) = head.product(&states[t + 1], t)?;
            for (j, product) in products.iter().enumerate() {
                y[head.of_values(t, j)] = product / divisor;
            }
        }
        write(&states[problem.of_values.length], head.at, [&mut last_state, &mut last_z]);
    }
    Ok([("y", y), ("last_state", last_state), ("last_z", last_z)].into_iter().collect())
}

/// The gradients of [`forward`] for each of its `inputs`, given the cotangents among them.
pub fn backward(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
    let (q, k, v, dy) = (inputs.get("q")?, inputs.get("k")?, inputs.get("v")?, inputs.get("dy")?);
    let [mut dq, mut dk, mut dv, mut dg] =
        ["q", "k", "v", "g"].map(|name| ArrayD::zeros(inputs.find(name).map_or(&[][..], |input| input.shape())));
    let [mut dinitial_state, mut dinitial_z] = zeros(problem);
    let (scale, values) = (problem.of_values.scale, problem.of_values.values);
    for head in heads(problem, inputs) {
        let states = head.states()?;
        // Diag(a[t+1]) G[t+1], which ends as the gradient of the initial state.
        let mut carry = head.state("dlast_state", "dlast_z");
        for t in (0..problem.of_values.length).rev() {
            let (products, divisor) = head.product(&states[t + 1], t)?;
            let dproduct: Vec<f64> = (0..values).map(|j| dy[head.of_values(t, j)] / divisor).collect();
            let along: f64 = products.iter().zip(&dproduct).map(|(product, d)| product * d / divisor).sum();
            let ddivisor = if problem.normalize { -along } else { 0.0 };
            for i in 0..problem.of_values.keys {
                let (in_group, a) = (head.of_group(t, i), head.decay(t, i));
                let (q, k) = (q[in_group], k[in_group]);
                let mut through_decay = 0.0;
                for (j, dproduct) in dproduct.iter().enumerate() {
                    let at = head.of_values(t, j);
                    let g = scale * q * dproduct + carry.s[[i, j]];
                    dq[in_group] += scale * states[t + 1].s[[i, j]] * dproduct;
                    dk[in_group] += g * v[at];
                    dv[at] += g * k;
                    through_decay += g * a * states[t].s[[i, j]];
                    carry.s[[i, j]] = a * g;
                }
                let g = scale * q * ddivisor + carry.z[i];
                dq[in_group] += scale * states[t + 1].z[i] * ddivisor;
                dk[in_group] += g;
                through_decay += g * a * states[t].z[i];
                carry.z[i] = a * g;
                if inputs.find("g").is_some() {
                    dg[head.of_decay(&mut [0; 4], t, i)] += through_decay;
                }
            }
        }
        write(&carry, head.at, [&mut dinitial_state, &mut dinitial_z]);
    }
    let states = [("dinitial_state", dinitial_state), ("dinitial_z", dinitial_z)];
    Ok([("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg)].into_iter().chain(states).collect())
}
