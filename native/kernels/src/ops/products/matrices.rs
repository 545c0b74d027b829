//! Dense layers whose matrices may be quantized.

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
use crate::tensor::{DType, Described, Owned, Spec, View};
use std::ops::Range;

/// The rows and the weights from which products with matrices in blocks are faster by floats: tensor cores then take
/// longer than the conversion, most of which stays in the cache.
const MANY_ROWS: usize = 256;
const MANY_WEIGHTS: usize = 1 << 22;

/// A dense layer `y = x w^T + b`.
#[derive(Clone)]
pub struct Dense<T> {
    /// `(O, I)`.
    pub w: Matrix<T>,
    /// `(O)`; in the type of the arithmetic if the matrix is quantized.
    pub b: Option<T>,
}

/// A matrix `(O, I)` in one of the stored forms.
#[derive(Clone)]
pub enum Matrix<T> {
    /// `(O, I)`.
    Float(T),
    /// `(O, bytes of a row)`.
    Blocks(Format, T),
    /// Two planes of bits `(O, bytes of a row)`, and a scale for each row.
    Ternary([T; 2], T),
}

impl<T> Dense<T> {
    /// A layer of borrowed tensors.
    pub fn as_ref(&self) -> Dense<&T> {
        Dense { w: self.w.as_ref(), b: self.b.as_ref() }
    }

    /// Applies `f` to each tensor; stops at the first error.
    pub fn try_map<U>(self, f: impl Fn(T) -> Result<U>) -> Result<Dense<U>> {
        Ok(Dense { w: self.w.try_map(&f)?, b: self.b.map(&f).transpose()? })
    }
}

impl<T> From<Matrix<T>> for Dense<T> {
    fn from(w: Matrix<T>) -> Dense<T> {
        Dense { w, b: None }
    }
}

impl<T> Matrix<T> {
    /// Its quantization, or `None` for floats.
    pub fn quantization(&self) -> Option<Quantization> {
        match self {
            Matrix::Float(_) => None,
            Matrix::Blocks(format, _) => Some(Quantization::Blocks(*format)),
            Matrix::Ternary(..) => Some(Quantization::Ternary),
        }
    }

    /// Its tensor of floats, or `None` if it is quantized.
    pub fn float(self) -> Option<T> {
        match self {
            Matrix::Float(w) => Some(w),
            _ => None,
        }
    }

    /// Its tensors, under the names that they have for a matrix named `name`.
    pub fn parts(self, name: &str) -> Vec<(String, T)> {
        let names = self.quantization().map_or_else(|| vec![name.to_string()], |how| how.names(name));
        let parts = match self {
            Matrix::Float(w) | Matrix::Blocks(_, w) => vec![w],
            Matrix::Ternary([plane0, plane1], scale) => vec![plane0, plane1, scale],
        };
        names.into_iter().zip(parts).collect()
    }

    /// A matrix of borrowed tensors.
    pub fn as_ref(&self) -> Matrix<&T> {
        match self {
            Matrix::Float(w) => Matrix::Float(w),
            Matrix::Blocks(format, w) => Matrix::Blocks(*format, w),
            Matrix::Ternary(planes, scale) => Matrix::Ternary(planes.each_ref(), scale),
        }
    }

    /// Applies `f` to each tensor; stops at the first error.
    pub fn try_map<U>(self, f: impl Fn(T) -> Result<U>) -> Result<Matrix<U>> {
        Ok(match self {
            Matrix::Float(w) => Matrix::Float(f(w)?),
            Matrix::Blocks(format, w) => Matrix::Blocks(format, f(w)?),
            Matrix::Ternary([plane0, plane1], scale) => Matrix::Ternary([f(plane0)?, f(plane1)?], f(scale)?),
        })
    }
}

/// A quantization of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// To blocks of this format.
    Blocks(Format),
    /// To signs and a scale for each row.
    Ternary,
}

impl Quantization {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::Blocks(format) => format.name(),
            Quantization::Ternary => "ternary",
        }
    }

    /// All quantizations.
    pub fn all() -> impl Iterator<Item = Quantization> {
        Format::ALL.into_iter().map(Quantization::Blocks).chain([Quantization::Ternary])
    }

    /// The quantization of that name.
    pub fn from_name(name: &str) -> Option<Quantization> {
        Quantization::all().find(|quantization| quantization.name() == name)
    }

    /// The names of the tensors of a quantized matrix named `matrix`.
    pub fn names(self, matrix: &str) -> Vec<String> {
        match self {
            Quantization::Blocks(format) => vec![format!("{matrix}.{}", format.name())],
            Quantization::Ternary => ["plane0", "plane1", "scale"].map(|part| format!("{matrix}.{part}")).to_vec(),
        }
    }

    /// Whether the rows of a matrix can be quantized like this.
    pub fn fits(self, matrix: &Spec) -> bool {
        self == Quantization::Ternary || matrix.shape.last().is_some_and(|columns| columns.is_multiple_of(BLOCK))
    }

    /// Quantizes a matrix of floats.
    pub fn of(self, matrix: &View, exec: &Exec) -> Result<Matrix<Owned>> {
        Ok(match self {
            Quantization::Blocks(format) => Matrix::Blocks(format, in_blocks(format, matrix, exec)?),
            Quantization::Ternary => in_planes(matrix, exec)?,
        })
    }
}

