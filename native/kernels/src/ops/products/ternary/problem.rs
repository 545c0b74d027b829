//! Checked calls of ternary ops: forms, rules and sizes, which kernels and references read.

use crate::error::{Error, Kind, Result};
use crate::op::{self, Named, Slot};
use crate::tensor::{DType, Shape, Spec};
use crate::{options, shared_options};
use serde::{Deserialize, Serialize};

/// Bytes of a row of `n` cells in a plane.
pub fn plane_bytes(n: usize) -> usize {
    n.div_ceil(8)
}

options! {
    /// The option of ops that read planes, whose bytes have room for more cells.
    #[derive(Copy)]
    pub struct CellOptions {
        ..super::grid::cells;
    }
}

/// The hint in errors about the shape of a plane, or of rows that are multiplied with one.
pub const HINT: &str = "A plane has (out, in / 8 rounded up) bytes, and the last axis of x meets `in`";

/// A plane of bits as an input. Its shape depends on other inputs' sizes or on options, so that ops check it
/// themselves.
pub const fn plane(name: &'static str, shape: &'static str) -> Slot {
    Slot::new(name, shape).exactly(DType::U8).loose()
}

/// The sizes of all axes but the last, and the size of the last.
pub fn split_last<'s>(name: &str, expected: &str, spec: &'s Spec) -> Result<(&'s [usize], usize)> {
    match spec.shape.split_last() {
        Some((&last, before)) => Ok((before, last)),
        None => Err(wrong(name, expected, spec)),
    }
}

/// The error for a shape that is not the expected one.
pub fn wrong(name: &str, expected: &str, got: &Spec) -> Error {
    Error::new(Kind::Shape, name).expected(format_args!("shape {expected}")).got(got.shape).hint(HINT)
}

/// Checks that an option for a size agrees with the tensors.
pub fn agree(name: &str, option: Option<usize>, size: usize) -> Result<()> {
    match option {
        Some(value) if value != size => {
            Err(Error::new(Kind::Option, name).expected(size).got(value).hint("The tensors' shapes say it already"))
        }
        _ => Ok(()),
    }
}

/// Checks that an f32 vector has one element or `count`.
pub fn one_or(inputs: &Named<Spec>, name: &str, count: usize) -> Result<()> {
    match inputs.find(name) {
        Some(spec) if spec.shape[..] != [1] && spec.shape[..] != [count] => {
            Err(op::wrong_shape(name, &format!("(1) or ({count})"), spec).hint("A scale is one number, or one per row"))
        }
        _ => Ok(()),
    }
}

/// The rule that makes ternary numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// By a given threshold.
    Threshold,
    /// The threshold is half the mean magnitude.
    #[default]
    Absmean,
    /// The threshold is 0.7 of the mean magnitude.
    Twn,
}

/// The lower limit of absmean's scale.
pub const LEAST_SCALE: f64 = 1e-5;

/// Twn's threshold as a fraction of the mean.
pub const TWN: f32 = 0.7;

shared_options! {
    rule {
        /// rule for the threshold
        rule: crate::ops::products::ternary::problem::Rule = Default::default();
        /// with rule threshold: larger magnitudes become 1 or -1
        threshold: Option<f64> = None;
        /// compute a mean per row; one for the tensor by default
        per_row: bool = false;
    }
}

options! {
    /// The options of a quantization.
    #[derive(Copy)]
    pub struct RuleOptions {
        ..rule;
    }
}

impl RuleOptions {
    /// Checks that a threshold is given if the rule needs one, and only then.
    pub fn checked(&self) -> Result<RuleOptions> {
        let threshold = |got: String| Error::new(Kind::Option, "threshold").got(got);
        match (self.rule, self.threshold) {
            (Rule::Threshold, Some(value)) if value >= 0.0 && value.is_finite() => Ok(*self),
            (Rule::Threshold, Some(value)) => Err(threshold(value.to_string()).expected("0 or more")),
            (Rule::Threshold, None) => Err(threshold("none".into()).expected("a number, which this rule needs")),
            (_, Some(value)) => {
                Err(threshold(value.to_string()).expected("none").hint("Only the rule \"threshold\" has one"))
            }
            (_, None) => Ok(*self),
        }
    }
}

