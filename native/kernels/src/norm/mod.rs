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
//! They are one computation: `x^ = (x - mean) r`, `z = w x^ + b`, `y = f(z)`, where the root mean square has
//! no mean and no `b`, and only GELU is an `f`. Given `dy`, with `u = w dy f'(z)`:
//!
//! ```text
//! dx = r (u - mean(u) - t (x - mean) mean(u x^))       mean(u) only where there is a mean
//! dw = sum dy f'(z) x^        db = sum dy f'(z)        sums over all rows
//! ```
//!
//! where `t` is `r`, but with eps outside `1 / sqrt(mean(x^2))`, or 0 where that is infinite. Storage is
//! f32, f64, bf16 or f16; `w`, `b`, `mean`, `rstd` and the arithmetic are f32 (f64 for f64), and results are
//! rounded once. Squares are scaled by a power of two near `1 / sqrt(D)`, so that numbers up to 1e18 do not
//! overflow f32. All sums are done in an order that depends on the sizes alone (on a GPU, on it too).

pub mod add;
mod cpu;
mod cuda;
mod reference;

use crate::activations::Activation;
use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{Shape, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// Where `eps` goes in the root mean square.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpsMode {
    /// Under the root.
    #[default]
    Inside,
    /// Beside the root.
    Outside,
}

/// The options of the root mean square.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsOptions {
    /// What keeps the divisor from 0.
    pub eps: f64,
    /// Where it goes.
    pub eps_mode: EpsMode,
}

impl Default for RmsOptions {
    fn default() -> Self {
        RmsOptions { eps: 1e-6, eps_mode: EpsMode::Inside }
    }
}

/// The options of layer normalisation.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerOptions {
    /// What keeps the divisor from 0.
    pub eps: f64,
}

impl Default for LayerOptions {
    fn default() -> Self {
        LayerOptions { eps: 1e-5 }
    }
}

/// The forms of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
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

/// The options of layer normalisation with GELU.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerGeluOptions {
    /// What keeps the divisor from 0.
    pub eps: f64,
    /// Which GELU.
    pub gelu: Gelu,
}

impl Default for LayerGeluOptions {
    fn default() -> Self {
        LayerGeluOptions { eps: 1e-5, gelu: Gelu::Tanh }
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Type and shape of `x`.
    pub x: Spec,
    /// How many rows `x` has: all its axes but the last.
    pub rows: usize,
    /// How long they are, `D` in the shapes.
    pub columns: usize,
    /// Whether the mean is taken away.
    pub centered: bool,
    /// What keeps the divisor from 0.
    pub eps: f64,
    /// Where it goes.
    pub eps_mode: EpsMode,
    /// The activation applied to the result.
    pub activation: Option<Activation>,
    /// Whether `mean` and `rstd` are outputs.
    pub statistics: bool,
}

impl Problem {
    fn new(inputs: &Named<Spec>, eps: f64) -> Result<Problem> {
        let x = *inputs.get("x")?;
        let Some((&columns, rows)) = x.shape.split_last() else {
            return Err(op::wrong_shape("x", "(..., D)", &x).hint("The last axis is the one to normalise over"));
        };
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(Error::new(Kind::Option, "eps").expected("a finite number, not negative").got(eps));
        }
        for name in ["w", "b"] {
            op::same_shape(inputs, name, &[columns])
                .map_err(|e| e.hint("It has one value for each element of the last axis of x"))?;
        }
        Ok(Problem {
            x,
            rows: rows.iter().product(),
            columns,
            centered: false,
            eps,
            eps_mode: EpsMode::Inside,
            activation: None,
            statistics: false,
        })
    }

    fn layer(inputs: &Named<Spec>, eps: f64) -> Result<Problem> {
        Ok(Problem { centered: true, ..Problem::new(inputs, eps)? })
    }

    fn outputs(&self) -> Result<Named<Spec>> {
        let mut outputs = Named::default();
        outputs.push("y", self.x);
        if self.statistics {
            let rows = &self.x.shape[..self.x.shape.len() - 1];
            let statistic = Spec { dtype: self.x.dtype.wide(), shape: Shape::new(rows)? };
            outputs.push("mean", statistic);
            outputs.push("rstd", statistic);
        }
        Ok(outputs)
    }

    /// A power of two near `1 / sqrt(D)`, and what makes a sum of squares of numbers times it a mean.
    fn scales(&self) -> (f64, f64) {
        let scale = (-0.5 * (self.columns.max(1) as f64).log2()).round().exp2();
        (scale, 1.0 / (self.columns.max(1) as f64 * scale * scale))
    }
}

