//! The gradient of the selective scan.
//!
//! Given the cotangents `dy`, `dlast_state` and `dstates` (those of outputs that played no part are
//! zero), with `dy' = dy * silu(z)` and with `y'` the output before its gate, time runs backwards:
//!
//! ```text
//! g[t] = dy'[t] C[t] + dstates[t] + a[t+1] g[t+1]        a[L+1] g[L+1] = dlast_state
//! dx = sum_n g delta B + D dy'                           dD = sum_{b,t} dy' x
//! ddelta = sum_n g (A a h[t-1] + B x)                    dA = sum_{b,t} g delta a h[t-1]
//! ddt = ddelta * [lo <= s <= hi] * sigmoid(dt + dt_bias) ddt_bias = sum_{b,t} ddt
//! dB = sum_d g delta x                                   dC = sum_d dy' h
//! dz = dy y' silu'(z)                                    dinitial_state = a[1] g[1]
//! ```
//!
//! `dB` and `dC` sum over the channels of a group; where B or C is the same at every step, over batch
//! and time. States are not kept by the forward scan but computed again from states at the ends of
//! chunks, forwards: dividing by `a` would fail where it is 0. All sums are done in an order that
//! depends on the call alone, so repeating a call repeats every bit.

use super::{Options, Problem, SelectiveScan, cpu, cuda, reference};
use crate::error::Result;
use crate::op::{self, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;

/// The op.
pub struct SelectiveScanBackward;

const GRADIENTS: [(&str, &str); 9] = [
    ("x", "dx"),
    ("dt", "ddt"),
    ("A", "dA"),
    ("B", "dB"),
    ("C", "dC"),
    ("D", "dD"),
    ("z", "dz"),
    ("dt_bias", "ddt_bias"),
    ("initial_state", "dinitial_state"),
];

impl Op for SelectiveScanBackward {
    const NAME: &'static str = "selective_scan_backward";
    const ABOUT: &'static str = "Gradient of the selective scan";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, L, D)"),
        Slot::new("dt", "(B, L, D)"),
        Slot::new("A", "(D, N)").wide(),
        Slot::new("B", "(B, L, N) | (B, L, G, N) | (D, N)"),
        Slot::new("C", "(B, L, N) | (B, L, G, N) | (D, N)"),
        Slot::new("D", "(D)").wide().optional(),
        Slot::new("z", "(B, L, D)").optional(),
        Slot::new("dt_bias", "(D)").wide().optional(),
        Slot::new("initial_state", "(B, D, N)").wide().optional(),
        Slot::new("dy", "(B, L, D)"),
        Slot::new("dlast_state", "(B, D, N)").wide().optional(),
        Slot::new("dstates", "(B, L, D, N)").wide().optional(),
    ];
    const OPTIONS: &'static [OptionDoc] = SelectiveScan::OPTIONS;
    const COTANGENTS: &'static [&'static str] = &[];
    const BACKWARD_OF: Option<&'static str> = Some(SelectiveScan::NAME);

    /// Those of the scan, of which the ones that ask for outputs mean nothing here.
    type Options = Options;
    type Problem = Gradient<Problem>;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Gradient<Problem>> {
        let of = Problem::new(inputs, options)?;
        let Problem { batch, length, channels, state, .. } = of;
        for (name, dims) in [
            ("dy", &[batch, length, channels][..]),
            ("dlast_state", &[batch, channels, state]),
            ("dstates", &[batch, length, channels, state]),
        ] {
            op::same_shape(inputs, name, dims)?;
        }
        Ok(Gradient { of, outputs: op::gradients(inputs, &GRADIENTS) })
    }

    fn work(problem: &Gradient<Problem>, inputs: &Named<Spec>) -> u64 {
        op::work_of_gradient::<SelectiveScan>(&problem.of, inputs)
    }

    fn outputs(problem: &Gradient<Problem>) -> Result<Named<Spec>> {
        Ok(problem.outputs.clone())
    }

    fn cpu(
        problem: &Gradient<Problem>,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::backward(&problem.of, inputs, outputs, exec)
    }

    fn reference(problem: &Gradient<Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::backward(&problem.of, inputs)
    }

    fn cuda(
        problem: &Gradient<Problem>,
        inputs: &Named<&crate::cuda::Buffer>,
        outputs: &Named<&crate::cuda::Buffer>,
        lane: &crate::cuda::Lane,
    ) -> Result<()> {
        cuda::backward(&problem.of, inputs, outputs, lane)
    }
}
