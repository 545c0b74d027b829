//! Matrices of dense layers among named tensors: floats, or quantized under names that say how.

use crate::cpu::Exec;
use crate::error::Result;
use crate::op::{self, Call, Named, Op, named};
use crate::ops::products::blocks::format::BLOCK;
use crate::ops::products::blocks::{
    self, Dequantize, DequantizeOptions, Format, MatmulQ8Q4, MatmulQ8Q8, Quantize, QuantizeOptions,
};
use crate::ops::products::linear;
use crate::ops::products::ternary::dequantize::{self, DequantizeTernary};
use crate::ops::products::ternary::products::{I8, Matmul};
use crate::ops::products::ternary::rules::{self, QuantizeTernary};
use crate::place::Place;
use crate::tensor::{DType, Owned, Spec, View};
use std::ops::Range;

/// A matrix `(O, I)` that rows are multiplied with, as it is stored.
pub enum Matrix<V> {
    /// `(O, I)`.
    Float(V),
    /// `(O, bytes of a row)`.
    Blocks(Format, V),
    /// Two planes of bits `(O, bytes of a row)`, and a scale for each row.
    Ternary([V; 2], V),
}

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// In blocks.
    Blocks(Format),
    /// To signs and a scale for each row.
    Ternary,
}

/// What the names of a ternary matrix's tensors have after the name of the matrix.
const TERNARY: [&str; 3] = ["plane0", "plane1", "scale"];

impl Quantization {
    /// The name of it in options.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::Blocks(format) => format.name(),
            Quantization::Ternary => "ternary",
        }
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Quantization> {
        Format::ALL.into_iter().map(Quantization::Blocks).chain([Quantization::Ternary])
    }

    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Quantization> {
        Quantization::all().find(|quantization| quantization.name() == name)
    }

    /// The names of the tensors of a matrix of that name.
    pub fn names(self, matrix: &str) -> Vec<String> {
        match self {
            Quantization::Blocks(format) => vec![format!("{matrix}.{}", format.name())],
            Quantization::Ternary => TERNARY.map(|part| format!("{matrix}.{part}")).to_vec(),
        }
    }

    /// Whether the rows of a matrix can be quantized in this way.
    pub fn fits(self, matrix: &Spec) -> bool {
        self == Quantization::Ternary || matrix.shape.last().is_some_and(|columns| columns.is_multiple_of(BLOCK))
    }

    /// The tensors of a matrix of that name.
    pub fn of(self, name: &str, matrix: &View, exec: &Exec) -> Result<Vec<(String, Owned)>> {
        let parts = match self {
            Quantization::Blocks(format) => vec![in_blocks(format, matrix, exec)?],
            Quantization::Ternary => in_planes(matrix, exec)?.into(),
        };
        Ok(self.names(name).into_iter().zip(parts).collect())
    }

    /// The floats that the tensors of a matrix with rows of `n` stand for, in f32.
    pub fn floats(self, parts: &[View], n: usize) -> Result<Owned> {
        let exec = &Exec::default();
        match self {
            Quantization::Blocks(format) => {
                let inputs = ["q"].into_iter().zip(parts.iter().copied()).collect();
                run::<Dequantize>(&DequantizeOptions { format }, &inputs, exec)?.expect("x")
            }
            Quantization::Ternary => {
                let inputs = TERNARY.into_iter().zip(parts.iter().copied()).collect();
                run::<DequantizeTernary>(&dequantize::Options { n: Some(n) }, &inputs, exec)?.expect("w")
            }
        }
    }
}

/// Whether a tensor of that name is of a quantized matrix.
pub fn is_quantized(name: &str) -> bool {
    name.contains('.')
}

