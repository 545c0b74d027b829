//! Elementwise operations by their names.

use super::activation::Activation;

/// Elementwise operations on tensors that are steps of ops, but no ops of their own. Each names its inputs in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    /// `-exp(v)` of `v`.
    NegExp,
    /// `a b` of `a` and `b`.
    Product,
    /// The sum of one to four tensors, rounded once; a copy of a single one.
    Sum,
    /// `factor v` of `v`.
    Scaled(f64),
    /// The sum of two to four tensors, the last multiplied by the factor.
    PlusScaled(f64),
    /// `f(v)` of `v`.
    Activate(Activation),
    /// `f'(v)` of `v`.
    Slope(Activation),
    /// `f'(v) dy` of `v` and `dy`.
    SlopeTimes(Activation),
    /// `f(v) by` of `v` and `by`.
    Gate(Activation),
    /// `f'(v) by dy` of `v`, `by` and `dy`.
    GateSlope(Activation),
    /// `s(a)` of `a`, or `s(a) s(c)` of `a` and `c`, with the logistic function s, clamped to [`DECAY_ENDS`].
    Decay,
    /// The gradient of [`Map::Decay`] with respect to `a`, from `a`, an optional `c`, and the cotangent.
    DecaySlope,
    /// `g z + (1 - g) h + gamma h` of `z`, `h`, `g` and `gamma`.
    Integrate,
    /// `(1 - g + gamma) dh` of `g`, `gamma` and `dh`.
    Carry,
    /// `(a - b) c` of `a`, `b` and `c`.
    DifferenceTimes,
}

impl Map {
    /// The factor of [`Map::Scaled`] and [`Map::PlusScaled`].
    pub fn factor(self) -> f64 {
        match self {
            Map::Scaled(factor) | Map::PlusScaled(factor) => factor,
            _ => 0.0,
        }
    }
}

/// The bounds of decay coefficients; outside of them the gradient is 0.
pub const DECAY_ENDS: [f64; 2] = [1e-6, 1.0 - 1e-6];
