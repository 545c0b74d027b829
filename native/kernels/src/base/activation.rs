//! Activation functions by their names; [`activations`](crate::ops::activations) has the formulas.

use serde::{Deserialize, Serialize};

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x sigmoid(x)`.
    Silu,
    /// GELU by tanh, for which `gelu` is an alias.
    #[serde(alias = "gelu")]
    GeluTanh,
    /// GELU by erf.
    GeluErf,
    /// `ln(1 + exp(x))`.
    Softplus,
    /// `max(x, 0)`.
    Relu,
}

impl Activation {
    /// All functions.
    pub const ALL: [Activation; 6] = [
        Activation::Sigmoid,
        Activation::Silu,
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::Softplus,
        Activation::Relu,
    ];
}

/// The names of all functions, for the documentation of options.
pub const NAMES: &str = "sigmoid, silu, gelu_tanh (or gelu), gelu_erf, softplus or relu";
