//! The Mamba block (Gu and Dao 2023, section 3.4), its gradient, and by L = 1 its step of one token.
//!
//! With `linear(v, M) = v M^T`, and weights stored (out, in):
//!
//! ```text
//! [u | z] = linear(x, in_proj) + in_proj_b
//! c, conv_state = causal_conv1d(u, conv_w, conv_b, silu, conv_state)
//! [delta | B | C] = linear(c, x_proj)                    of widths R, N, N
//! dt = linear(delta, dt_w)                               its bias dt_b goes into the scan
//! A = -exp(A_log)
//! s, ssm_state = selective_scan(c, dt, A, B, C, D, z, dt_b, softplus, ssm_state)
//! y = linear(s, out_proj) + out_proj_b
//! ```
//!
//! There is no normalisation and no residual. The gradient recomputes the intermediate tensors, and then goes
//! through the gradients of these steps in reverse; `dA_log = dA A`. Every backend runs one sequence of ops
//! (`steps.rs`). Intermediate tensors other than `A` and the states of the scan have the storage type: with 16-bit
//! storage they are rounded after each step.

pub(crate) mod steps;

use crate::cuda::{Buffer, Lane};
use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Differentiable, Gradient, Named, Op, OptionDoc, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;
use serde::Deserialize;

/// The options of the block. All sizes follow from shapes; those that are given must agree with them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Inner width by model width.
    pub expand: Option<usize>,
    /// States per channel.
    pub d_state: Option<usize>,
    /// Columns of `dt_w`.
    pub dt_rank: Option<usize>,
    /// Width of the convolution.
    pub d_conv: Option<usize>,
    /// Write `conv_state` and `ssm_state`.
    pub return_state: bool,
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Width of the model, `M`.
    pub model: usize,
    /// Inner width, `D`.
    pub inner: usize,
    /// States per channel, `N`.
    pub state: usize,
    /// Columns of `dt_w`, `R`.
    pub rank: usize,
    /// Width of the convolution, `W`.
    pub width: usize,
    /// The storage type.
    pub dtype: DType,
    /// Whether the states are wanted.
    pub return_state: bool,
}

impl Problem {
    fn new(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        let x = inputs.get("x")?;
        let &[batch, length, model] = &x.shape[..] else {
            return Err(op::wrong_shape("x", "(B, L, M)", x));
        };
        let [inner, state] = matrix(inputs, "A_log", "(D, N)")?;
        let [_, rank] = matrix(inputs, "dt_w", "(D, R)")?;
        let [_, width] = matrix(inputs, "conv_w", "(D, W)")?;
        if width == 0 {
            return Err(op::wrong_shape("conv_w", "(D, W) with W of at least 1", inputs.get("conv_w")?));
        }
        for (name, dims) in [
            ("in_proj", &[2 * inner, model][..]),
            ("conv_w", &[inner, width]),
            ("conv_b", &[inner]),
            ("x_proj", &[rank + 2 * state, inner]),
            ("dt_w", &[inner, rank]),
            ("dt_b", &[inner]),
            ("D", &[inner]),
            ("out_proj", &[model, inner]),
            ("in_proj_b", &[2 * inner]),
            ("out_proj_b", &[model]),
            ("conv_state", &[batch, width - 1, inner]),
            ("ssm_state", &[batch, inner, state]),
            ("dconv_state", &[batch, width - 1, inner]),
            ("dssm_state", &[batch, inner, state]),
        ] {
            op::same_shape(inputs, name, dims)?;
        }
        for (name, given, found) in [
            ("d_state", options.d_state, state),
            ("dt_rank", options.dt_rank, rank),
            ("d_conv", options.d_conv, width),
            ("expand", options.expand.map(|expand| expand.saturating_mul(model)), inner),
        ] {
            agree(name, given, found)?;
        }
        let return_state = options.return_state;
        Ok(Problem { batch, length, model, inner, state, rank, width, dtype: x.dtype, return_state })
    }

