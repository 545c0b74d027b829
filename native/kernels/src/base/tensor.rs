//! Shapes, and views whose bytes are proven to fit them.

pub use super::dtype::{DType, Element, bf16, f16};
use super::scratch::{Allocated, Words};
use crate::error::{Error, Kind, Result};
use crate::with_any_type;
use ndarray::ArrayD;
use std::fmt;
use std::ops::{Deref, Range};

/// The most axes a tensor can have.
pub const MAX_RANK: usize = 8;

/// The sizes of a tensor's axes, outermost first; derefs to a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    /// A shape whose element count fits a 64-bit offset.
    pub fn new(dims: &[usize]) -> Result<Shape> {
        let too_many = || Error::new(Kind::Shape, "shape").got(format_args!("{dims:?}"));
        if dims.len() > MAX_RANK {
            return Err(too_many().expected(format_args!("at most {MAX_RANK} axes")));
        }
        // Zero sizes hide overflow of the others, and strides are products of the others.
        let mut nonzero = dims.iter().map(|&d| d.max(1));
        nonzero
            .try_fold(1usize, |n, d| n.checked_mul(d))
            .filter(|&n| n <= isize::MAX as usize / 8)
            .ok_or_else(|| too_many().expected("a size that fits in memory"))?;
        let mut shape = Shape { dims: [1; MAX_RANK], rank: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// How many elements there are; cannot overflow.
    pub fn elements(&self) -> usize {
        self.iter().product()
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.iter().map(usize::to_string).collect();
        write!(f, "({})", dims.join(", "))
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A tensor without its data: element type and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The element type.
    pub dtype: DType,
    /// The sizes of the axes.
    pub shape: Shape,
}

impl Spec {
    /// The spec of a tensor of these sizes.
    pub fn new(dtype: DType, dims: &[usize]) -> Result<Spec> {
        Ok(Spec { dtype, shape: Shape::new(dims)? })
    }

    /// How many bytes such a tensor takes; cannot overflow.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size()
    }

    /// A part of the first axis: its spec, and where its bytes lie.
    pub fn rows(&self, range: Range<usize>) -> Result<(Spec, Range<usize>)> {
        let whole = self.shape.first().is_some_and(|&rows| range.start <= range.end && range.end <= rows);
        if !whole {
            let got = format_args!("rows {range:?} of {self}").to_string();
            return Err(Error::new(Kind::Shape, "rows").expected("rows that are there").got(got));
        }
        let dims = [&[range.len()], &self.shape[1..]].concat();
        let row = self.shape[1..].iter().product::<usize>() * self.dtype.size();
        Ok((Spec::new(self.dtype, &dims)?, range.start * row..range.end * row))
    }

    fn check_bytes(&self, len: usize) -> Result<()> {
        if len == self.bytes() {
            return Ok(());
        }
        Err(Error::new(Kind::Size, "data")
            .expected(format_args!("{} bytes for {self}", self.bytes()))
            .got(format_args!("{len} bytes")))
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, self.shape)
    }
}

/// A type with an element type and a shape: a view, a device buffer, a bare [`Spec`].
pub trait Described {
    /// Element type and shape.
    fn spec(&self) -> Spec;
}

impl<T: Described> Described for &T {
    fn spec(&self) -> Spec {
        (*self).spec()
    }
}

impl Described for Spec {
    fn spec(&self) -> Spec {
        *self
    }
}

macro_rules! view {
    ($(#[$doc:meta])* $name:ident, $bytes:ty) => {
        $(#[$doc])*
        pub struct $name<'a> {
            spec: Spec,
            bytes: $bytes,
        }

        impl<'a> $name<'a> {
            /// A view of `bytes`, proven to have the length and alignment that `spec` asks for.
            pub fn new(spec: Spec, bytes: $bytes) -> Result<Self> {
                spec.check_bytes(bytes.len())?;
                let address = bytes.as_ptr() as usize;
                if !bytes.is_empty() && !address.is_multiple_of(spec.dtype.size()) {
                    return Err(Error::new(Kind::Size, "data")
                        .expected(format_args!("an address that is a multiple of {}", spec.dtype.size()))
                        .got(format_args!("{address:#x}")));
                }
                Ok(Self { spec, bytes })
            }
        }

        impl Described for $name<'_> {
            fn spec(&self) -> Spec {
                self.spec
            }
        }
    };
}

