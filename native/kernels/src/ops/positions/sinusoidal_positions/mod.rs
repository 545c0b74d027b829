//! Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to embeddings. For the row at position
//! `p` and the pair `i`:
//!
//! ```text
//! angle = p theta^(-2i/D)
//! y[2i] = x[2i] + sin(angle)          y[2i+1] = x[2i+1] + cos(angle)
//! ```
//!
//! The last cosine of an odd `D` has no place and is dropped. The gradient is `dx = dy`. Angles, sines and
//! cosines are f64, as those of [`crate::ops::positions::rope`]; the latter are rounded to the type of the arithmetic, f32
//! (f64 for f64), and sums once to that of storage.

mod cpu;
mod cuda;
mod reference;

use crate::base::elementwise::Map;
use crate::cpu::{Exec, elementwise};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Gradient, Named, Op, Output, Slot};
use crate::ops::positions::rope::angles::{self, Angles};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;

options! {
    /// The options.
    pub struct Options {
        /// the base of the angles
        theta: f64 = 10000.0, positive;
        /// the position of the first row
        first_position: i64 = 0;
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
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(B, L, D)")];
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (x, options) = (*call.inputs.get("x")?, call.options);
        let [batch, length, width] = call.sizes.all("BLD");
        let rates = (0..width.div_ceil(2)).map(|i| angles::rate(options.theta, i, width)).collect();
        let angles = Angles { first_position: options.first_position as f64, rates };
        Ok(Problem { x, batch, length, width, angles })
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        cpu::add(problem, inputs.get("x")?, outputs.expect("y")?, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
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
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "dy"]);

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
