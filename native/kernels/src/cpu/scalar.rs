//! The scalar level, and f64: vectors of one lane over the standard library's functions.

use super::storage::{Storage, round_to_bf16};
use super::vector::Vector;
use half::{bf16, f16};

macro_rules! one_lane {
    ($type:ty, { $($own:tt)* }) => {
        impl Vector for $type {
            type Element = $type;
            const LANES: usize = 1;

            #[inline(always)]
            fn splat(value: $type) -> Self {
                value
            }
            #[inline(always)]
            fn load(values: &[$type]) -> Self {
                values[0]
            }
            #[inline(always)]
            fn store(self, values: &mut [$type]) {
                values[0] = self;
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self / other
            }
            // Not the standard library's `mul_add`, which is a slow call where the CPU has no such instruction.
            #[inline(always)]
            fn mul_add(self, factor: Self, term: Self) -> Self {
                self * factor + term
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self < other { other } else { self }
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self > other { other } else { self }
            }
            #[inline(always)]
            fn where_equal(self, a: Self, b: Self) -> Self {
                if a != b && !a.is_nan() && !b.is_nan() { 0.0 } else { self }
            }
            #[inline(always)]
            fn where_less(self, a: Self, b: Self, other: Self) -> Self {
                if a < b { self } else { other }
            }
            #[inline(always)]
            fn zip(self, other: Self) -> (Self, Self) {
                (self, other)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$type>::abs(self)
            }
            #[inline(always)]
            fn sum(self) -> $type {
                self
            }
            #[inline(always)]
            fn load_u8(values: &[u8]) -> Self {
                <$type>::from(values[0])
            }
            #[inline(always)]
            fn load_f16(values: &[f16]) -> Self {
                <$type>::from(values[0])
            }
            #[inline(always)]
            fn load_bf16(values: &[bf16]) -> Self {
                <$type>::from(values[0].widen())
            }
            $($own)*
        }
    };
}

one_lane!(f32, {
    // Adding and subtracting 1.5 * 2^23 rounds to a whole number; values here are far smaller.
    #[inline(always)]
    fn round(self) -> Self {
        const SHIFT: f32 = 12582912.0;
        (self + SHIFT) - SHIFT
    }
    // Multiplies by 2 and by 2^(n-1), as 2^128 is not an f32. At n = -126 the second factor has zero bits, and so gives
    // 0.
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        let power = f32::from_bits(((n as i32 + 126) as u32) << 23);
        (self * 2.0) * power
    }
    #[inline(always)]
    fn split(self) -> (Self, Self) {
        let n = self.to_bits().wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits()) as i32 >> 23;
        (f32::from_bits(self.to_bits().wrapping_sub((n << 23) as u32)), n as f32)
    }
    #[inline(always)]
    fn store_f16(self, values: &mut [f16]) {
        values[0] = f16::from_f32(self);
    }
    #[inline(always)]
    fn store_bf16(self, values: &mut [bf16]) {
        values[0] = round_to_bf16(self);
    }
});

one_lane!(f64, {
    #[inline(always)]
    fn round(self) -> Self {
        self.round_ties_even()
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        self * n.exp2()
    }
    #[inline(always)]
    fn split(self) -> (Self, Self) {
        let n = self.to_bits().wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits()) as i64 >> 52;
        (f64::from_bits(self.to_bits().wrapping_sub((n << 52) as u64)), n as f64)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }
    #[inline(always)]
    fn store_f16(self, values: &mut [f16]) {
        values[0] = f16::from_f64(self);
    }
    #[inline(always)]
    fn store_bf16(self, values: &mut [bf16]) {
        values[0] = bf16::from_f64(self);
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        f64::exp2(self)
    }
    #[inline(always)]
    fn exp2_near(self) -> Self {
        f64::exp2(self)
    }
    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }
    #[inline(always)]
    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
});
