//! The dense layer on the CPU: matrix products of f32 or f64 by [`matrix`](crate::cpu::matrix). 16-bit storage is
//! widened before, except weights that are read only once, and results are rounded after. Activations are an epilogue
//! on the sums, before the rounding.

use super::Problem;
use crate::cpu::convert::{rounded, widened};
use crate::cpu::matrix::{Matrix, multiply};
use crate::cpu::{Exec, Storage, elementwise, sum};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::Element;
use crate::tensor::{View, ViewMut};
use crate::with_type;
use std::borrow::Cow;

/// Computes the layer on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

/// The inputs, but for the weights in the type of the arithmetic.
struct Given<'a, S: Storage> {
    problem: &'a Problem,
    x: Cow<'a, [S::Wide]>,
    w: &'a [S],
    b: Option<Cow<'a, [S::Wide]>>,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &'a Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        let wide = |view: &View<'a>| widened::<S>(view.slice()?, exec);
        let b = inputs.find("b").map(wide).transpose()?;
        Ok(Given { problem, x: wide(inputs.get("x")?)?, w: inputs.get("w")?.slice()?, b })
    }

    fn x(&self) -> Matrix<'_, S::Wide> {
        Matrix::new(&self.x, self.problem.rows, self.problem.inputs)
    }

    fn w(&self) -> Matrix<'_, S> {
        Matrix::new(self.w, self.problem.outputs, self.problem.inputs)
    }

    /// The sums `z`.
    fn sums(&self, z: &mut [S::Wide], exec: &Exec) -> Result<()> {
        if let Some(b) = &self.b {
            z.chunks_exact_mut(b.len().max(1)).for_each(|row| row.copy_from_slice(b));
        }
        multiply(self.x(), self.w().transposed(), z, self.b.is_some(), exec)
    }
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    rounded::<S>(outputs.expect("y")?.slice()?, exec, |y| {
        given.sums(y, exec)?;
        elementwise::in_place(problem.activation, y, exec)
    })
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    let dy = widened::<S>(inputs.get("dy")?.slice()?, exec)?;
    let dz = through_activation(&given, dy, exec)?;
    let by_row = Matrix::new(&dz, problem.rows, problem.outputs);
    rounded::<S>(outputs.expect("dx")?.slice()?, exec, |dx| multiply(by_row, given.w(), dx, false, exec))?;
    rounded::<S>(outputs.expect("dw")?.slice()?, exec, |dw| {
        multiply::<S::Wide>(by_row.transposed(), given.x(), dw, false, exec)
    })?;
    match outputs.take("db") {
        Some(db) => rounded::<S>(db.slice()?, exec, |db| sum::columns::<S::Wide>(&dz, db, exec)),
        None => Ok(()),
    }
}

/// `dz` of `dy`.
fn through_activation<'a, S: Storage>(
    given: &Given<S>,
    dy: Cow<'a, [S::Wide]>,
    exec: &Exec,
) -> Result<Cow<'a, [S::Wide]>> {
    if given.problem.activation.is_none() {
        return Ok(dy);
    }
    let mut z = vec![S::Wide::from_f64(0.0); dy.len()];
    given.sums(&mut z, exec)?;
    let mut dz = dy.into_owned();
    elementwise::slope_in_place(given.problem.activation, &z, &mut dz, exec)?;
    Ok(Cow::Owned(dz))
}
