//! Loads and stores the element types of tensors as vectors of the type of the arithmetic.

use super::level::Real;
use super::vector::{MAX_LANES, Vector};
use crate::tensor::Element;
use half::{bf16, f16};

/// An element type with its accumulation type: narrow in memory, wide in arithmetic.
pub trait Storage: Element {
    /// The accumulation type.
    type Wide: Real + Storage<Wide = Self::Wide>;

    /// The first `V::LANES` values, widened; lanes past the end of the slice are zero.
    fn load<V: Vector<Element = Self::Wide>>(values: &[Self]) -> V;
    /// Rounds and writes the first lanes, up to the length of the slice.
    fn store<V: Vector<Element = Self::Wide>>(vector: V, values: &mut [Self]);
    /// One value, widened.
    fn widen(self) -> Self::Wide;
    /// Number of leading values to write by other stores until [`Storage::stream`] is aligned.
    #[inline(always)]
    fn to_alignment<V: Vector<Element = Self::Wide>>(_: &[Self]) -> usize {
        0
    }
    /// Like [`Storage::store`] of whole vectors, but past the caches where the type allows it: see
    /// [`Vector::stream`].
    #[inline(always)]
    fn stream<V: Vector<Element = Self::Wide>>(vector: V, values: &mut [Self]) {
        Self::store(vector, values);
    }
}

macro_rules! same_width {
    ($type:ty) => {
        impl Storage for $type {
            type Wide = $type;
            #[inline(always)]
            fn load<V: Vector<Element = $type>>(values: &[$type]) -> V {
                V::load_partial(values)
            }
            #[inline(always)]
            fn store<V: Vector<Element = $type>>(vector: V, values: &mut [$type]) {
                vector.store_partial(values);
            }
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn to_alignment<V: Vector<Element = $type>>(values: &[$type]) -> usize {
                let bytes = V::LANES * size_of::<$type>();
                (values.as_ptr().addr().next_multiple_of(bytes) - values.as_ptr().addr()) / size_of::<$type>()
            }
            #[inline(always)]
            fn stream<V: Vector<Element = $type>>(vector: V, values: &mut [$type]) {
                vector.stream(values);
            }
        }
    };
}
same_width!(f32);
same_width!(f64);

macro_rules! half_width {
    ($type:ty, $load:ident, $store:ident, $widen:expr) => {
        impl Storage for $type {
            type Wide = f32;
            #[inline(always)]
            fn load<V: Vector<Element = f32>>(values: &[$type]) -> V {
                if values.len() >= V::LANES {
                    return V::$load(values);
                }
                let mut lanes = [<$type>::ZERO; MAX_LANES];
                lanes[..values.len()].copy_from_slice(values);
                V::$load(&lanes)
            }
            #[inline(always)]
            fn store<V: Vector<Element = f32>>(vector: V, values: &mut [$type]) {
                if values.len() >= V::LANES {
                    return vector.$store(values);
                }
                let mut lanes = [<$type>::ZERO; MAX_LANES];
                vector.$store(&mut lanes);
                values.copy_from_slice(&lanes[..values.len()]);
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
        }
    };
}
half_width!(bf16, load_bf16, store_bf16, |value: bf16| f32::from_bits((value.to_bits() as u32) << 16));
half_width!(f16, load_f16, store_f16, f16::to_f32);

/// Added to the bits of an f32, it carries into the half that bf16 keeps if the half that it drops is above the middle.
pub(super) const BELOW_HALF: u32 = 0x7fff;

/// The bit that makes a NaN quiet. It is in the half that bf16 keeps, so that no NaN becomes an infinity.
pub(super) const QUIET: u32 = 0x0040_0000;

/// Rounds to nearest, ties to even.
#[inline(always)]
pub fn round_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(BELOW_HALF + ((bits >> 16) & 1));
    bf16::from_bits(((if value.is_nan() { bits | QUIET } else { rounded }) >> 16) as u16)
}
