//! The Mamba block (Gu and Dao 2023, section 3.4) and its gradient; with L = 1 it is the step by one token.
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
//! There is no normalisation and no residual. The gradient recomputes the intermediate tensors, and then goes through
//! the gradients of these steps in reverse; `dA_log = dA A`. Every backend runs one sequence of ops (`steps.rs`).
//! Intermediate tensors other than `A` and the states of the scan have the storage type: with 16-bit storage they are
//! rounded after each step.

pub mod steps;
mod weights;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot};
use crate::options;
use crate::tensor::Spec;
pub use weights::{Norms, Weights};

options! {
    /// The options of the block. All sizes follow from shapes; those that are given must agree with them.
    pub struct Options {
        /// ratio of inner width to model width; if given, must match the shapes
        expand: Option<usize> = None;
        /// state size per channel; if given, must match the shapes
        d_state: Option<usize> = None;
        /// rank of dt's projection; if given, must match the shapes
        dt_rank: Option<usize> = None;
        /// width of the convolution; if given, must match the shapes
        d_conv: Option<usize> = None;
        /// write conv_state (B, W-1, D) and ssm_state (B, D, N)
        return_state: bool = false;
    }
}

/// A checked call. All other sizes are those of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
}

impl Problem {
    /// The problem for the reference. The steps take their types from the inputs, so nothing changes.
    fn in_f64(self) -> Problem {
        self
    }
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
        Slot::new("A_log", "(D, N)").wide(),
        Slot::new("in_proj", "(2D, M)"),
        Slot::new("conv_w", "(D, W)").wide(),
        Slot::new("conv_b", "(D)").wide().optional(),
        Slot::new("x_proj", "(R+2N, D)"),
        Slot::new("dt_w", "(D, R)"),
        Slot::new("dt_b", "(D)").wide(),
        Slot::new("D", "(D)").wide(),
        Slot::new("out_proj", "(M, D)"),
        Slot::new("in_proj_b", "(2D)").optional(),
        Slot::new("out_proj_b", "(M)").optional(),
        Slot::new("conv_state", "(B, W-1, D)").optional(),
        Slot::new("ssm_state", "(B, D, N)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] = &[
        Output::new("y", "(B, L, M)"),
        Output::new("conv_state", "(B, W-1, D)").asked_by("return_state"),
        Output::new("ssm_state", "(B, D, N)").wide().asked_by("return_state"),
    ];
    const COTANGENTS: &'static [&'static str] = &["dy", "dconv_state", "dssm_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let [batch, length, model, inner, state, rank, width] = call.sizes.all("BLMDNRW");
        if width == 0 {
            return Err(op::wrong_shape("conv_w", "(D, W) with W of at least 1", inputs.get("conv_w")?));
        }
        for (name, given, found) in [
            ("d_state", options.d_state, state),
            ("dt_rank", options.dt_rank, rank),
            ("d_conv", options.d_conv, width),
            ("expand", options.expand.map(|expand| expand.saturating_mul(model)), inner),
        ] {
            agree(name, given, found)?;
        }
        Ok(Problem { batch, length })
    }

    fn work(problem: &Problem, inputs: &Named<Spec>) -> u64 {
        let each = op::elements(inputs, &["in_proj", "conv_w", "x_proj", "dt_w", "A_log", "out_proj"]);
        op::product(&[problem.batch, problem.length, each])
    }

    crate::forward_by_steps!();
}

/// The gradient of [`MambaBlock`]. Its inputs `dconv_state` and `dssm_state` are the cotangents of the last states; its
/// outputs of these names are the gradients of the initial states.
pub type MambaBlockBackward = Backward<MambaBlock>;

impl Differentiable for MambaBlock {
    const BACKWARD: &'static str = "mamba_block_backward";
    const GIVEN: &'static [Slot] =
        &op::slots::<17>(Self::INPUTS, &op::given(Self::INPUTS, Self::OUTPUTS, ["dy", "dconv_state", "dssm_state"]));

    crate::backward_by_steps!();
}
