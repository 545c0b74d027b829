//! The products: one op for each pair of a form of x and a format of weights.

use super::format::Format;
use super::problem::{Factors, Options, Problem};
use super::{cpu, cuda, reference};
use crate::error::Result;
use crate::op::{self, Bound, Named, Op, Slot, named};
use crate::tensor::{DType, Spec};
use std::marker::PhantomData;

/// The constants of one of the products.
pub trait Table: 'static {
    /// The op's name.
    const NAME: &'static str;
    /// A one-line description.
    const ABOUT: &'static str;
    /// The form of x and the format of the weights.
    const FACTORS: Factors;
    /// The shape of the weights.
    const WEIGHTS: &'static str = match Self::FACTORS.weights {
        Format::Q8 => "(O, 17I/16)",
        Format::Q4 => "(O, 9I/16)",
    };
}

/// A product as an op.
pub struct Product<T>(PhantomData<T>);

impl<T: Table> Op for Product<T> {
    const NAME: &'static str = T::NAME;
    const ABOUT: &'static str = T::ABOUT;
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(..., I)").loose(),
        Slot::new("w", T::WEIGHTS).exactly(DType::U8).loose(),
        Slot::new("b", "(O)").wide().optional().loose(),
    ];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Problem::new(T::FACTORS, call.inputs, call.options)
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.rows, problem.inputs, problem.outputs])
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok([("y", Spec { dtype: problem.x.dtype, shape: problem.y()? })].into_iter().collect())
    }

    crate::runs! {
        cpu(problem, inputs, mut outputs, exec) {
            let given = [inputs.get("x")?, inputs.get("w")?];
            cpu::multiply(problem, given, inputs.find("b"), outputs.expect("y")?, exec)
        }
        reference(problem, inputs, _) {
            let given = [inputs.get("x")?, inputs.get("w")?];
            Ok(named([("y", Some(reference::multiply(problem, given, inputs.find("b"))?))]))
        }
        cuda(problem, inputs, outputs, lane) {
            let given = [*inputs.get("x")?, *inputs.get("w")?];
            cuda::multiply(problem, given, inputs.find("b").copied(), outputs.get("y")?, lane)
        }
    }
}

macro_rules! products {
    ($($product:ident, $table:ident, $name:literal, $weights:ident, $quantized:literal, $about:literal;)*) => {
        $(
            #[doc = $about]
            pub type $product = Product<$table>;

            /// The constants of this product.
            pub struct $table;

            impl Table for $table {
                const NAME: &'static str = $name;
                const ABOUT: &'static str = $about;
                const FACTORS: Factors = Factors { weights: Format::$weights, quantized: $quantized };
            }
        )*
    };
}

products! {
    MatmulQ8Q8, Q8Q8, "matmul_q8_q8", Q8, true, "y = activation(x w^T + b), x quantized to Q8_0, weights in Q8_0";
    MatmulQ8Q4, Q8Q4, "matmul_q8_q4", Q4, true, "y = activation(x w^T + b), x quantized to Q8_0, weights in Q4_0";
    MatmulF32Q8, F32Q8, "matmul_f32_q8", Q8, false, "y = activation(x w^T + b), weights in Q8_0";
    MatmulF32Q4, F32Q4, "matmul_f32_q4", Q4, false, "y = activation(x w^T + b), weights in Q4_0";
}