/// What all three do where they run.
macro_rules! norm {
    ($op:ident, $backward:literal, $given:expr) => {
        impl Differentiable for $op {
            const BACKWARD: &'static str = $backward;
            const GIVEN: &'static [Slot] = $given;

            fn cpu_backward(
                call: &Gradient<Problem>,
                inputs: &Named<View>,
                outputs: Named<ViewMut>,
                exec: &crate::cpu::Exec,
            ) -> Result<()> {
                cpu::backward(&call.of, inputs, outputs, exec)
            }

            fn reference_backward(call: &Gradient<Problem>, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
                reference::backward(&call.of, inputs)
            }

            fn cuda_backward(
                call: &Gradient<Problem>,
                inputs: &Named<&Buffer>,
                outputs: &Named<&Buffer>,
                lane: &Lane,
            ) -> Result<()> {
                cuda::backward(&call.of, inputs, outputs, lane)
            }
        }
    };
}

/// The part of [`Op`] that is the same in all three.
macro_rules! forward {
    () => {
        const COTANGENTS: &'static [&'static str] = &["dy"];

        type Problem = Problem;

        fn outputs(problem: &Problem) -> Result<Named<Spec>> {
            problem.outputs()
        }

        fn cpu(
            problem: &Problem,
            inputs: &Named<View>,
            outputs: Named<ViewMut>,
            exec: &crate::cpu::Exec,
        ) -> Result<()> {
            cpu::forward(problem, inputs, outputs, exec)
        }

        fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
            reference::forward(problem, inputs)
        }

        fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
            cuda::forward(problem, inputs, outputs, lane)
        }
    };
}

/// Root mean square normalisation.
pub struct RmsNorm;

impl Op for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const ABOUT: &'static str = "Root mean square normalisation of rows";
    const INPUTS: &'static [Slot] = &[Slot::new("x", "(..., D)"), Slot::new("w", "(D)").wide()];
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "eps", takes: "float", help: "what keeps the divisor from 0; 1e-6 by default" },
        OptionDoc { name: "eps_mode", takes: "text", help: "inside (the root), the default, or outside" },
    ];
    type Options = RmsOptions;

    fn check(inputs: &Named<Spec>, options: &RmsOptions) -> Result<Problem> {
        Ok(Problem { eps_mode: options.eps_mode, ..Problem::new(inputs, options.eps)? })
    }

    forward!();
}

/// The gradient of [`RmsNorm`].
pub type RmsNormBackward = Backward<RmsNorm>;

norm!(RmsNorm, "rms_norm_backward", &op::slots::<3>(RmsNorm::INPUTS, &[Slot::new("dy", "(..., D)")]));

/// The inputs of layer normalisation.
const LAYER: &[Slot] = &[Slot::new("x", "(..., D)"), Slot::new("w", "(D)").wide(), Slot::new("b", "(D)").wide()];

/// Layer normalisation.
pub struct LayerNorm;

impl Op for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const ABOUT: &'static str = "Layer normalisation of rows";
    const INPUTS: &'static [Slot] = LAYER;
    const OPTIONS: &'static [OptionDoc] =
        &[OptionDoc { name: "eps", takes: "float", help: "what keeps the divisor from 0; 1e-5 by default" }];
    type Options = LayerOptions;

    fn check(inputs: &Named<Spec>, options: &LayerOptions) -> Result<Problem> {
        Ok(Problem { statistics: true, ..Problem::layer(inputs, options.eps)? })
    }

    forward!();
}

/// The gradient of [`LayerNorm`].
pub type LayerNormBackward = Backward<LayerNorm>;

norm!(LayerNorm, "layer_norm_backward", &op::slots::<4>(LAYER, &[Slot::new("dy", "(..., D)")]));

/// Layer normalisation fused with GELU, in one pass over memory.
pub struct LayerNormGelu;

impl Op for LayerNormGelu {
    const NAME: &'static str = "layer_norm_gelu";
    const ABOUT: &'static str = "Layer normalisation of rows, then GELU";
    const INPUTS: &'static [Slot] = LAYER;
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "eps", takes: "float", help: "what keeps the divisor from 0; 1e-5 by default" },
        OptionDoc { name: "gelu", takes: "text", help: "tanh, the default, or erf" },
    ];
    type Options = LayerGeluOptions;

    fn check(inputs: &Named<Spec>, options: &LayerGeluOptions) -> Result<Problem> {
        Ok(Problem { activation: Some(options.gelu.into()), ..Problem::layer(inputs, options.eps)? })
    }

    forward!();
}

/// The gradient of [`LayerNormGelu`].
pub type LayerNormGeluBackward = Backward<LayerNormGelu>;

norm!(LayerNormGelu, "layer_norm_gelu_backward", &op::slots::<4>(LAYER, &[Slot::new("dy", "(..., D)")]));