/// The matrix of that name, however it is stored.
pub fn find<'s, 'a: 's, P: Place>(tensors: &Named<P::View<'a>>, name: &str) -> Result<Matrix<P::View<'s>>> {
    let is_part = |tensor: &str, part| tensor.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) == Some(part);
    let part = |part| tensors.iter().find(|(tensor, _)| is_part(tensor, part)).map(|(_, tensor)| P::briefly(tensor));
    for format in Format::ALL {
        if let Some(bytes) = part(format.name()) {
            return Ok(Matrix::Blocks(format, bytes));
        }
    }
    let [plane0, plane1, scale] = TERNARY.map(part);
    match (plane0, plane1, scale) {
        (Some(plane0), Some(plane1), Some(scale)) => Ok(Matrix::Ternary([plane0, plane1], scale)),
        _ => tensors.get(name).map(|matrix| Matrix::Float(P::briefly(matrix))),
    }
}

/// Those rows of a matrix.
pub fn rows<'s, 'a: 's, P: Place>(of: &Matrix<P::View<'a>>, range: Range<usize>) -> Result<Matrix<P::View<'s>>> {
    let rows = |of: &P::View<'a>| P::rows(of, range.clone());
    Ok(match of {
        Matrix::Float(w) => Matrix::Float(rows(w)?),
        Matrix::Blocks(format, w) => Matrix::Blocks(*format, rows(w)?),
        Matrix::Ternary([plane0, plane1], scale) => Matrix::Ternary([rows(plane0)?, rows(plane1)?], rows(scale)?),
    })
}

/// `y = x w^T + b`. With a quantized matrix rows of `x` are quantized to 8 bits, and `b` is of the type of the arithmetic.
pub fn multiply<'s, P: Place>(
    place: &P,
    x: P::View<'s>,
    w: Matrix<P::View<'s>>,
    b: Option<P::View<'s>>,
    y: P::ViewMut<'s>,
) -> Result<()> {
    match w {
        Matrix::Float(w) => linear::at(place, [x, w], b, y),
        Matrix::Blocks(format, w) => {
            let inputs = named([("x", Some(x)), ("w", Some(w)), ("b", b)]);
            let outputs = named([("y", Some(y))]);
            match format {
                Format::Q8 => place.call::<MatmulQ8Q8>(&blocks::Options::default(), inputs, outputs),
                Format::Q4 => place.call::<MatmulQ8Q4>(&blocks::Options::default(), inputs, outputs),
            }
        }
        Matrix::Ternary([plane0, plane1], scale) => {
            let inputs = named([
                ("x", Some(x)),
                ("plane0", Some(plane0)),
                ("plane1", Some(plane1)),
                ("w_scale", Some(scale)),
                ("bias", b),
            ]);
            place.call::<Matmul<I8>>(&Default::default(), inputs, named([("y", Some(y))]))
        }
    }
}

/// The blocks of a matrix.
fn in_blocks(format: Format, matrix: &View, exec: &Exec) -> Result<Owned> {
    let options = QuantizeOptions { format, ..Default::default() };
    of_wide::<Quantize>(&options, "x", matrix, exec)?.expect("q")
}

/// The planes of a matrix, and the scale of each row.
fn in_planes(matrix: &View, exec: &Exec) -> Result<[Owned; 3]> {
    let options = rules::Options { per_row: true, ..Default::default() };
    let mut parts = of_wide::<QuantizeTernary>(&options, "w", matrix, exec)?;
    Ok([parts.expect("plane0")?, parts.expect("plane1")?, parts.expect("scale")?])
}

/// What an op on the CPU gives of a matrix in f32.
fn of_wide<O: Op>(options: &O::Options, name: &'static str, matrix: &View, exec: &Exec) -> Result<Named<Owned>> {
    let wide = matrix.cast(DType::F32);
    run::<O>(options, &[(name, wide.view())].into_iter().collect(), exec)
}

/// What an op on the CPU gives.
fn run<O: Op>(options: &O::Options, inputs: &Named<View>, exec: &Exec) -> Result<Named<Owned>> {
    let call = Call::new::<O>(op::specs(inputs), options)?;
    let mut outputs = call.outputs().map(|&spec| Owned::poisoned(spec));
    let views = outputs.iter_mut().map(|(name, output)| (name.clone(), output.view_mut())).collect();
    call.cpu(inputs, views, exec)?;
    Ok(outputs)
}
