//! The step size of state-space scans, and its gradient:
//!
//! ```text
//! s = dt + dt_bias      delta = clamp(softplus(s))                      (bias, softplus and clamp are optional)
//!                       ddt = ddelta [lo <= softplus(s) <= hi] sigmoid(s)
//! ```
//!
//! The bounds of the clamp are rounded to the type of the arithmetic.

use crate::cpu::{Vector, math};
use crate::error::{Error, Kind, Result};
use crate::shared_options;
use crate::tensor::DType;
use serde::{Deserialize, Serialize};

/// The step size in CUDA, for kernels with the options `HAS_BIAS`, `SOFTPLUS` and `CLAMP`.
pub const STEP_SIZE: &str = include_str!("step_size.cu");

shared_options! {
    step {
        /// apply softplus to dt + dt_bias
        dt_softplus: bool = false;
        /// clamp dt to LO,HI, inclusive; no clamp by default
        dt_clamp: Option<(f64, f64)> = None;
    }
}

/// The gradient of the clamp of a step size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClampGrad {
    /// The derivative of the clamp: zero where the step size was outside of the bounds.
    #[default]
    Mask,
    /// The straight-through estimator: the gradient passes as if the step size had not been clamped.
    StraightThrough,
}

/// How `dt` becomes the step size.
#[derive(Clone, Copy, Debug)]
pub struct StepSize {
    /// Whether softplus is applied.
    pub softplus: bool,
    /// The lower and the upper bound, both inclusive.
    pub clamp: Option<(f64, f64)>,
    /// How the gradient treats a clamped step size.
    pub clamp_grad: ClampGrad,
}

impl StepSize {
    /// Checks that the lower bound is at most the upper one, and that neither is NaN.
    pub fn checked(self) -> Result<StepSize> {
        match self.clamp {
            Some((lo, hi)) if lo > hi || lo.is_nan() || hi.is_nan() => {
                Err(Error::new(Kind::Option, "dt_clamp").expected("a pair lo <= hi").got(format_args!("({lo}, {hi})")))
            }
            _ => Ok(self),
        }
    }

    /// The reference value of `delta` for `s`, with bounds rounded to the arithmetic of storage in `dtype`.
    pub fn reference(&self, s: f64, dtype: DType) -> f64 {
        let size = self.unclamped(s);
        let bound = |value: f64| match dtype {
            DType::F64 => value,
            _ => value as f32 as f64,
        };
        match self.clamp {
            // Not f64::clamp, which would turn a NaN bound into a panic; a NaN size stays NaN.
            Some((lo, _)) if size < bound(lo) => bound(lo),
            Some((_, hi)) if size > bound(hi) => bound(hi),
            _ => size,
        }
    }

    /// The reference derivative of `delta` by `s`.
    pub fn reference_slope(&self, s: f64, dtype: DType) -> f64 {
        let size = self.unclamped(s);
        // The bounds are inclusive, so a step size was clamped exactly if the clamp changed it.
        let clamped = self.clamp_grad == ClampGrad::Mask && self.reference(s, dtype) != size && !size.is_nan();
        match (clamped, self.softplus) {
            (true, _) => 0.0,
            (false, true) => 1.0 / (1.0 + (-s).exp()),
            (false, false) => 1.0,
        }
    }

    fn unclamped(&self, s: f64) -> f64 {
        if self.softplus { s.max(0.0) + (-s.abs()).exp().ln_1p() } else { s }
    }
}

/// [`StepSize`] on vectors.
#[derive(Clone, Copy)]
pub struct Lanes<V> {
    softplus: bool,
    clamp: Option<(V, V)>,
    masked: bool,
}

impl<V: Vector> Lanes<V> {
    /// Broadcasts the bounds to all lanes.
    #[inline(always)]
    pub fn new(of: &StepSize) -> Self {
        // Not `Option::map`, whose closure would be compiled without the level's instructions.
        let clamp = match of.clamp {
            Some((lo, hi)) => Some((V::constant(lo), V::constant(hi))),
            None => None,
        };
        Lanes { softplus: of.softplus, clamp, masked: of.clamp_grad == ClampGrad::Mask }
    }

    /// `delta` of `s`.
    #[inline(always)]
    pub fn delta(&self, s: V) -> V {
        self.clamped(self.unclamped(s))
    }

    /// `delta` of `s`, and its derivative by `s`.
    #[inline(always)]
    pub fn delta_and_slope(&self, s: V) -> (V, V) {
        let size = self.unclamped(s);
        let delta = self.clamped(size);
        let slope = if self.softplus { math::sigmoid(s) } else { V::constant(1.0) };
        let masked = self.masked && self.clamp.is_some();
        (delta, if masked { slope.where_equal(size, delta) } else { slope })
    }

    #[inline(always)]
    fn unclamped(&self, s: V) -> V {
        if self.softplus { math::softplus(s) } else { s }
    }

    #[inline(always)]
    fn clamped(&self, size: V) -> V {
        match self.clamp {
            Some((lo, hi)) => size.max(lo).min(hi),
            None => size,
        }
    }
}
