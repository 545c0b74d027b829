//! The product of two matrices and its gradient:
//!
//! ```text
//! c = a b            da = dc b^T            db = a^T dc
//! ```
//!
//! Storage is f32, f64, bf16 or f16; products are accumulated in f32 (f64 for f64 storage), never in a narrower type,
//! and results are rounded once.

use crate::cpu::{Epilogue, Exec, Storage, matrix};
use crate::cuda::{self, Buffer, Lane};
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use crate::with_type;
use ndarray::{ArrayD, ArrayView2, Ix2};

pub use crate::op::NoOptions as Options;

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Rows of `a`, `M` in the shapes.
    pub rows: usize,
    /// Columns of `a` and rows of `b`, `K`.
    pub inner: usize,
    /// Columns of `b`, `N`.
    pub columns: usize,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    fn a(&self) -> [usize; 2] {
        [self.rows, self.inner]
    }

    fn b(&self) -> [usize; 2] {
        [self.inner, self.columns]
    }

    fn c(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }
}

/// The product of two matrices.
pub struct Matmul;

impl Op for Matmul {
    const NAME: &'static str = "matmul";
    const ABOUT: &'static str = "The product of two matrices";
    const INPUTS: &'static [Slot] = &[Slot::new("a", "(M, K)"), Slot::new("b", "(K, N)")];
    const OUTPUTS: &'static [Output] = &[Output::new("c", "(M, N)")];
    const HINT: &'static str = "Columns of a meet rows of b";
    const COTANGENTS: &'static [&'static str] = &["dc"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [rows, inner, columns] = call.sizes.all("MKN");
        Ok(Problem { rows, inner, columns, dtype: call.storage })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.rows, problem.inner, problem.columns])
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        let (a, b) = ((inputs.get("a")?, problem.a(), false), (inputs.get("b")?, problem.b(), false));
        with_type!(problem.dtype, S => product::<S>([a, b], outputs.expect("c")?, exec))
    }

    fn reference(_: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let c = matrix_of(inputs, "a")?.dot(&matrix_of(inputs, "b")?);
        Ok([("c", c.into_dyn())].into_iter().collect())
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let (a, b) = (on_lane(inputs, "a", problem.a(), lane)?, on_lane(inputs, "b", problem.b(), lane)?);
        let c = on_lane(outputs, "c", problem.c(), lane)?;
        // SAFETY: the op's checks prove that the buffers have these sizes.
        unsafe { lane.multiply([problem.dtype; 2], [a, b, c]) }
    }
}

fn matrix_of<'a>(inputs: &'a Named<ArrayD<f64>>, name: &str) -> Result<ArrayView2<'a, f64>> {
    Ok(inputs.get(name)?.view().into_dimensionality::<Ix2>().expect("a checked rank"))
}

fn on_lane(buffers: &Named<&Buffer>, name: &str, [rows, columns]: [usize; 2], lane: &Lane) -> Result<cuda::Matrix> {
    Ok(cuda::Matrix::new(lane.address(buffers.get(name)?)?, rows, columns))
}

/// Writes the product of two matrices, each of them as stored or transposed.
fn product<S: Storage>([a, b]: [(&View, [usize; 2], bool); 2], to: ViewMut, exec: &Exec) -> Result<()> {
    matrix::product(shaped::<S>(a)?, shaped::<S>(b)?, to.slice::<S>()?, &Epilogue::default(), exec)
}

fn shaped<'a, S: Storage>(
    (view, [rows, columns], transposed): (&View<'a>, [usize; 2], bool),
) -> Result<matrix::Matrix<'a, S>> {
    let matrix = matrix::Matrix::new(view.slice()?, rows, columns);
    Ok(if transposed { matrix.transposed() } else { matrix })
}

/// The gradient of [`Matmul`].
pub type MatmulBackward = Backward<Matmul>;

impl Differentiable for Matmul {
    const BACKWARD: &'static str = "matmul_backward";
    const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, ["a", "b", "dc"]);

    fn cpu_backward(problem: &Problem, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        let (a, b, dc) = (inputs.get("a")?, inputs.get("b")?, (inputs.get("dc")?, problem.c(), false));
        with_type!(problem.dtype, S => {
            product::<S>([dc, (b, problem.b(), true)], outputs.expect("da")?, exec)?;
            product::<S>([(a, problem.a(), true), dc], outputs.expect("db")?, exec)
        })
    }

    fn reference_backward(_: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        let [a, b, dc] = ["a", "b", "dc"].map(|name| matrix_of(inputs, name));
        let (a, b, dc) = (a?, b?, dc?);
        Ok([("da", dc.dot(&b.t()).into_dyn()), ("db", a.t().dot(&dc).into_dyn())].into_iter().collect())
    }

    fn cuda_backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let (a, b) = (on_lane(inputs, "a", problem.a(), lane)?, on_lane(inputs, "b", problem.b(), lane)?);
        let dc = on_lane(inputs, "dc", problem.c(), lane)?;
        let (da, db) = (on_lane(outputs, "da", problem.a(), lane)?, on_lane(outputs, "db", problem.b(), lane)?);
        // SAFETY: the op's checks prove that the buffers have these sizes.
        unsafe {
            lane.multiply([problem.dtype; 2], [dc, b.transposed(), da])?;
            lane.multiply([problem.dtype; 2], [a.transposed(), dc, db])
        }
    }
}
