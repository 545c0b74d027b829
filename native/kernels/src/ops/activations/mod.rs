//! Activation functions, element by element, and their derivatives.
//!
//! ```text
//! sigmoid    s(x) = 1 / (1 + exp(-x))               s (1 - s)
//! silu       x s(x)                                 s (1 + x (1 - s))
//! gelu_tanh  x (1 + tanh(u)) / 2                    (1 + t) / 2 + x (1 - t^2) u' / 2     t = tanh(u)
//!            u = sqrt(2 / pi) (x + 0.044715 x^3)
//! gelu_erf   x (1 + erf(x / sqrt(2))) / 2           (1 + erf(x / sqrt(2))) / 2 + x exp(-x^2 / 2) / sqrt(2 pi)
//! softplus   ln(1 + exp(x))                         s(x)
//! relu       max(x, 0)                              1 for x > 0, else 0
//! ```
//!
//! (Hendrycks and Gimpel 2016 for GELU; Elfwing et al. 2017 for SiLU.) Finite values give finite results. Storage is
//! f32, f64, bf16 or f16, the arithmetic f32 (f64 for f64), and results are rounded once.

mod reference;

use crate::base::activation::NAMES;
use crate::base::elementwise::Map;
use crate::cpu::{self, Exec};
use crate::cuda::{self, Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;

pub use crate::base::activation::Activation;

options! {
    /// The options.
    pub struct Options {
        /// the activation function; required
        function as "fn": Option<Activation> = None;
        /// write dydx, the derivative of y with respect to x
        return_derivative: bool = false;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// The function.
    pub function: Activation,
}

/// An activation function of each element.
pub struct Activations;

impl Op for Activations {
    const NAME: &'static str = "activations";
    const ABOUT: &'static str = "A function of each element";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(...)")];
    const OUTPUTS: &'static [Output] =
        &[Output::new("y", "(...)"), Output::new("dydx", "(...)").asked_by("return_derivative")];
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let missing = || Error::new(Kind::Option, "fn").expected(NAMES).got("none of them");
        Ok(Problem { function: call.options.function.ok_or_else(missing)? })
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        let x = [*inputs.get("x")?];
        cpu::elementwise::map(Map::Activate(problem.function), &x, outputs.expect("y")?, exec)?;
        match outputs.take("dydx") {
            Some(dydx) => cpu::elementwise::map(Map::Slope(problem.function), &x, dydx, exec),
            None => Ok(()),
        }
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let x = inputs.get("x")?;
        let y = x.mapv(|v| reference::value(problem.function, v));
        let dydx = x.mapv(|v| reference::slope(problem.function, v));
        Ok([("y", y), ("dydx", dydx)].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let x = [*inputs.get("x")?];
        cuda::map(Map::Activate(problem.function), &x, outputs.get("y")?, lane)?;
        match outputs.find("dydx") {
            Some(dydx) => cuda::map(Map::Slope(problem.function), &x, dydx, lane),
            None => Ok(()),
        }
    }
}

/// The gradient of [`Activations`]: `dx = f'(x) dy`.
pub type ActivationsBackward = Backward<Activations>;

impl Differentiable for Activations {
    const BACKWARD: &'static str = "activations_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "dy"]);

    fn cpu_backward(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        let given = [*inputs.get("x")?, *inputs.get("dy")?];
        cpu::elementwise::map(Map::SlopeTimes(problem.function), &given, outputs.expect("dx")?, exec)
    }

    fn reference_backward(
        problem: &Problem,
        inputs: &Named<ArrayD<f64>>,
        _: &Named<Spec>,
    ) -> Result<Named<ArrayD<f64>>> {
        let slope = inputs.get("x")?.mapv(|v| reference::slope(problem.function, v));
        Ok([("dx", slope * inputs.get("dy")?)].into_iter().collect())
    }

    fn cuda_backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let given = [*inputs.get("x")?, *inputs.get("dy")?];
        cuda::map(Map::SlopeTimes(problem.function), &given, outputs.get("dx")?, lane)
    }
}

pub use reference::{slope, value};
