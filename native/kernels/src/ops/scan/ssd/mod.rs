//! The scan of Mamba-2, the state space dual (Dao and Gu 2024, "Transformers are SSMs", section 6; the options are those
//! of `mamba_chunk_scan_combined` in `mamba_ssm/ops/triton/ssd_combined.py`). Each head has one decay per step.
//!
//! For each batch, head `h` with its row `p` and state `n`, and time `t`:
//!
//! ```text
//! delta = step size of dt[t,h] + dt_bias[h]                          (see step_size)
//! S[p,n] = exp(delta A[h]) S[p,n] + delta x[t,h,p] B[t,g,n]          (S starts as initial_state, or zero)
//! y = sum_n C[t,g,n] S[p,n] + D[h] x                                 (D[h,p], or none)
//! out = y silu(z)                                                    (z where it is given)
//! ```
//!
//! Heads fall into `G` equal groups, `g` is that of `h`. Given the cotangents `dy` and `dlast_state`, with
//! `dy' = dy silu(z)` and with `y'` the output before its gate, time runs backwards:
//!
//! ```text
//! g[t] = dy'[t] C[t] + a[t+1] g[t+1]     a = exp(delta A)            a[L+1] g[L+1] = dlast_state
//! dx = sum_n g delta B + D dy'           dD = sum dy' x
//! ddelta = sum_pn g (A a S[t-1] + B x)   dA = sum g delta a S[t-1]
//! dB = sum_hp g delta x                  dC = sum_hp dy' S
//! dz = dy y' silu'(z)                    dinitial_state = a[1] g[1]
//! ```
//!
//! `dB` and `dC` sum over the heads of a group, `ddt` and `ddt_bias` follow from `ddelta`. Storage is f32, f64, bf16 or
//! f16; `A`, `D`, `dt_bias`, the states and the arithmetic are f32 (f64 for f64), and outputs are rounded once. The
//! order of all sums depends on the sizes alone (on a GPU, also on its model).

mod cpu;
mod cuda;
mod reference;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Output, Slot, wrong_shape};
use crate::ops::scan::step_size::{ClampGrad, StepSize};
use crate::options;
use crate::tensor::{DType, Spec};

options! {
    /// The options of the scan.
    pub struct Options {
        ..super::step_size::step;
        /// gradient of the clamp
        clamp_grad: ClampGrad = ClampGrad::Mask;
        /// write last_state (B, H, P, N)
        return_state: bool = false;
    }
}

/// A checked call.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Sequence length, `L`.
    pub length: usize,
    /// Heads, `H`.
    pub heads: usize,
    /// Width of a head, `P`.
    pub width: usize,
    /// Groups of heads with the same `B` and `C`, `G`.
    pub groups: usize,
    /// State size, `N`.
    pub state: usize,
    /// Whether `D` has an element for each row of a head.
    pub wide_skip: bool,
    /// The storage type.
    pub dtype: DType,
    /// How `dt` becomes the step size.
    pub step_size: StepSize,
}

impl Problem {
    /// Heads of a group.
    pub fn heads_per_group(&self) -> usize {
        self.heads / self.groups.max(1)
    }
}

/// The op.
pub struct Ssd;

impl Op for Ssd {
    const NAME: &'static str = "ssd";
    const ABOUT: &'static str = "Scan of Mamba-2 (state space dual) over whole sequences";
    const INPUTS: &'static [Slot] = &[
        Slot::new("x", "(B, L, H, P)"),
        Slot::new("dt", "(B, L, H)"),
        Slot::new("A", "(H)").wide(),
        Slot::new("B", "(B, L, G, N)"),
        Slot::new("C", "(B, L, G, N)"),
        Slot::new("D", "(H) | (H, P)").wide().optional().loose(),
        Slot::new("z", "(B, L, H, P)").optional(),
        Slot::new("dt_bias", "(H)").wide().optional(),
        Slot::new("initial_state", "(B, H, P, N)").wide().optional(),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::new("y", "(B, L, H, P)"), Output::new("last_state", "(B, H, P, N)").wide().asked_by("return_state")];
    const HINT: &'static str = "Layout is (batch, length, heads, width) and (batch, length, groups, state)";
    const COTANGENTS: &'static [&'static str] = &["dy", "dlast_state"];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let [batch, length, heads, width, groups, state] = call.sizes.all("BLHPGN");
        let Options { dt_softplus, dt_clamp, clamp_grad, .. } = *call.options;
        if groups == 0 || !heads.is_multiple_of(groups) {
            return Err(Error::new(Kind::Shape, "B")
                .expected(format_args!("a number of groups that divides {heads} heads"))
                .got(format_args!("{groups} groups")));
        }
        Ok(Problem {
            batch,
            length,
            heads,
            width,
            groups,
            state,
            wide_skip: wide_skip(call.inputs, [heads, width])?,
            dtype: call.storage,
            step_size: StepSize { softplus: dt_softplus, clamp: dt_clamp, clamp_grad }.checked()?,
        })
    }

    fn work(problem: &Problem, _: &Named<Spec>) -> u64 {
        op::product(&[problem.batch, problem.length, problem.heads, problem.width, problem.state])
    }

    crate::forward_by_kernels!();
    crate::packed_by_kernels!(cuda_packed, cuda::forward_packed);
}

/// Whether `D` is given, with an element for each row of a head.
fn wide_skip(inputs: &Named<Spec>, [heads, width]: [usize; 2]) -> Result<bool> {
    match inputs.find("D") {
        Some(spec) if spec.shape[..] == [heads, width] => Ok(true),
        Some(spec) if spec.shape[..] != [heads] => {
            Err(wrong_shape("D", &format!("({heads}) or ({heads}, {width})"), spec))
        }
        _ => Ok(false),
    }
}

/// The gradient of [`Ssd`].
pub type SsdBackward = Backward<Ssd>;

impl Differentiable for Ssd {
    const BACKWARD: &'static str = "ssd_backward";
    const GIVEN: &'static [Slot] =
        &op::slots::<11>(Self::INPUTS, &op::given(Self::INPUTS, Self::OUTPUTS, ["dy", "dlast_state"]));

    crate::backward_by_kernels!();
    crate::packed_by_kernels!(cuda_backward_packed, cuda::backward_packed);
}