/// A checked quantization.
#[derive(Clone, Debug)]
pub struct Quantization {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Cells of a row.
    pub n: usize,
    /// The rule.
    pub options: RuleOptions,
    /// The storage type.
    pub dtype: DType,
}

impl Quantization {
    /// The quantization of rows of `n` numbers. The axes before the last have the sizes `leading`.
    pub fn new(leading: &[usize], n: usize, options: &RuleOptions, dtype: DType) -> Result<Quantization> {
        let (rows, leading) = (leading.iter().product(), leading.to_vec());
        Ok(Quantization { leading, rows, n, options: options.checked()?, dtype })
    }

    /// Number of scales.
    pub fn scales(&self) -> usize {
        if self.options.per_row { self.rows } else { 1 }
    }

    /// How many floats are read, those of each pass over them.
    pub fn parts(&self) -> usize {
        let means = match self.options.rule {
            _ if self.options.per_row => 1,
            Rule::Threshold => 0,
            Rule::Absmean => 1,
            Rule::Twn => 2,
        };
        (means + 1) * self.rows * self.n
    }

    /// The shape of a plane.
    pub fn plane(&self) -> Result<Spec> {
        Spec::new(DType::U8, &[&self.leading[..], &[plane_bytes(self.n)]].concat())
    }
}

options! {
    /// The options of activations of 8 bits.
    #[derive(Copy)]
    pub struct ActivationOptions {
        /// lower limit of a row's largest magnitude
        amax_floor: f64 = 1e-5;
    }
}

/// A checked quantization of activations.
#[derive(Clone, Debug)]
pub struct Activations {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Lower limit for the largest magnitude of a row.
    pub floor: f32,
    /// The storage type.
    pub dtype: DType,
}

impl Activations {
    /// The error for a value that is not finite.
    pub fn refuse(&self, at: usize, value: f32) -> Error {
        let (row, column) = (at / self.n.max(1), at % self.n.max(1));
        Error::new(Kind::Argument, "x")
            .expected("finite numbers")
            .got(format_args!("{value} in row {row} at {column}"))
            .hint("What is not finite has no 8 bits: look for it where x comes from")
    }
}

/// The longest row whose sums of bytes up to 127 fit into 32 bits.
pub const LONGEST: usize = i32::MAX as usize / 127;

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

/// The form of activations in products.
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

impl Form {
    /// All forms.
    pub const ALL: [Form; 3] = [Form::Ternary, Form::I8, Form::F32];
}

options! {
    /// The options of a product.
    #[derive(Copy)]
    pub struct Options {
        ..crate::ops::products::activation;
        /// also return the int8 activations and the integer sums
        return_sums: bool = false;
    }
}

/// A checked product.
#[derive(Clone, Debug)]
pub struct Product {
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

impl Product {
    /// Checks the product of activations of that form and weights.
    pub fn new(form: Form, inputs: &Named<Spec>, options: &Options) -> Result<Product> {
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
        Ok(Product {
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
        let Product { leading, rows, n, dtype, .. } = self.clone();
        Activations { leading, rows, n, floor, dtype }
    }

    /// Bytes of a row of the weights' planes.
    pub fn bytes(&self) -> usize {
        plane_bytes(self.n)
    }
}

/// Weights in planes.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Rows.
    pub rows: usize,
    /// Cells of a row.
    pub n: usize,
}

/// A checked proof.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Columns of x.
    pub n: usize,
    /// Columns of the product.
    pub outs: usize,
}

impl Proof {
    /// The error for a row whose sums differ.
    pub fn refuse(&self, row: usize, difference: i64) -> Error {
        Error::new(Kind::Argument, "acc")
            .expected("sums that are those of the columns by x")
            .got(format_args!("a difference of {difference} in row {row}"))
            .hint("The weights, the column sums or the result are damaged, or are not of each other")
    }
}

/// Rows of numbers.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The shape.
    pub shape: Shape,
    /// The length of a row.
    pub n: usize,
    /// The storage type.
    pub dtype: DType,
}