/// The floats of a matrix with rows of `n` numbers; f32 if it is quantized.
pub fn floats(matrix: &Matrix<View>, n: usize) -> Result<Owned> {
    let exec = &Exec::default();
    match *matrix {
        Matrix::Float(w) => Ok(w.cast(w.spec().dtype)),
        Matrix::Blocks(format, q) => {
            run::<Dequantize>(&DequantizeOptions { format }, &named([("q", Some(q))]), exec)?.expect("x")
        }
        Matrix::Ternary([plane0, plane1], scale) => {
            let inputs = named([("plane0", Some(plane0)), ("plane1", Some(plane1)), ("scale", Some(scale))]);
            run::<DequantizeTernary>(&dequantize::Options { n: Some(n) }, &inputs, exec)?.expect("w")
        }
    }
}

/// A range of rows of a dense layer: those of its matrix and of its bias.
pub fn rows<'s, 'a: 's, P: Place>(of: &Dense<P::View<'a>>, range: Range<usize>) -> Result<Dense<P::View<'s>>> {
    of.as_ref().try_map(|tensor| P::rows(tensor, range.clone()))
}

/// `y = x w^T + b`. With a quantized matrix the rows of `x` are quantized to 8 bits, but for many rows of 16-bit types on
/// CUDA: these are multiplied by the matrix as floats of their type, for which tensor cores are faster.
pub fn multiply<'s, 'a: 's, P: Place>(
    place: &P,
    x: P::View<'s>,
    of: &Dense<P::View<'a>>,
    y: P::ViewMut<'s>,
) -> Result<()> {
    let b = of.b.as_ref().map(P::briefly);
    match &of.w {
        Matrix::Float(w) => linear::at(place, [x, P::briefly(w)], b, y),
        Matrix::Blocks(format, w) => {
            if b.is_none()
                && let Some(floats) = unpacked(place, *format, w, &x.spec())?
            {
                return linear::at(place, [P::briefly(&x), P::view(&floats)], None, P::briefly_mut(y));
            }
            let inputs = named([("x", Some(x)), ("w", Some(P::briefly(w))), ("b", b)]);
            let outputs = named([("y", Some(y))]);
            match format {
                Format::Q8 => place.call::<MatmulQ8Q8>(&blocks::Options::default(), inputs, outputs),
                Format::Q4 => place.call::<MatmulQ8Q4>(&blocks::Options::default(), inputs, outputs),
            }
        }
        Matrix::Ternary([plane0, plane1], scale) => {
            let inputs = named([
                ("x", Some(x)),
                ("plane0", Some(P::briefly(plane0))),
                ("plane1", Some(P::briefly(plane1))),
                ("w_scale", Some(P::briefly(scale))),
                ("bias", b),
            ]);
            place.call::<Matmul<I8>>(&Default::default(), inputs, named([("y", Some(y))]))
        }
    }
}

/// The floats of a matrix in blocks, in the type of `x`, where products with as many rows are faster by them.
fn unpacked<P: Place>(place: &P, format: Format, w: &P::View<'_>, x: &Spec) -> Result<Option<P::Owned>> {
    let (&inputs, rows) = x.shape.split_last().expect("rows of x");
    let outputs = w.spec().shape[0];
    let many = rows.iter().product::<usize>() >= MANY_ROWS && outputs * inputs >= MANY_WEIGHTS;
    if x.dtype.size() != 2 || !many {
        return Ok(None);
    }
    let floats = Spec::new(x.dtype, &[outputs, inputs])?;
    place.made_on_device(floats, w, |w, floats, lane| blocks::dequantize(format, w, floats, lane))
}

/// Quantizes a matrix to blocks.
fn in_blocks(format: Format, matrix: &View, exec: &Exec) -> Result<Owned> {
    let options = QuantizeOptions { format, ..Default::default() };
    of_wide::<Quantize>(&options, "x", matrix, exec)?.expect("q")
}

/// Quantizes a matrix to planes, with a scale for each row.
fn in_planes(matrix: &View, exec: &Exec) -> Result<Matrix<Owned>> {
    let options = rules::Options { per_row: true, ..Default::default() };
    let mut parts = of_wide::<QuantizeTernary>(&options, "w", matrix, exec)?;
    Ok(Matrix::Ternary([parts.expect("plane0")?, parts.expect("plane1")?], parts.expect("scale")?))
}

/// The output of an op on the CPU, for a matrix that is first converted to f32.
fn of_wide<O: Op>(options: &O::Options, name: &'static str, matrix: &View, exec: &Exec) -> Result<Named<Owned>> {
    let wide = matrix.cast(DType::F32);
    run::<O>(options, &[(name, wide.view())].into_iter().collect(), exec)
}

/// The output of an op on the CPU.
fn run<O: Op>(options: &O::Options, inputs: &Named<View>, exec: &Exec) -> Result<Named<Owned>> {
    let call = Call::new::<O>(op::specs(inputs), options)?;
    let mut outputs = call.outputs().map(|&spec| Owned::any(spec));
    let views = outputs.iter_mut().map(|(name, output)| (name.clone(), output.view_mut())).collect();
    call.cpu(inputs, views, exec)?;
    Ok(outputs)
}
