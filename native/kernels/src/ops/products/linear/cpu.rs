//! The dense layer on the CPU: matrix products by [`matrix`](crate::cpu::matrix), with bias and activation as an epilogue
//! on the sums, before the one rounding.

use super::Problem;
use crate::base::scratch::Scratch;
use crate::cpu::convert::{Widened, copied, rounded, widened};
use crate::cpu::matrix::{Matrix, product};
use crate::cpu::{Epilogue, Exec, Storage, elementwise, sum};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{View, ViewMut};
use crate::with_type;

/// Computes the layer on the CPU.
pub fn forward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => forward_as::<S>(problem, inputs, outputs, exec))
}

/// Computes the gradient on the CPU.
pub fn backward(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
    with_type!(problem.dtype, S => backward_as::<S>(problem, inputs, outputs, exec))
}

/// `x`, `w` and the bias in the type of the arithmetic.
struct Given<'a, S: Storage> {
    x: Matrix<'a, S>,
    w: Matrix<'a, S>,
    b: Option<Widened<'a, S::Wide>>,
}

impl<'a, S: Storage> Given<'a, S> {
    fn new(problem: &Problem, inputs: &Named<View<'a>>, exec: &Exec) -> Result<Self> {
        let b = inputs.find("b").map(|b| widened::<S>(b.slice()?, exec)).transpose()?;
        let x = Matrix::new(inputs.get("x")?.slice()?, problem.rows, problem.inputs);
        let w = Matrix::new(inputs.get("w")?.slice()?, problem.outputs, problem.inputs);
        Ok(Given { x, w, b })
    }

    fn epilogue(&self) -> Epilogue<'_, S::Wide> {
        Epilogue { bias: self.b.as_deref(), activation: None }
    }
}

fn forward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let given = Given::<S>::new(problem, inputs, exec)?;
    let epilogue = Epilogue { activation: problem.activation, ..given.epilogue() };
    product(given.x, given.w.transposed(), outputs.expect("y")?.slice::<S>()?, &epilogue, exec)
}

fn backward_as<S: Storage>(
    problem: &Problem,
    inputs: &Named<View>,
    mut outputs: Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (given, dy) = (Given::<S>::new(problem, inputs, exec)?, inputs.get("dy")?.slice::<S>()?);
    if problem.activation.is_none() {
        return gradients(problem, &given, dy, &mut outputs, exec);
    }
    let mut z = Scratch::any(dy.len())?;
    product(given.x, given.w.transposed(), &mut z, &given.epilogue(), exec)?;
    let mut dz = copied(dy, exec)?;
    elementwise::slope_in_place(problem.activation, &z, &mut dz, exec)?;
    gradients(problem, &given, &dz, &mut outputs, exec)
}

/// `dx`, `dw` and, with a bias, `db` of `dz`.
fn gradients<S: Storage, Z: Storage<Wide = S::Wide>>(
    problem: &Problem,
    given: &Given<S>,
    dz: &[Z],
    outputs: &mut Named<ViewMut>,
    exec: &Exec,
) -> Result<()> {
    let (by_row, none) = (Matrix::new(dz, problem.rows, problem.outputs), Epilogue::default());
    product(by_row, given.w, outputs.expect("dx")?.slice::<S>()?, &none, exec)?;
    product(by_row.transposed(), given.x, outputs.expect("dw")?.slice::<S>()?, &none, exec)?;
    match outputs.take("db") {
        Some(db) => rounded::<S>(db.slice()?, exec, |db| sum::columns::<Z>(dz, db, exec)),
        None => Ok(()),
    }
}
