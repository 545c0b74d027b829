//! A narrow SIMD trait, over which each algorithm is written once.

use super::math;
use crate::tensor::Element;
use half::{bf16, f16};

/// Loops over values that are widened already, for [`Vector::apart`].
///
/// `run` and everything it calls must be `#[inline(always)]`, or it is compiled without the instructions of its level.
pub trait Loops {
    /// Runs the loops.
    fn run(self);
}

/// A few values of one type that are computed together.
///
/// Implementations are thin wrappers of one instruction each. They must only be called where the CPU supports it: see
/// [`Real::dispatch`](super::level::Real::dispatch).
pub trait Vector: Copy + Send + Sync {
    /// The type of one value.
    type Element: Element + PartialOrd;
    /// Number of values.
    const LANES: usize;
    /// The lowest `n` that [`Vector::scale`] accepts; the result is 0.
    const LOWEST: f64 = -126.0;

    /// Runs loops in a function of their own, with the instructions of this vector. So they are compiled once, and not
    /// for each type of storage that their values come from.
    #[inline(never)]
    fn apart(loops: impl Loops) {
        loops.run();
    }
    /// A vector with `value` in every lane.
    fn splat(value: Self::Element) -> Self;
    /// The first `LANES` values of a slice, which must have at least that length.
    fn load(values: &[Self::Element]) -> Self;
    /// Writes all lanes to the front of a slice.
    fn store(self, values: &mut [Self::Element]);
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `self * factor + term`, with one rounding where the hardware has it.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger one; NaN where `self` is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller one; NaN where `self` is NaN.
    fn min(self, other: Self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// Keeps the lanes of `self` where `a` is neither smaller nor larger than `b`; the others become 0.
    fn where_equal(self, a: Self, b: Self) -> Self;
    /// Selects the lanes of `self` where `a` is smaller than `b`, and those of `other` elsewhere, also where either is
    /// NaN.
    fn where_less(self, a: Self, b: Self, other: Self) -> Self;
    /// Interleaves the lanes of both into two vectors: those of the lower halves, then of the upper halves.
    fn zip(self, other: Self) -> (Self, Self);
    /// The nearest whole number, ties to even.
    fn round(self) -> Self;
    /// `self * 2^n` for whole `n` in [`LOWEST`, 128] and `self` in [0.5, 2]: 0 at `LOWEST`, infinity
    /// above what the type can hold.
    ///
    /// [`LOWEST`]: Vector::LOWEST
    fn scale(self, n: Self) -> Self;
    /// `m` in about [0.7, 1.42) and whole `n` with `self = m * 2^n`, for positive lanes that are not subnormal.
    fn split(self) -> (Self, Self);
    /// Writes all lanes to the front of a slice by non-temporal stores; its address must be a multiple of the vector's
    /// size. Call [`fence`](super::fence) after the last one.
    #[inline(always)]
    fn stream(self, values: &mut [Self::Element]) {
        self.store(values);
    }
    /// The sum of all lanes.
    fn sum(self) -> Self::Element;
    /// Sums four vectors at once, down to one vector: its lanes `k`, `k + 4` and so on add up to the sum of vector `k`.
    /// For vectors of at least four lanes.
    #[inline(always)]
    fn fold(four: [Self; 4]) -> Self {
        let mut sums = [Self::Element::from_f64(0.0); MAX_LANES];
        for (sum, vector) in sums.iter_mut().zip(four) {
            *sum = vector.sum();
        }
        Self::load(&sums)
    }
    /// Completes [`Vector::fold`]: the four sums.
    #[inline(always)]
    fn fours(self) -> [Self::Element; 4] {
        debug_assert!(Self::LANES <= 4, "more lanes must be added up");
        let [a, b, c, d, ..] = self.lanes();
        [a, b, c, d]
    }
    /// The first `LANES` bytes of a slice as numbers.
    fn load_u8(values: &[u8]) -> Self;
    /// The first `LANES` half-precision values of a slice, widened.
    fn load_f16(values: &[f16]) -> Self;
    /// Writes all lanes, rounded to half precision, to the front of a slice.
    fn store_f16(self, values: &mut [f16]);
    /// The first `LANES` bf16 values of a slice, widened.
    fn load_bf16(values: &[bf16]) -> Self;
    /// Writes all lanes, rounded as by [`round_to_bf16`](super::storage::round_to_bf16), to the front of a slice.
    fn store_bf16(self, values: &mut [bf16]);

    /// 2 to the power of each lane: see [`math::exp2`] for its accuracy.
    #[inline(always)]
    fn exp2(self) -> Self {
        math::exp2(self)
    }

    /// Like [`Vector::exp2`] for lanes from -[`NEAR`] to [`NEAR`]; other lanes are undefined. Faster where handling
    /// underflow and overflow takes extra instructions.
    #[inline(always)]
    fn exp2_near(self) -> Self {
        let n = self.round();
        math::exp2_fraction(self.sub(n)).scale(n)
    }

    /// e to the power of each lane.
    #[inline(always)]
    fn exp(self) -> Self {
        math::exp(self)
    }

    /// `ln(1 + self)` for lanes in [0, 1].
    #[inline(always)]
    fn ln_1p(self) -> Self {
        math::ln_1p(self)
    }

    /// The natural logarithm of each lane: see [`math::ln`] for its accuracy.
    #[inline(always)]
    fn ln(self) -> Self {
        math::ln(self)
    }

    /// The error function of each lane: see [`math::erf`] for its accuracy.
    #[inline(always)]
    fn erf(self) -> Self {
        math::erf(self)
    }

    /// A constant, rounded to the type.
    #[inline(always)]
    fn constant(value: f64) -> Self {
        Self::splat(Self::Element::from_f64(value))
    }

    /// All lanes zero.
    #[inline(always)]
    fn zero() -> Self {
        Self::constant(0.0)
    }

    /// The values of all lanes; those past `LANES` are zero.
    #[inline(always)]
    fn lanes(self) -> [Self::Element; MAX_LANES] {
        let mut lanes = [Self::Element::from_f64(0.0); MAX_LANES];
        self.store(&mut lanes);
        lanes
    }

    /// Like [`Vector::load`], but lanes past the end of the slice are zero.
    #[inline(always)]
    fn load_partial(values: &[Self::Element]) -> Self {
        if values.len() >= Self::LANES {
            return Self::load(values);
        }
        let mut lanes = [Self::Element::from_f64(0.0); MAX_LANES];
        lanes[..values.len()].copy_from_slice(values);
        Self::load(&lanes)
    }

    /// Like [`Vector::store`], but lanes past the end of the slice are dropped.
    #[inline(always)]
    fn store_partial(self, values: &mut [Self::Element]) {
        if values.len() >= Self::LANES {
            return self.store(values);
        }
        values.copy_from_slice(&self.lanes()[..values.len()]);
    }
}

/// Largest magnitude of an argument of [`Vector::exp2_near`].
pub const NEAR: f64 = 125.0;

/// The largest number of lanes of any vector.
pub const MAX_LANES: usize = 16;

/// Transposes a square of `V::LANES` vectors. Each round interleaves its two halves, as in a riffle shuffle,
/// which rotates the bits of an element's index by one.
#[inline(always)]
pub fn transpose<V: Vector>(square: &mut [V; MAX_LANES]) {
    unrolled!(round < 4, {
        if 1 << round < V::LANES {
            let (before, half) = (*square, V::LANES / 2);
            unrolled!(i < half, {
                // The compiler proves these indices in bounds, also in repetitions that are never reached.
                let (even, odd) = (2 * i % MAX_LANES, (2 * i + 1) % MAX_LANES);
                (square[even], square[odd]) = before[i].zip(before[(i + half) % MAX_LANES]);
            });
        }
    });
}

/// Runs `$body` for the elements of a row of `$count`, from `$at` to `$end`. First come `$first` elements, those before
/// the first aligned vector. Then each call covers a whole vector, whose length is known at compile time, and the last
/// call covers the rest.
macro_rules! each_vector {
    ($count:expr, |$at:ident, $end:ident| $body:block) => {{
        let mut $at = 0;
        $crate::cpu::each_vector!(@whole $at, $count, $end, $body);
        if $at < $count {
            let $end = $count;
            $body
        }
    }};
    (@whole $at:ident, $count:expr, $end:ident, $body:block) => {
        while $at + V::LANES <= $count {
            let $end = $at + V::LANES;
            $body
            $at = $end;
        }
    };
    ($first:expr, $count:expr, |$at:ident, $end:ident| $body:block) => {{
        let (mut $at, mut part) = (0, $first);
        // A loop, so that there is one copy of the code for fewer elements than a vector.
        loop {
            if $at < part {
                let $end = part;
                $body
                $at = $end;
            }
            $crate::cpu::each_vector!(@whole $at, $count, $end, $body);
            if $at >= $count {
                break;
            }
            part = $count;
        }
    }};
}
pub(crate) use each_vector;

/// Repeats a block for `$i` from 0 to `$limit`, which is at most 16. The compiler unrolls a loop only after it has
/// assigned registers, and only up to a size that some bodies exceed. Values that then get no register are stored in
/// every round.
macro_rules! unrolled {
    ($i:ident < $limit:tt, $body:block) => {
        $crate::cpu::unrolled!(@ $i $limit $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident $limit:tt $body:block $($index:literal)*) => {
        $(if $index < $limit {
            let $i: usize = $index;
            $body
        })*
    };
}
pub(crate) use unrolled;
