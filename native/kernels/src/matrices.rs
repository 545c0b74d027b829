//! Matrices of dense layers among named tensors: floats, or quantized under names that say how.

use crate::blocks::{self, Format};
use crate::cpu::Exec;
use crate::error::Result;
use crate::linear;
use crate::op::Named;
use crate::place::Place;
use crate::tensor::{Owned, Spec, View};
use crate::ternary;
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

/// What is behind the name of a ternary matrix in those of its tensors.
const TERNARY: [&str; 3] = ["plane0", "plane1", "scale"];

impl Quantization {
    /// The name of it in options.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::Blocks(format) => format.name(),
            Quantization::Ternary => "ternary",
        }
    }

    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Quantization> {
        let blocks = Format::ALL.into_iter().map(Quantization::Blocks);
        blocks.chain([Quantization::Ternary]).find(|quantization| quantization.name() == name)
    }

    /// The names of the tensors of a matrix of that name.
    fn names(self, matrix: &str) -> Vec<String> {
        match self {
            Quantization::Blocks(format) => vec![format!("{matrix}.{}", format.name())],
            Quantization::Ternary => TERNARY.map(|part| format!("{matrix}.{part}")).to_vec(),
        }
    }

    /// Whether a matrix has rows that can be quantized so.
    pub fn fits(self, matrix: &Spec) -> bool {
        self == Quantization::Ternary || matrix.shape.last().is_some_and(|columns| columns.is_multiple_of(blocks::BLOCK))
    }

    /// The tensors of a matrix of that name.
    pub fn of(self, name: &str, matrix: &View, exec: &Exec) -> Result<Vec<(String, Owned)>> {
        let parts = match self {
            Quantization::Blocks(format) => vec![blocks::quantized(format, matrix, exec)?],
            Quantization::Ternary => ternary::quantized_rows(matrix, exec)?.into(),
        };
        Ok(self.names(name).into_iter().zip(parts).collect())
    }
}

/// Whether a tensor of that name is of a quantized matrix.
pub fn is_quantized(name: &str) -> bool {
    name.contains('.')
}

/// The matrix of that name, however it is stored.
pub fn find<'s, 'a: 's, P: Place>(tensors: &Named<P::View<'a>>, name: &str) -> Result<Matrix<P::View<'s>>> {
    let brief = |name: &str| tensors.find(name).map(P::briefly);
    for format in Format::ALL {
        if let Some(bytes) = brief(&Quantization::Blocks(format).names(name)[0]) {
            return Ok(Matrix::Blocks(format, bytes));
        }
    }
    let [plane0, plane1, scale] = TERNARY.map(|part| brief(&format!("{name}.{part}")));
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
        Matrix::Blocks(format, w) => blocks::multiply_at(place, format, [x, w], b, y),
        Matrix::Ternary(planes, scale) => ternary::multiply_at(place, x, planes, scale, b, y),
    }
}
