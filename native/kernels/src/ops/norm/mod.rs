//! Normalisation of rows, over the last axis: root mean square (Zhang and Sennrich 2019) and layer
//! normalisation (Ba et al. 2016), the latter also fused with GELU.
//!
//! ```text
//! rms_norm         x^ = x r              r = 1 / sqrt(mean(x^2) + eps)        eps inside
//!                                        r = 1 / (sqrt(mean(x^2)) + eps)      eps outside
//! layer_norm       x^ = (x - mean(x)) r  r = 1 / sqrt(mean((x - mean(x))^2) + eps)
//! y = w x^ (+ b)
//! layer_norm_gelu  y = gelu(w x^ + b)
//! ```
//!
//! All three are one computation: `x^ = (x - mean) r`, `z = w x^ + b`, `y = f(z)`, where the root mean square has no
//! mean and no `b`, and `f` is GELU or the identity. Given `dy`, with `u = w dy f'(z)`:
//!
//! ```text
//! dx = r (u - mean(u) - t (x - mean) mean(u x^))       mean(u) only where there is a mean
//! dw = sum dy f'(z) x^        db = sum dy f'(z)        sums over all rows
//! ```
//!
//! where `t` is `r`; with eps outside it is `1 / sqrt(mean(x^2))`, or 0 where that is infinite. Storage is f32, f64,
//! bf16 or f16; `w`, `b`, `mean`, `rstd` and the arithmetic are f32 (f64 for f64), and results are rounded once.
//! Squares are scaled by a power of two near `1 / sqrt(D)`, so that numbers up to 1e18 do not overflow f32. The order
//! of all sums depends on the sizes alone (on a GPU, also on the GPU).

pub mod add;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub mod gated;
mod reference;

use crate::base::activation::Activation;
use crate::error::Result;
use crate::op::{self, Backward, Bound, Differentiable, Op, Output, Slot};
use crate::tensor::Spec;
use crate::{options, shared_options};
use serde::{Deserialize, Serialize};

/// Where `eps` is added in the root mean square.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EpsMode {
    /// Under the root.
    #[default]
    Inside,
    /// To the root.
    Outside,
}

options! {
    /// The options of the root mean square.
    pub struct RmsOptions {
        /// epsilon of the norm
        eps: f64 = 1e-6, not_negative;
        /// add eps inside or outside the square root
        eps_mode: EpsMode = EpsMode::Inside;
    }
}

shared_options! {
    layer {
        /// epsilon of the norm
        eps: f64 = 1e-5, not_negative;
    }
}

options! {
    /// The options of layer normalisation.
    pub struct LayerOptions {
        ..layer;
    }
}

/// The forms of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gelu {
    /// By tanh.
    #[default]
    Tanh,
    /// By erf.
    Erf,
}

impl From<Gelu> for Activation {
    fn from(gelu: Gelu) -> Activation {
        match gelu {
            Gelu::Tanh => Activation::GeluTanh,
            Gelu::Erf => Activation::GeluErf,
        }
    }
}

options! {
    /// The options of layer normalisation with GELU.
    pub struct LayerGeluOptions {
        ..layer;
        /// GELU's form: exact or with tanh
        gelu: Gelu = Gelu::Tanh;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// How many rows `x` has: all its axes but the last.
    pub rows: usize,
    /// The length of a row, `D` in the shapes.
    pub columns: usize,
    /// Whether the mean is subtracted.
    pub centered: bool,
    /// The epsilon that is added to the divisor.
    pub eps: f64,
    /// Where `eps` is added.
    pub eps_mode: EpsMode,
    /// The activation applied to the result.
    pub activation: Option<Activation>,
}

impl Problem {
    fn new<O: Op>(call: &Bound<O>, eps: f64) -> Result<Problem> {
        Ok(Problem {
            x: *call.inputs.get("x")?,
            rows: call.sizes.rows().iter().product(),
            columns: call.sizes.of('D'),
            centered: false,
            eps,
            eps_mode: EpsMode::Inside,
            activation: None,
        })
    }
}

/// The scale of numbers before they are squared, a power of two near `1 / sqrt(D)`, and the factor that makes a sum of
/// such squares the mean square, for rows of `columns` numbers.
pub(crate) fn scales(columns: usize) -> (f64, f64) {
    let columns = columns.max(1) as f64;
    let scale = (-0.5 * columns.log2()).round().exp2();
    (scale, 1.0 / (columns * scale * scale))
}

/// The hint in errors about shapes.
pub(crate) const HINT: &str = "Rows are normalised over the last axis of x";

/// Implements [`Differentiable`] for a norm.
macro_rules! norm {
    ($op:ident, $backward:literal, $given:expr) => {
        impl Differentiable for $op {
            const BACKWARD: &'static str = $backward;
            const GIVEN: &'static [Slot] = &op::given(Self::INPUTS, Self::OUTPUTS, $given);

            crate::backward_by_kernels!();
        }
    };
}

/// The items of [`Op`] that all norms share.
macro_rules! forward {
    () => {
        const HINT: &'static str = HINT;
        const COTANGENTS: &'static [&'static str] = &["dy"];

        type Problem = Problem;

        crate::forward_by_kernels!();
    };
}

/// The normalised rows.
const Y: Output = Output::new("y", "(..., D)");

/// Root mean square normalisation.
pub struct RmsNorm;

impl Op for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const ABOUT: &'static str = "Root mean square normalisation of rows";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., D)"), Slot::new("w", "(D)").wide()];
    const OUTPUTS: &'static [Output] = &[Y];
    type Options = RmsOptions;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Ok(Problem { eps_mode: call.options.eps_mode, ..Problem::new(call, call.options.eps)? })
    }

    forward!();
}

/// The gradient of [`RmsNorm`].
pub type RmsNormBackward = Backward<RmsNorm>;

norm!(RmsNorm, "rms_norm_backward", ["x", "w", "dy"]);

/// The inputs of layer normalisation.
const LAYER: &[Slot] = &[Slot::new("x", "(..., D)"), Slot::new("w", "(D)").wide(), Slot::new("b", "(D)").wide()];

/// Layer normalisation.
pub struct LayerNorm;

impl Op for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const ABOUT: &'static str = "Layer normalisation of rows";
    const INPUTS: &'static [Slot] = LAYER;
    const OUTPUTS: &'static [Output] = &[Y, Output::new("mean", "(...)").wide(), Output::new("rstd", "(...)").wide()];
    type Options = LayerOptions;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        Ok(Problem { centered: true, ..Problem::new(call, call.options.eps)? })
    }

    forward!();
}

/// The gradient of [`LayerNorm`].
pub type LayerNormBackward = Backward<LayerNorm>;

norm!(LayerNorm, "layer_norm_backward", ["x", "w", "b", "dy"]);

/// Layer normalisation fused with GELU, in one pass over memory.
pub struct LayerNormGelu;

impl Op for LayerNormGelu {
    const NAME: &'static str = "layer_norm_gelu";
    const ABOUT: &'static str = "Layer normalisation of rows, then GELU";
    const INPUTS: &'static [Slot] = LAYER;
    const OUTPUTS: &'static [Output] = &[Y];
    type Options = LayerGeluOptions;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let activation = Some(call.options.gelu.into());
        Ok(Problem { centered: true, activation, ..Problem::new(call, call.options.eps)? })
    }

    forward!();
}

/// The gradient of [`LayerNormGelu`].
pub type LayerNormGeluBackward = Backward<LayerNormGelu>;

norm!(LayerNormGelu, "layer_norm_gelu_backward", ["x", "w", "b", "dy"]);
