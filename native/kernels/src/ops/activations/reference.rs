//! The reference: f64, by the formulas.

use super::Activation;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The argument of the tanh form of GELU, and its derivative.
fn gelu_argument(x: f64) -> (f64, f64) {
    let c = (2.0 / PI).sqrt();
    (c * (x + 0.044715 * x * x * x), c * (1.0 + 3.0 * 0.044715 * x * x))
}

/// The value of a function.
pub fn value(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Sigmoid => sigmoid(x),
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => 0.5 * x * (1.0 + gelu_argument(x).0.tanh()),
        Activation::GeluErf => 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2),
        Activation::Softplus => (if x < 0.0 { 0.0 } else { x }) + (-x.abs()).exp().ln_1p(),
        Activation::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
    }
}

/// The derivative of a function.
pub fn slope(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Sigmoid => sigmoid(x) * sigmoid(-x),
        Activation::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        Activation::GeluTanh => {
            // Outside of this range the derivative is 0 or 1; clamping avoids 0 times infinity.
            let x = x.clamp(-30.0, 30.0);
            let (u, du) = gelu_argument(x);
            0.5 * (1.0 + u.tanh()) + 0.5 * x * (1.0 - u.tanh().powi(2)) * du
        }
        Activation::GeluErf => {
            let near = x.clamp(-40.0, 40.0);
            let density = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * near * near).exp();
            0.5 * libm::erfc(-x * FRAC_1_SQRT_2) + near * density
        }
        Activation::Softplus => sigmoid(x),
        Activation::Relu => {
            if x > 0.0 {
                1.0
            } else {
                0.0
            }
        }
    }
}
