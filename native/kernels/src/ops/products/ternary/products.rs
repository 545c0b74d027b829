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

use super::rules::{ActivationOptions, Activations};
use super::{cpu, cuda, one_or, plane, plane_bytes, reference, split_last, wrong};
use crate::base::activation::Activation;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Bound, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// The longest row whose sums of bytes up to 127 fit into 32 bits.
pub const LONGEST: usize = i32::MAX as usize / 127;

/// The dot product of ternary numbers, row by row.
pub struct DotTernary;

/// Rows of planes.
#[derive(Clone, Debug)]
pub struct Pairs {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Bytes of a row.
    pub bytes: usize,
}

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

    fn cpu(problem: &Pairs, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::products::dot(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Pairs, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::dot(problem, inputs)
    }

    fn cuda(problem: &Pairs, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::dot(problem, inputs, outputs, lane)
    }
}

/// The form in which activations meet the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Their signs.
    Ternary,
    /// Bytes.
    #[default]
    I8,
    /// The floats as they are.
    F32,
}

/// A form of activations as a type, which makes each product an op of its own.
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

options! {
    /// The options.
    #[derive(Copy)]
    pub struct Options {
        /// activation of the sums, none by default
        activation: Option<Activation> = None;
        /// with activations as bytes, also give these and the sums of integers
        return_sums: bool = false;
    }
}

/// A checked product.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The form of the activations.
    pub form: Form,
    /// The sizes of the axes of x before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Columns of x.
    pub n: usize,
    /// Rows of the weights.
    pub outs: usize,
    /// Whether activations are given as planes.
    pub planes: bool,
    /// Whether y is returned besides the sums.
    pub y: bool,
    /// Number of scales.
    pub scales: usize,
    /// The activation, and the requested outputs.
    pub options: Options,
    /// The storage type.
    pub dtype: DType,
}

impl Problem {
    fn new(form: Form, inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let (x, planes) = match (inputs.find("x"), inputs.find("x_plane0")) {
            (Some(x), None) => (x, false),
            (None, Some(plane)) => (plane, true),
            (x, _) => {
                let got = if x.is_some() { "both" } else { "none" };
                return Err(Error::new(Kind::Argument, "x").expected("x, or x_plane0 and x_plane1").got(got));
            }
        };
        let name = if planes { "x_plane0" } else { "x" };
        let (leading, columns) = split_last(name, "(..., I)", x)?;
        match (planes, inputs.find("x_plane1")) {
            (true, other) if other.is_none_or(|other| other.shape != x.shape) => {
                return Err(wrong("x_plane1", &x.shape.to_string(), other.unwrap_or(&Spec::new(DType::U8, &[])?)));
            }
            (false, Some(_)) => return Err(Error::new(Kind::Argument, "x_plane1").expected("x alone").got("both")),
            _ => {}
        }
        let n = if planes { columns * 8 } else { columns };
        if n > LONGEST {
            return Err(Error::new(Kind::Size, name).expected(format_args!("rows of at most {LONGEST}")).got(n));
        }
        let plane = inputs.get("plane0")?;
        let outs = match plane.shape[..] {
            [outs, bytes] if bytes == plane_bytes(n) => outs,
            _ => return Err(wrong("plane0", &format!("(O, {})", plane_bytes(n)), plane)),
        };
        op::same_shape(inputs, "plane1", &plane.shape)?;
        one_or(inputs, "w_scale", outs)?;
        op::same_shape(inputs, "bias", &[outs])?;
        let ends = ["w_scale", "bias"].iter().any(|name| inputs.find(name).is_some()) || options.activation.is_some();
        Ok(Problem {
            form,
            leading: leading.to_vec(),
            rows: leading.iter().product(),
            n,
            outs,
            planes,
            y: ends || form != Form::Ternary,
            scales: inputs.find("w_scale").map_or(0, |spec| spec.shape.elements()),
            options: *options,
            dtype: if planes { DType::F32 } else { x.dtype },
        })
    }

    /// The quantization of the activations to bytes.
    pub fn activations(&self) -> Activations {
        let floor = ActivationOptions::default().amax_floor as f32;
        let Problem { leading, rows, n, dtype, .. } = self.clone();
        Activations { leading, rows, n, floor, dtype }
    }

    /// Bytes of a row of the weights' planes.
    pub fn bytes(&self) -> usize {
        plane_bytes(self.n)
    }
}

/// The product with activations of the form `A`.
pub struct Matmul<A>(PhantomData<A>);

impl<A: Activated> Op for Matmul<A> {
    const NAME: &'static str = A::NAME;
    const ABOUT: &'static str = A::ABOUT;
    const INPUTS: &'static [Slot] = A::INPUTS;
    const HINT: &'static str = super::HINT;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        Problem::new(A::FORM, inputs, options)
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        // One word of planes covers the products of many cells.
        op::product(&[problem.rows, op::elements(inputs, &["plane0"])])
    }

    /// `y` of the storage type. For signs: the sums `acc`, and y if anything is applied to them. For bytes, on request:
    /// the sums, the bytes `xq` and their `x_scale`.
    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
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

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::products::matmul(problem, inputs, outputs, exec)
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::matmul(problem, A::INPUTS, inputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::matmul(problem, inputs, outputs, lane)
    }
}
