//! Functions over [`Vector`]s of f32, by polynomials. Vectors of f64 have implementations of their own.
//!
//! `tests/cpu/vectors.rs` finds the largest errors over all or a dense part of the f32 range. Each function states its
//! error in units in the last place (ULP).

use super::vector::Vector;

/// `2^f` on [-1/2, 1/2]: minimax in relative error with `P(0) = 1`, so that a decay close to 1 keeps its distance
/// from 1.
const EXP2: [f64; 6] =
    [1.0, 0.693146977598992, 0.2402224208537671, 0.05550733743470084, 0.009671512639956442, 0.0013264727140072407];

/// `e^v` on [-ln 2 / 2, ln 2 / 2], with `P(0) = P'(0) = 1`.
const EXP: [f64; 7] = [
    1.0,
    1.0,
    0.49999993451708435,
    0.1666652068983302,
    0.0416683873612611,
    0.008368709824171124,
    0.0013814613260782068,
];

/// ln 2 in two parts. The first has few digits, so its product with a whole number is exact.
const LN2: [f64; 2] = [0.693145751953125, 1.428_606_820_309_417_2e-6];

/// `2 atanh(s) / s` on [0, 1/3], in powers of `s^2`.
const ATANH: [f64; 5] =
    [2.000000007921047, 0.6666631468190275, 0.4002491028546024, 0.27960602708820476, 0.2817833510482286];

/// `erf(v) / v` on [-`ERF_END`, `ERF_END`] as a quotient, both in powers of `v^2`; minimax in relative
/// error.
const ERF: [[f64; 6]; 2] = [
    [
        1.1283791457474208,
        0.19059499002105387,
        0.05276947224706461,
        0.0037726058012475697,
        0.00028484520780789707,
        2.0460233256810803e-06,
    ],
    [1.0, 0.5022431422591864, 0.11418324146236201, 0.014983309409397697, 0.0011638720554498674, 3.8047820724376586e-05],
];

/// Beyond this, `erf` is 1 in f32.
const ERF_END: f64 = 3.925;

#[inline(always)]
fn polynomial<V: Vector>(x: V, coefficients: &[f64]) -> V {
    let mut i = coefficients.len() - 1;
    let mut sum = V::constant(coefficients[i]);
    while i > 0 {
        i -= 1;
        sum = sum.mul_add(x, V::constant(coefficients[i]));
    }
    sum
}

/// `2^f` for f in [-1/2, 1/2].
#[inline(always)]
pub fn exp2_fraction<V: Vector>(f: V) -> V {
    polynomial(f, &EXP2)
}

/// `2^p`, within 2.25 ULP for p from -125.5 to 128. Exactly 1 at 0, infinity from 128 on, 0 where p
/// rounds to `V::LOWEST` or less: at -125.5 already, except on AVX-512, which keeps subnormal results.
/// NaN stays NaN.
#[inline(always)]
pub fn exp2<V: Vector>(p: V) -> V {
    // The bounds keep infinities out of `p - n`, where they would become NaN.
    let p = p.max(V::constant(V::LOWEST)).min(V::constant(128.5));
    let n = p.round();
    exp2_fraction(p.sub(n)).scale(n)
}

/// `e^v`, within 1.25 ULP for v from -86.9 to 88.7; the ends are those of [`exp2`].
#[inline(always)]
pub fn exp<V: Vector>(v: V) -> V {
    let v = v.max(V::constant(V::LOWEST * std::f64::consts::LN_2)).min(V::constant(89.1));
    let n = v.mul(V::constant(std::f64::consts::LOG2_E)).round();
    let rest = n.mul_add(V::constant(-LN2[0]), v);
    let rest = n.mul_add(V::constant(-LN2[1]), rest);
    polynomial(rest, &EXP).scale(n)
}

/// `ln(1 + v)` for v in [0, 1], within 2.75 ULP.
#[inline(always)]
pub fn ln_1p<V: Vector>(v: V) -> V {
    // With s = v / (2 + v): ln(1 + v) = 2 atanh(s), an odd series in s, exact near 0.
    let s = v.div(v.add(V::constant(2.0)));
    let series = polynomial(s.mul(s), &ATANH);
    s.mul(series)
}

/// `ln(v)`, within 2.75 ULP, near 1 too. Minus infinity at 0, NaN below, infinity at infinity; NaN stays NaN.
#[inline(always)]
pub fn ln<V: Vector>(v: V) -> V {
    // Subnormal numbers have no exponent of their own, so they are scaled up by 2^24 first.
    let (normal, up) = (V::constant(f32::MIN_POSITIVE as f64), V::constant((1 << 24) as f64));
    let (m, n) = v.mul(up).where_less(v, normal, v).split();
    let n = n.sub(V::constant(24.0)).where_less(v, normal, n);
    // m - 1 is exact. With s = (m - 1) / (m + 1): ln(m) = 2 atanh(s), an odd series in s.
    let s = m.sub(V::constant(1.0)).div(m.add(V::constant(1.0)));
    let near = s.mul(polynomial(s.mul(s), &ATANH));
    let ln = n.mul_add(V::constant(LN2[0]), n.mul_add(V::constant(LN2[1]), near));
    let infinity = V::constant(f64::INFINITY);
    let not_positive = V::constant(f64::NAN).where_less(v, V::zero(), v.sub(infinity));
    ln.where_less(v, infinity, v).where_less(V::zero(), v, not_positive)
}

