//! Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to embeddings. For the row at position
//! `p` and the pair `i`:
//!
//! ```text
//! angle = p theta^(-2i/D)
//! y[2i] = x[2i] + sin(angle)          y[2i+1] = x[2i+1] + cos(angle)
//! ```
//!
//! The last cosine of an odd `D` has no place and is dropped. The gradient is `dx = dy`. Angles, sines and
//! cosines are f64, as those of [`crate::rope`]; the latter are rounded to the type of the arithmetic, f32
//! (f64 for f64), and sums once to that of storage.

mod cpu;
mod cuda;
mod reference;

use crate::cpu::{Exec, elementwise};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::place::Map;
use crate::rope::angles::{self, Angles};
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The base of the angles.
    pub theta: f64,
    /// The position of the first row.
    pub first_position: i64,
}

impl Default for Options {
    fn default() -> Self {
        Options { theta: 10000.0, first_position: 0 }
    }
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Positions, `L`.
    pub length: usize,
    /// Elements of a row, `D`.
    pub width: usize,
    /// The angles of each position; the last one of an odd width has only its sine in the row.
    pub angles: Angles,
}

/// Sinusoidal positions.
pub struct SinusoidalPositions;

impl Op for SinusoidalPositions {
    const NAME: &'static str = "sinusoidal_positions";
    const ABOUT: &'static str = "Embeddings plus sines and cosines of their positions";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(B, L, D)")];
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "theta", takes: "float", help: "the base of the angles; 10000 by default" },
        OptionDoc { name: "first_position", takes: "integer", help: "the position of the first row; 0 by default" },
    ];
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let x = *inputs.get("x")?;
        let &[batch, length, width] = &x.shape[..] else { return Err(op::wrong_shape("x", "(B, L, D)", &x)) };
        op::positive("theta", options.theta)?;
        let rates = (0..width.div_ceil(2)).map(|i| angles::rate(options.theta, i, width)).collect();
        let angles = Angles { first_position: options.first_position as f64, rates };
        Ok(Problem { x, batch, length, width, angles })
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        Ok([("y", problem.x)].into_iter().collect())
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        cpu::add(problem, inputs.get("x")?, outputs.expect("y")?, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        Ok([("y", reference::add(problem, inputs.get("x")?))].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::add(problem, inputs.get("x")?, outputs.get("y")?, lane)
    }
}

/// The gradient of [`SinusoidalPositions`]: `dy` itself.
pub type SinusoidalPositionsBackward = Backward<SinusoidalPositions>;

impl Differentiable for SinusoidalPositions {
    const BACKWARD: &'static str = "sinusoidal_positions_backward";
    const GIVEN: &'static [Slot] = &op::slots::<2>(Self::INPUTS, &[Slot::new("dy", "(B, L, D)")]);

    fn cpu_backward(
        _call: &Gradient<Problem>,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &Exec,
    ) -> Result<()> {
        elementwise::map(Map::Sum, &[*inputs.get("dy")?], outputs.expect("dx")?, exec)
    }

    fn reference_backward(_call: &Gradient<Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        Ok([("dx", inputs.get("dy")?.clone())].into_iter().collect())
    }

    fn cuda_backward(
        _call: &Gradient<Problem>,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        lane: &Lane,
    ) -> Result<()> {
        crate::cuda::map(Map::Sum, &[*inputs.get("dy")?], outputs.get("dx")?, lane)
    }
}
