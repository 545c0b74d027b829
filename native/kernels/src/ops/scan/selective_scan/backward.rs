//! The gradient of the selective scan.
//!
//! Given the cotangents `dy`, `dlast_state` and `dstates` (zero for outputs that were not used), with `y'` the output
//! before its gate and with `dy' = dy * silu(z)`, time runs backwards:
//!
//! ```text
//! g[t] = dy'[t] C[t] + dstates[t] + a[t+1] g[t+1]        a[L+1] g[L+1] = dlast_state
//! dx = sum_n g delta B + D dy'                           dD = sum_{b,t} dy' x
//! ddelta = sum_n g (A a h[t-1] + B x)                    dA = sum_{b,t} g delta a h[t-1]
//! ddt = ddelta * [lo <= s <= hi] * sigmoid(dt + dt_bias) ddt_bias = sum_{b,t} ddt
//! dB = sum_d g delta x                                   dC = sum_d dy' h
//! dz = dy y' silu'(z)                                    dinitial_state = a[1] g[1]
//! ```
//!
//! `dB` and `dC` sum over the channels of a group; where B or C is the same at every step, over batch and time. The
//! forward scan does not keep states: they are recomputed forwards, from states at the ends of chunks, since going
//! backwards would divide by `a`, which may be 0. The order of all sums depends on the call alone, so repeating a call
//! repeats every bit.

use super::{SelectiveScan, cpu, cuda, reference};
use crate::op::{self, Backward, Differentiable, Op, Slot};

/// The gradient of [`SelectiveScan`].
pub type SelectiveScanBackward = Backward<SelectiveScan>;

impl Differentiable for SelectiveScan {
    const BACKWARD: &'static str = "selective_scan_backward";
    const GIVEN: &'static [Slot] =
        &op::slots::<12>(Self::INPUTS, &op::given(Self::INPUTS, Self::OUTPUTS, ["dy", "dlast_state", "dstates"]));

    crate::backward_by_kernels!();
    crate::packed_by_kernels!(cuda_backward_packed, cuda::backward_packed);
}