    /// The problem in f64 with every output, for the reference.
    fn in_f64(self) -> Problem {
        Problem { dtype: DType::F64, return_state: true, ..self }
    }
}

fn matrix(inputs: &Named<Spec>, name: &str, expected: &str) -> Result<[usize; 2]> {
    let spec = inputs.get(name)?;
    spec.shape[..].try_into().map_err(|_| op::wrong_shape(name, expected, spec))
}

fn agree(name: &str, given: Option<usize>, found: usize) -> Result<()> {
    match given {
        Some(given) if given != found => Err(Error::new(Kind::Option, name)
            .expected(format_args!("what the shapes of the weights say, which comes to {found}"))
            .got(given)
            .hint("Leave it out: all sizes follow from the weights")),
        _ => Ok(()),
    }
}

/// The block.
pub struct MambaBlock;

impl Op for MambaBlock {
    const NAME: &'static str = "mamba_block";
    const ABOUT: &'static str = "Mamba block: projections, convolution and scan";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, L, M)"),
        Slot::new("in_proj", "(2D, M)"),
        Slot::new("conv_w", "(D, W)").wide(),
        Slot::new("conv_b", "(D)").wide().optional(),
        Slot::new("x_proj", "(R+2N, D)"),
        Slot::new("dt_w", "(D, R)"),
        Slot::new("dt_b", "(D)").wide(),
        Slot::new("A_log", "(D, N)").wide(),
        Slot::new("D", "(D)").wide(),
        Slot::new("out_proj", "(M, D)"),
        Slot::new("in_proj_b", "(2D)").optional(),
        Slot::new("out_proj_b", "(M)").optional(),
        Slot::new("conv_state", "(B, W-1, D)").optional(),
        Slot::new("ssm_state", "(B, D, N)").wide().optional(),
    ];
    const OPTIONS: &'static [OptionDoc] = &[
        OptionDoc { name: "expand", takes: "integer", help: "inner width by model width; if given, it must agree" },
        OptionDoc { name: "d_state", takes: "integer", help: "states per channel; if given, it must agree" },
        OptionDoc { name: "dt_rank", takes: "integer", help: "columns of dt_w; if given, it must agree" },
        OptionDoc { name: "d_conv", takes: "integer", help: "width of the convolution; if given, it must agree" },
        OptionDoc { name: "return_state", takes: "flag", help: "write conv_state (B, W-1, D) and ssm_state (B, D, N)" },
    ];
    const COTANGENTS: &'static [&'static str] = &["dy", "dconv_state", "dssm_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(inputs: &Named<Spec>, options: &Options) -> Result<Problem> {
        Problem::new(inputs, options)
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        let each = op::elements(inputs, &["in_proj", "conv_w", "x_proj", "dt_w", "A_log", "out_proj"]);
        op::product(&[problem.batch, problem.length, each])
    }

    fn outputs(problem: &Problem) -> Result<Named<Spec>> {
        let Problem { batch, length, model, inner, state, width, dtype, .. } = *problem;
        let mut outputs = Named::default();
        outputs.push("y", Spec::new(dtype, &[batch, length, model])?);
        if problem.return_state {
            outputs.push("conv_state", Spec::new(dtype, &[batch, width - 1, inner])?);
            outputs.push("ssm_state", Spec::new(dtype.wide(), &[batch, inner, state])?);
        }
        Ok(outputs)
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MambaBlock`]. Among what it takes, `dconv_state` and `dssm_state` are the cotangents of
/// the states that come out. The gradients of the states that go in have the same names.
pub type MambaBlockBackward = Backward<MambaBlock>;

impl Differentiable for MambaBlock {
    const BACKWARD: &'static str = "mamba_block_backward";
    const GIVEN: &'static [Slot] = &op::slots::<17>(
        Self::INPUTS,
        &[
            Slot::new("dy", "(B, L, M)"),
            Slot::new("dconv_state", "(B, W-1, D)").optional(),
            Slot::new("dssm_state", "(B, D, N)").wide().optional(),
        ],
    );

    crate::backward_by_steps!();
}