view!(
    /// A tensor to read on the host: row-major, last axis contiguous.
    #[derive(Clone, Copy)]
    View,
    &'a [u8]
);
view!(
    /// A tensor to write on the host: row-major, last axis contiguous.
    ViewMut,
    &'a mut [u8]
);

fn typed<T: Element>(spec: &Spec) -> Result<()> {
    if spec.dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::new(Kind::DType, "data").expected(T::DTYPE).got(spec.dtype))
}

impl<'a> View<'a> {
    /// The elements; fails if they are not of type `T`.
    pub fn slice<T: Element>(&self) -> Result<&'a [T]> {
        typed::<T>(&self.spec)?;
        Ok(if self.bytes.is_empty() { &[] } else { bytemuck::cast_slice(self.bytes) })
    }

    /// The values in f64.
    pub fn to_f64(&self) -> ArrayD<f64> {
        let values = with_any_type!(self.spec.dtype, T => {
            self.slice::<T>().expect("its own type").iter().map(|v| v.to_f64()).collect()
        });
        ArrayD::from_shape_vec(&self.spec.shape[..], values).expect("as many values as the shape says")
    }

    /// The values, rounded to another type.
    pub fn cast(&self, dtype: DType) -> Owned {
        let mut cast = Owned::any(Spec { dtype, ..self.spec });
        self.cast_into(cast.view_mut());
        cast
    }

    /// Writes the values, rounded to the type of `to`, which has the same shape.
    pub fn cast_into(&self, to: ViewMut) {
        with_any_type!(self.spec.dtype, F => with_any_type!(to.spec.dtype, T => {
            let to = to.slice::<T>().expect("its own type");
            let from = self.slice::<F>().expect("its own type");
            to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f64(from.to_f64()));
        }));
    }

    /// The first value that meets a condition.
    pub fn find(&self, mut condition: impl FnMut(f64) -> bool) -> Option<f64> {
        with_any_type!(self.spec.dtype, T => {
            self.slice::<T>().expect("its own type").iter().map(|v| v.to_f64()).find(|&v| condition(v))
        })
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements under another shape of equal size.
    pub fn reshape(self, dims: &[usize]) -> Result<View<'a>> {
        View::new(Spec::new(self.spec.dtype, dims)?, self.bytes)
    }

    /// A part of the first axis.
    pub fn rows(self, range: Range<usize>) -> Result<View<'a>> {
        let (spec, bytes) = self.spec.rows(range)?;
        View::new(spec, &self.bytes[bytes])
    }
}

impl<'a> ViewMut<'a> {
    /// A view of the same memory, for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { spec: self.spec, bytes: self.bytes }
    }

    /// The elements; fails if they are not of type `T`.
    pub fn slice<T: Element>(self) -> Result<&'a mut [T]> {
        typed::<T>(&self.spec)?;
        Ok(if self.bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(self.bytes) })
    }

    /// Writes values of the same shape, rounded.
    pub fn store_f64(self, values: &ArrayD<f64>) {
        with_any_type!(self.spec.dtype, T => {
            let to = self.slice::<T>().expect("its own type");
            to.iter_mut().zip(values).for_each(|(to, &value)| *to = T::from_f64(value));
        });
    }

    /// The raw bytes.
    pub fn bytes(self) -> &'a mut [u8] {
        self.bytes
    }

    /// The raw bytes, borrowed for a shorter time.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// What lies there now.
    pub fn view(&self) -> View<'_> {
        View { spec: self.spec, bytes: self.bytes }
    }

    /// The elements under another shape of equal size, to write.
    pub fn reshape(self, dims: &[usize]) -> Result<ViewMut<'a>> {
        ViewMut::new(Spec::new(self.spec.dtype, dims)?, self.bytes)
    }

    /// A part of the first axis, to write.
    pub fn rows(self, range: Range<usize>) -> Result<ViewMut<'a>> {
        let (spec, bytes) = self.spec.rows(range)?;
        ViewMut::new(spec, &mut self.bytes[bytes])
    }

    /// The first `at` of the first axis, and the others.
    pub fn split_rows(self, at: usize) -> Result<(ViewMut<'a>, ViewMut<'a>)> {
        let all = self.spec.shape.first().copied().unwrap_or(0);
        let ((first, bytes), (rest, _)) = (self.spec.rows(0..at)?, self.spec.rows(at..all)?);
        let (of_first, of_rest) = self.bytes.split_at_mut(bytes.end);
        Ok((ViewMut::new(first, of_first)?, ViewMut::new(rest, of_rest)?))
    }
}

