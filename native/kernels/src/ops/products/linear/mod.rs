//! The dense layer with an optional activation, and its gradient, with weights stored (out, in):
//!
//! ```text
//! z = x w^T + b    y = activation(z)
//! dz = dy activation'(z)
//! dx = dz w        dw = dz^T x        db = sum dz        (sums over all rows of x)
//! ```
//!
//! With an activation the gradient recomputes `z`.
//!
//! Storage is f32, f64, bf16 or f16; products are accumulated in f32 (f64 for f64 storage), never in a narrower type,
//! and outputs are rounded once.

mod cpu;
mod cuda;
mod reference;

use crate::base::activation::Activation;
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot, named};
use crate::options;
use crate::place::Place;
use crate::tensor::{DType, Shape, Spec};

options! {
    /// The options of the layer.
    pub struct Options {
        ..crate::ops::products::activation;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// The shape of `x`.
    pub x: Shape,
    /// How many rows `x` has: all its axes but the last.
    pub rows: usize,
    /// Columns of `x`, `I` in the shapes.
    pub inputs: usize,
    /// Columns of `y`, `O`.
    pub outputs: usize,
    /// The storage type.
    pub dtype: DType,
    /// The activation of the sums.
    pub activation: Option<Activation>,
}

impl Problem {
    /// The shape of `y`: that of `x` with another last axis.
    fn y(&self) -> Result<Shape> {
        let mut dims = self.x.to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.outputs;
        }
        Shape::new(&dims)
    }
}

/// The dense layer.
pub struct Linear;

impl Op for Linear {
    const NAME: &'static str = "linear";
    const ABOUT: &'static str = "Dense layer y = activation(x w^T + b)";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., I)"), Slot::new("w", "(O, I)"), Slot::new("b", "(O)").optional()];
    const OUTPUTS: &'static [Output] = &[Output::new("y", "(..., O)")];
    const HINT: &'static str = "Weights are stored (out, in), and the last axis of x meets `in`";
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let ([inputs, outputs], rows) = (call.sizes.all("IO"), call.sizes.rows().iter().product());
        let (x, activation) = (call.inputs.get("x")?.shape, call.options.activation);
        Ok(Problem { x, rows, inputs, outputs, dtype: call.storage, activation })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.rows, problem.inputs, problem.outputs])
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`Linear`].
pub type LinearBackward = Backward<Linear>;

impl Differentiable for Linear {
    const BACKWARD: &'static str = "linear_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["x", "w", "b", "dy"]);

    crate::backward_by_kernels!();
}

/// The layer without an activation, on a backend: `y` from `x`, `w` and an optional `b`.
pub fn at<'s, P: Place>(place: &P, [x, w]: [P::View<'s>; 2], b: Option<P::View<'s>>, y: P::ViewMut<'s>) -> Result<()> {
    let inputs = named([("x", Some(x)), ("w", Some(w)), ("b", b)]);
    place.call::<Linear>(&Options::default(), inputs, named([("y", Some(y))]))
}

/// The gradient of [`at`]: `dx`, `dw` and, if there is a `b`, `db`.
pub fn backward_at<'s, P: Place>(
    place: &P,
    [x, w, dy]: [P::View<'s>; 3],
    b: Option<P::View<'s>>,
    [dx, dw]: [P::ViewMut<'s>; 2],
    db: Option<P::ViewMut<'s>>,
) -> Result<()> {
    let inputs = named([("x", Some(x)), ("w", Some(w)), ("b", b), ("dy", Some(dy))]);
    let outputs = named([("dx", Some(dx)), ("dw", Some(dw)), ("db", db)]);
    place.call::<LinearBackward>(&Options::default(), inputs, outputs)
}
