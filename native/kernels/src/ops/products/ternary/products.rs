//! Products with ternary weights `W` in planes `(out, in / 8)`:
//!
//! ```text
//! dot                  sum a[i] b[i], exactly
//! matmul_ternary       acc = W sign(x)                            y = acc w_scale + bias
//! matmul_i8_ternary    acc = W q, where q = x / x_scale in I8     y = acc x_scale w_scale + bias
//! matmul_f32_ternary   y = w_scale (sum of x where W is 1 - sum of x where W is -1) + bias
//! ```
//!
//! `w_scale` is one number or one per row of `W`, and an activation function may follow. Sums of integers are exact. y
//! is computed from them in f32, each step rounded, then rounded to the storage type. So every CPU and GPU gives equal
//! bits, except for `matmul_f32_ternary`. Values that are not finite cannot become I8. On the CPU they are an error; on
//! CUDA the call does not wait for the device, and such a row of y is NaN.

use super::problem::{HINT, Pairs, Product, plane};
use super::{cpu, cuda, reference};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::tensor::{DType, Spec};
use std::marker::PhantomData;

pub use super::problem::{Form, LONGEST, Options};

/// The dot product of ternary numbers, row by row.
pub struct DotTernary;

impl Op for DotTernary {
    const NAME: &'static str = "dot_ternary";
    const ABOUT: &'static str = "Sums of products of two rows of ternary numbers in planes";
    const INPUTS: &'static [Slot] = &[
        Slot::new("a0", "(..., P)").exactly(DType::U8),
        Slot::new("a1", "(..., P)").exactly(DType::U8),
        Slot::new("b0", "(..., P)").exactly(DType::U8),
        Slot::new("b1", "(..., P)").exactly(DType::U8),
    ];
    const OUTPUTS: &'static [Output] = &[Output::new("dot", "(...)").exactly(DType::I32)];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = op::NoOptions;
    type Problem = Pairs;

    fn check(call: &Bound<Self>) -> Result<Pairs> {
        let (leading, bytes) = (call.sizes.rows(), call.sizes.of('P'));
        if bytes > i32::MAX as usize / 8 {
            let a = call.inputs.get("a0")?;
            return Err(Error::new(Kind::Size, "a0").expected("rows of fewer than 2^31 cells").got(a));
        }
        Ok(Pairs { leading: leading.to_vec(), rows: leading.iter().product(), bytes })
    }

    crate::forward_by_kernels!(cpu::sums::dot, reference::dot, cuda::dot);
}

/// A form of activations as a type, so that each form makes a product op of its own.
pub trait Activated: 'static {
    /// The product's name.
    const NAME: &'static str;
    /// A one-line description.
    const ABOUT: &'static str;
    /// Its inputs.
    const INPUTS: &'static [Slot];
    /// The form.
    const FORM: Form;
}

macro_rules! activated {
    ($name:ident, $op:literal, $about:literal, $x:expr) => {
        #[doc = $about]
        pub struct $name;

        impl Activated for $name {
            const NAME: &'static str = $op;
            const ABOUT: &'static str = $about;
            const INPUTS: &'static [Slot] = &op::slots::<{ 4 + $x.len() }>(
                &$x,
                &[
                    plane("plane0", "(O, P)"),
                    plane("plane1", "(O, P)"),
                    Slot::new("w_scale", "(O|1)").exactly(DType::F32).optional().loose(),
                    Slot::new("bias", "(O)").exactly(DType::F32).optional().loose(),
                ],
            );
            const FORM: Form = Form::$name;
        }
    };
}

activated!(
    Ternary,
    "matmul_ternary",
    "Signs of activations by ternary weights",
    [
        Slot::new("x", "(..., I)").optional().loose(),
        plane("x_plane0", "(..., P)").optional(),
        plane("x_plane1", "(..., P)").optional(),
    ]
);
activated!(I8, "matmul_i8_ternary", "Activations of 8 bits by ternary weights", [Slot::new("x", "(..., I)")]);
activated!(F32, "matmul_f32_ternary", "Activations by ternary weights", [Slot::new("x", "(..., I)")]);

/// The product with activations of the form `A`.
pub struct Matmul<A>(PhantomData<A>);

impl<A: Activated> Op for Matmul<A> {
    const NAME: &'static str = A::NAME;
    const ABOUT: &'static str = A::ABOUT;
    const INPUTS: &'static [Slot] = A::INPUTS;
    const HINT: &'static str = HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Product;

    fn check(call: &Bound<Self>) -> Result<Product> {
        let (inputs, options) = (call.inputs, call.options);
        Product::new(A::FORM, inputs, options)
    }

    fn work(problem: &Product, inputs: &Named<Spec>) -> u64 {
        // One word of planes covers the products of many cells.
        op::product(&[problem.rows, op::elements(inputs, &["plane0"])])
    }

    /// `y` of the storage type. For signs: the sums `acc`, and y if a scale, bias or activation is applied to them. For
    /// bytes, on request: the sums, the bytes `xq` and their `x_scale`.
    fn outputs(problem: &Product, _: &Bound<Self>) -> Result<Named<Spec>> {
        let of = |dtype, last: usize| Spec::new(dtype, &[&problem.leading[..], &[last]].concat());
        let bytes = problem.form == Form::I8 && problem.options.return_sums;
        let mut outputs = Named::default();
        outputs.extend_with("y", problem.y.then(|| of(problem.dtype, problem.outs)).transpose()?);
        if bytes || problem.form == Form::Ternary {
            outputs.push("acc", of(DType::I32, problem.outs)?);
        }
        if bytes {
            outputs.push("xq", of(DType::I8, problem.n)?);
            outputs.push("x_scale", Spec::new(DType::F32, &problem.leading)?);
        }
        Ok(outputs)
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) { cpu::matmul::matmul(problem, inputs, outputs, exec) }
        reference(problem, inputs, _) { reference::matmul(problem, inputs) }
        cuda(problem, inputs, outputs, lane) { cuda::matmul(problem, inputs, outputs, lane) }
    }
}
