//! Elementwise operations by their names.

use super::activation::Activation;

/// Element-wise operations on tensors that are no ops of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    /// `-exp(v)` of one tensor.
    NegExp,
    /// The product of two.
    Product,
    /// The sum of one, which is a copy, to four; rounded once.
    Sum,
    /// One by a factor.
    Scaled(f64),
    /// The sum of two to four, with a factor for the last.
    PlusScaled(f64),
    /// `f(v)` of one.
    Activate(Activation),
    /// `f'(v)` of one.
    Slope(Activation),
    /// `f'(v) dy` of `v` and `dy`.
    SlopeTimes(Activation),
    /// `f(v) by` of `v` and `by`.
    Gate(Activation),
    /// `f'(v) by dy` of `v`, `by` and `dy`.
    GateSlope(Activation),
    /// `s(a)` of one, or `s(a) s(c)` of two, with the logistic function s, within [`DECAY_ENDS`].
    Decay,
    /// The gradient of that with respect to `a`, from `a`, an optional `c`, and the cotangent.
    DecaySlope,
    /// `g z + (1 - g) h + gamma h` of `z`, `h`, `g` and `gamma`.
    Integrate,
    /// `(1 - g + gamma) dh` of `g`, `gamma` and `dh`.
    Carry,
    /// `(a - b) c` of three.
    DifferenceTimes,
}

impl Map {
    /// The factor, of those that have one.
    pub fn factor(self) -> f64 {
        match self {
            Map::Scaled(factor) | Map::PlusScaled(factor) => factor,
            _ => 0.0,
        }
    }
}

/// The bounds of coefficients of decay; the gradient is 0 outside of them.
pub const DECAY_ENDS: [f64; 2] = [1e-6, 1.0 - 1e-6];
