//! Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to embeddings. For the row at position
//! `p` and the pair `i`:
//!
//! ```text
//! angle = p theta^(-2i/D)
//! y[2i] = x[2i] + sin(angle)          y[2i+1] = x[2i+1] + cos(angle)
//! ```
//! If `D` is odd, the last cosine is dropped. The gradient is `dx = dy`. Angles, sines and cosines are computed in f64,
//! as in [`crate::ops::positions::rope`]; sines and cosines are rounded to the type of the arithmetic, f32 (f64 for
//! f64), and sums once to that of storage.

mod cpu;
mod cuda;
mod reference;

use crate::base::elementwise::Map;
use crate::cpu::elementwise;
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot, named};
use crate::ops::positions::rope::angles::{self, Angles};
use crate::options;
use crate::tensor::Spec;

options! {
    /// The options.
    pub struct Options {
        /// base of the angles
        theta: f64 = 10000.0, positive;
        /// position of the first row
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
    /// The angles of each position; if the width is odd, only the sine of the last one is used.
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

    crate::runs! {
        cpu(problem, inputs, mut outputs, exec) { cpu::add(problem, inputs.get("x")?, outputs.expect("y")?, exec) }
        reference(problem, inputs, _) { Ok(named([("y", Some(reference::add(problem, inputs.get("x")?)))])) }
        cuda(problem, inputs, outputs, lane) { cuda::add(problem, inputs.get("x")?, outputs.get("y")?, lane) }
    }
}

/// The gradient of [`SinusoidalPositions`]: `dy` itself.
pub type SinusoidalPositionsBackward = Backward<SinusoidalPositions>;

impl Differentiable for SinusoidalPositions {
    const BACKWARD: &'static str = "sinusoidal_positions_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "dy"]);

    crate::runs! {
        cpu_backward(_, inputs, mut outputs, exec) {
            elementwise::map(Map::Sum, &[*inputs.get("dy")?], outputs.expect("dx")?, exec)
        }
        reference_backward(_, inputs, _) { Ok(named([("dx", Some(inputs.get("dy")?.clone()))])) }
        cuda_backward(_, inputs, outputs, lane) {
            crate::cuda::map(Map::Sum, &[*inputs.get("dy")?], outputs.get("dx")?, lane)
        }
    }
}
