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
//! Storage is f32, f64, bf16 or f16; products are summed in f32 (f64 for f64 storage), never in a
//! narrower type, and outputs are rounded once.

mod cpu;
mod cuda;
mod reference;

use crate::activations::{self, Activation};
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Result};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot, named};
use crate::place::Place;
use crate::tensor::{DType, Shape, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options of the layer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// What is done with the sums; nothing by default.
    pub activation: Option<Activation>,
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
    /// What is done with the sums.
    pub activation: Option<Activation>,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (x, w) = (inputs.get("x")?, inputs.get("w")?);
        let Some((&columns, rows)) = x.shape.split_last() else {
            return Err(wrong("x", "(..., I)", x));
        };
        let outputs = match w.shape[..] {
            [outputs, inputs] if inputs == columns => outputs,
            _ => return Err(wrong("w", &format!("(O, {columns})"), w)),
        };
        let (rows, activation) = (rows.iter().product(), options.activation);
        let problem = Problem { x: x.shape, rows, inputs: columns, outputs, dtype: x.dtype, activation };
        match inputs.find("b") {
            Some(b) if b.shape[..] != [outputs] => Err(wrong("b", &format!("({outputs})"), b)),
            _ => Ok(problem),
        }
    }

    /// The shape of `y`: that of `x` with another last axis.
    fn y(&self) -> Result<Shape> {
        let mut dims = self.x.to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.outputs;
        }
        Shape::new(&dims)
    }
}

fn wrong(name: &str, expected: &str, got: &Spec) -> Error {
    op::wrong_shape(name, expected, got).hint("Weights are stored (out, in), and the last axis of x meets `in`")
}

/// The dense layer.
pub struct Linear;

impl Op for Linear {
    const NAME: &'static str = "linear";
    const ABOUT: &'static str = "Dense layer y = activation(x w^T + b)";
    const INPUTS: &'static [Slot] =
        &[Slot::new("x", "(..., I)"), Slot::new("w", "(O, I)"), Slot::new("b", "(O)").optional()];
    const OPTIONS: &'static [OptionDoc] = &[OptionDoc { name: "activation", takes: "text", help: activations::NAMES }];
    const COTANGENTS: &'static [&'static str] = &["dy"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.rows, problem.inputs, problem.outputs])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        Ok([("y", Spec { dtype: problem.dtype, shape: problem.y()? })].into_iter().collect())
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::forward(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::forward(problem, inputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::forward(problem, inputs, outputs, lane)
    }
}

/// The gradient of [`Linear`].
pub type LinearBackward = Backward<Linear>;

impl Differentiable for Linear {
    const BACKWARD: &'static str = "linear_backward";
    const GIVEN: &'static [Slot] = &op::slots::<4>(Self::INPUTS, &[Slot::new("dy", "(..., O)")]);

    fn cpu_backward(
        call: &Gradient<Problem>,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &crate::cpu::Exec,
    ) -> Result<()> {
        cpu::backward(&call.of, inputs, outputs, exec)
    }

    fn reference_backward(call: &Gradient<Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        reference::backward(&call.of, inputs)
    }

    fn cuda_backward(
        call: &Gradient<Problem>,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        lane: &Lane,
    ) -> Result<()> {
        cuda::backward(&call.of, inputs, outputs, lane)
    }
}

/// The layer without an activation at some place: `y` of `x`, `w` and maybe `b`.
pub fn at<'s, P: Place>(place: &P, [x, w]: [P::View<'s>; 2], b: Option<P::View<'s>>, y: P::ViewMut<'s>) -> Result<()> {
    let inputs = named([("x", Some(x)), ("w", Some(w)), ("b", b)]);
    place.call::<Linear>(&Options::default(), inputs, named([("y", Some(y))]))
}

/// The gradient of [`at`]: `dx`, `dw` and maybe `db` of `x`, `w`, `dy` and maybe `b`.
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