/// A tensor with memory of its own, for tests, benchmarks and files.
#[derive(Clone)]
pub struct Owned {
    spec: Spec,
    /// Whole words, so that any element type is aligned.
    words: Words,
}

impl Owned {
    /// All bits set: NaN in every float type, so that an element that is never written shows.
    pub fn poisoned(spec: Spec) -> Owned {
        Owned::try_poisoned(spec).expect("memory for the tensor")
    }

    /// Of any content, for what is written whole. Sanitized and unoptimized builds poison it.
    pub fn any(spec: Spec) -> Owned {
        Owned::try_any(spec).expect("memory for the tensor")
    }

    /// All bits clear: zeros in every type.
    pub fn zeros(spec: Spec) -> Owned {
        Owned::try_zeros(spec).expect("memory for the tensor")
    }

    /// Like [`Owned::poisoned`], but a failed allocation is an error and no panic.
    pub fn try_poisoned(spec: Spec) -> Result<Owned> {
        Owned::try_filled(spec, u64::MAX)
    }

    /// Like [`Owned::any`], but a failed allocation is an error and no panic.
    pub fn try_any(spec: Spec) -> Result<Owned> {
        if cfg!(any(debug_assertions, fuzzing)) { Owned::try_poisoned(spec) } else { Owned::try_of(spec, Words::any) }
    }

    /// Like [`Owned::zeros`], but a failed allocation is an error and no panic.
    pub fn try_zeros(spec: Spec) -> Result<Owned> {
        Owned::try_filled(spec, 0)
    }

    fn try_filled(spec: Spec, word: u64) -> Result<Owned> {
        Owned::try_of(spec, |count| Words::filled(count, word))
    }

    fn try_of(spec: Spec, words: impl FnOnce(usize) -> Allocated<Words>) -> Result<Owned> {
        let words = words(spec.bytes().div_ceil(8)).map_err(|_| {
            let expected = format_args!("{} bytes of memory for {spec}", spec.bytes()).to_string();
            Error::new(Kind::Memory, "tensor").expected(expected).got("none")
        })?;
        Ok(Owned { spec, words })
    }

    /// The values `value(0)`, `value(1)` and so on, rounded to the type of `spec`.
    pub fn from_fn(spec: Spec, value: impl FnMut(usize) -> f64) -> Owned {
        let mut tensor = Owned::any(spec);
        let values = (0..spec.shape.elements()).map(value).collect();
        let values = ArrayD::from_shape_vec(&spec.shape[..], values).expect("as many values as the shape says");
        tensor.view_mut().store_f64(&values);
        tensor
    }

    /// To read.
    pub fn view(&self) -> View<'_> {
        let bytes = &bytemuck::cast_slice(&self.words)[..self.spec.bytes()];
        View { spec: self.spec, bytes }
    }

    /// To write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = &mut bytemuck::cast_slice_mut(&mut self.words)[..self.spec.bytes()];
        ViewMut { spec: self.spec, bytes }
    }

    /// The values, rounded to another type.
    pub fn cast(&self, dtype: DType) -> Owned {
        self.view().cast(dtype)
    }
}

impl Described for Owned {
    fn spec(&self) -> Spec {
        self.spec
    }
}
