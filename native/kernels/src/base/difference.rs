//! The difference of two tensors, such as weights before and after they were quantized.

use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Element, View};
use crate::with_any_type;

/// The distance between two tensors, summed in f64.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// The sum of the squared differences.
    pub squares: f64,
    /// The sum of the reference's squares.
    pub reference: f64,
    /// The largest absolute difference.
    pub largest: f64,
}

/// The distance of an f32 tensor from a reference of any type and equal shape.
pub fn difference(tensor: View, reference: View) -> Result<Difference> {
    let (spec, wanted) = (tensor.spec(), reference.spec());
    if (spec.dtype, spec.shape) != (DType::F32, wanted.shape) {
        let expected = format_args!("f32 {}, the shape of the other", wanted.shape).to_string();
        return Err(Error::new(Kind::Shape, "tensor").expected(expected).got(spec));
    }
    let values = tensor.slice::<f32>()?;
    Ok(with_any_type!(wanted.dtype, T => of(values, reference.slice::<T>()?)))
}

fn of<T: Element>(values: &[f32], reference: &[T]) -> Difference {
    values.iter().zip(reference).fold(Difference::default(), |sum, (value, wanted)| {
        let wanted = wanted.to_f64();
        let apart = (f64::from(*value) - wanted).abs();
        Difference {
            squares: sum.squares + apart * apart,
            reference: sum.reference + wanted * wanted,
            largest: sum.largest.max(apart),
        }
    })
}