/// `max(v, 0) + ln(1 + exp(-|v|))`, within 3.75 ULP.
#[inline(always)]
pub fn softplus<V: Vector>(v: V) -> V {
    let tail = V::zero().sub(v.abs()).exp().ln_1p();
    v.max(V::zero()).add(tail)
}

/// `1 / (1 + exp(-v))`, within 2.5 ULP.
#[inline(always)]
pub fn sigmoid<V: Vector>(v: V) -> V {
    let one = V::constant(1.0);
    one.div(one.add(V::zero().sub(v).exp()))
}

/// `erf(v)`, within 4e-7 of the true value, and never beyond 1 by more than that.
#[inline(always)]
pub fn erf<V: Vector>(v: V) -> V {
    let v = v.max(V::constant(-ERF_END)).min(V::constant(ERF_END));
    let square = v.mul(v);
    v.mul(polynomial(square, &ERF[0])).div(polynomial(square, &ERF[1]))
}

/// `v * sigmoid(v)`.
#[inline(always)]
pub fn silu<V: Vector>(v: V) -> V {
    v.mul(sigmoid(v))
}

/// The derivative of [`silu`]: `sigmoid(v) * (1 + v * (1 - sigmoid(v)))`.
#[inline(always)]
pub fn silu_slope<V: Vector>(v: V) -> V {
    let s = sigmoid(v);
    s.mul(v.mul_add(V::constant(1.0).sub(s), V::constant(1.0)))
}

/// `sqrt(2 / pi)`.
const SQRT_2_BY_PI: f64 = 0.797_884_560_802_865_4;
/// The cubic term of the tanh form of GELU.
const CUBIC: f64 = 0.044715;

/// `v (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (v + 0.044715 v^3)`. The tanh is a sigmoid, so this is
/// `v / (1 + exp(-2 u))`. The exponential is a power of 2, whose factor log2(e) is folded into the constants.
#[inline(always)]
pub fn gelu_tanh<V: Vector>(v: V) -> V {
    const LINEAR: f64 = -2.0 * SQRT_2_BY_PI * std::f64::consts::LOG2_E;
    let power = v.mul(v).mul_add(V::constant(LINEAR * CUBIC), V::constant(LINEAR)).mul(v).exp2();
    v.div(power.add(V::constant(1.0)))
}

/// The argument `2 u` of the sigmoid.
#[inline(always)]
fn twice_gelu_argument<V: Vector>(v: V) -> V {
    let cubic = v.mul(v).mul_add(V::constant(2.0 * SQRT_2_BY_PI * CUBIC), V::constant(2.0 * SQRT_2_BY_PI));
    v.mul(cubic)
}

/// The derivative of [`gelu_tanh`]: with `s = sigmoid(2 u)`, `s + v s (1 - s) 2 u'`.
#[inline(always)]
pub fn gelu_tanh_slope<V: Vector>(v: V) -> V {
    // Beyond 10 the slope is 0 or 1, and within, `exp(-2 u)` is finite.
    let v = v.max(V::constant(-10.0)).min(V::constant(10.0));
    let one = V::constant(1.0);
    let e = V::zero().sub(twice_gelu_argument(v)).exp();
    let s = one.div(one.add(e));
    let twice_slope = v.mul(v).mul_add(V::constant(6.0 * SQRT_2_BY_PI * CUBIC), V::constant(2.0 * SQRT_2_BY_PI));
    // 1 - s without cancellation.
    let rest = e.mul(s);
    s.mul(v.mul(twice_slope)).mul_add(rest, s)
}

/// `v (1 + erf(v / sqrt(2))) / 2`.
#[inline(always)]
pub fn gelu_erf<V: Vector>(v: V) -> V {
    v.mul(normal(v))
}

/// The normal distribution: `(1 + erf(v / sqrt(2))) / 2`.
#[inline(always)]
fn normal<V: Vector>(v: V) -> V {
    let half = V::constant(0.5);
    v.mul(V::constant(std::f64::consts::FRAC_1_SQRT_2)).erf().mul_add(half, half)
}

/// The derivative of [`gelu_erf`]: the normal distribution and `v` times its density.
#[inline(always)]
pub fn gelu_erf_slope<V: Vector>(v: V) -> V {
    // Beyond 40 the density is 0, and 0 times infinity would be NaN.
    let near = v.max(V::constant(-40.0)).min(V::constant(40.0));
    let density = near.mul(near).mul(V::constant(-0.5)).exp().mul(V::constant(0.5 * SQRT_2_BY_PI));
    near.mul_add(density, normal(v))
}

/// The derivative of [`sigmoid`].
#[inline(always)]
pub fn sigmoid_slope<V: Vector>(v: V) -> V {
    // The slope is even, and the exponential of a number up to 0 is finite.
    let e = V::zero().sub(v.abs()).exp();
    let s = V::constant(1.0).div(V::constant(1.0).add(e));
    e.mul(s).mul(s)
}

/// `max(v, 0)`; NaN stays NaN.
#[inline(always)]
pub fn relu<V: Vector>(v: V) -> V {
    v.max(V::zero())
}

/// 1 for `v > 0`, else 0.
#[inline(always)]
pub fn relu_slope<V: Vector>(v: V) -> V {
    let one = V::constant(1.0);
    one.sub(one.where_equal(relu(v), V::zero()))
}
