//! The gradient in chunks. With `G` the cotangent of the state after a chunk, `D_ij = exp(l_i - l_j)`, and the names of
//! [`super`]:
//!
//! ```text
//! dU = P^T dY + diag(exp(l_T - l)) K G              dZ = (I + L)^-T dU                        dV = diag(beta) dZ
//! G <- exp(l_T) G + scale Q^T diag(exp(l)) dY - K^T diag(exp(l) beta) dZ
//! dP = dY U^T (j <= i)                              dL = -dZ U^T (j < i)
//! dQ = scale (diag(exp(l)) dY S^T + (dP D) K)
//! E  = -diag(exp(l)) dZ S^T + (dL D) K              dbeta_i = dZ_i . v_i + E_i . k_i
//! dK = diag(beta) E + scale (dP D)^T Q + diag(exp(l_T - l)) U G^T + (diag(beta) dL D)^T K
//! ```
//!
//! `dg` of step `t` sums, over all that passes from before `t` to `t` or later, what it adds to the loss: from `S` to steps
//! and to the state after the chunk, and from earlier steps to these. No two of these sums cancel by construction, as
//! differences of whole gradients would. A first pass repeats the op and keeps the states before chunks and `U`, a second
//! one goes backwards and keeps `G` and `dZ`; the rest is done for all chunks at once, in `gradients.cu`, or with a decay for
//! each key in `key_gradients.cu`.

use super::{
    CHUNK, Chunked, DECAYS, Form, MMA, OF_CHUNK, ROWS, TILES, Writes, decays, factors, of_delta, padded, rows,
};
use crate::cuda::Source;
use crate::error::Result;
use crate::ops::scan::matrix_state::Problem;
use crate::ops::scan::matrix_state::cuda::Params;
use crate::ops::scan::sequences;
use crate::tensor::{DType, Spec};

const COTANGENTS: Source<Params> = Source::new("matrix_state_cotangents", include_str!("../../cotangents.cu"))
    .after(&[MMA, ROWS, OF_CHUNK, sequences::PART, TILES]);
const GRADIENTS: Source<Params> =
    Source::new("matrix_state_gradients", include_str!("../../gradients.cu")).after(&[MMA, ROWS, OF_CHUNK, PRODUCTS]);
const KEY_GRADIENTS: Source<Params> = Source::new("matrix_state_key_gradients", include_str!("../../key_gradients.cu"))
    .after(&[MMA, ROWS, OF_CHUNK, PRODUCTS, DECAYS]);
const PRODUCTS: &str = include_str!("../../products.cu");

/// Warps of `products.cu` that share 16 steps, its threads, and the values of a stage.
const SPLIT: usize = 2;
const THREADS: usize = SPLIT * 2 * CHUNK;
const WIDTH: usize = 64;
/// Keys of a block of `key_gradients.cu`.
const PART: usize = 64;

impl Chunked<'_> {
    /// Queues the gradient.
    pub fn backward(mut self) -> Result<()> {
        self.allocate()?;
        self.inner()?;
        self.starts(false)?;
        self.pass(Writes::States)?;
        self.starts(true)?;
        self.cotangents(false)?;
        self.gradients()?;
        if self.is_grouped() { self.call.finish(false) } else { Ok(()) }
    }

    /// Queues the pass of cotangents, or by the delta rule that to the starts of segments.
    pub(super) fn cotangents(&self, ends: bool) -> Result<()> {
        let Problem { keys, form, .. } = *self.call.problem;
        let options = format!("-DQUERIES=1 -DENDS={} {}", u32::from(ends), self.states_first(ends));
        self.states(&COTANGENTS, &options, cotangents_shared(form, keys, self.width), &self.call.params)
    }

    /// Queues the gradients of all chunks.
    fn gradients(&self) -> Result<()> {
        let Problem { keys, form, .. } = *self.call.problem;
        let options = |part| format!("-DWIDTH={WIDTH} -DPART={part} -DGROUPED={}", u32::from(self.is_grouped()));
        if form == Form::ByKey {
            let blocks = self.chunks() * keys.div_ceil(PART);
            return self.launch(
                &KEY_GRADIENTS,
                &options(PART),
                [THREADS, blocks, key_gradients_shared()],
                &self.call.params,
            );
        }
        let blocks = self.chunks().min(self.call.lane.device().facts().multiprocessors as usize);
        let sizes = [THREADS, blocks, gradients_shared(form, keys)];
        self.launch(&GRADIENTS, &options(padded(keys)), sizes, &self.call.params)
    }

    /// Whether heads share `q` and `k`, so that their gradients are summed.
    fn is_grouped(&self) -> bool {
        self.call.problem.heads != self.call.problem.groups
    }

    fn allocate(&mut self) -> Result<()> {
        let Problem { batch, length, heads, keys, values, dtype, form, .. } = *self.call.problem;
        let states = Spec::new(dtype, &[self.chunks(), keys, values])?;
        let steps = Spec::new(dtype, &[batch, length, heads, values])?;
        self.call.params.before = self.hold(states)?;
        self.call.params.after = self.hold(states)?;
        if form == Form::Delta {
            self.call.params.inputs = self.hold(steps)?;
            self.call.params.dz = self.hold(steps)?;
        }
        if self.is_grouped() {
            let sums = Spec::new(DType::F32, &[batch, length, heads, keys])?;
            let [of_q, of_k] = [self.hold(sums)?, self.hold(sums)?];
            self.call.params.sums = if form == Form::Delta { [of_q, of_k, 0] } else { [of_q, 0, of_k] };
            self.call.params.slices = 1;
        }
        Ok(())
    }
}

/// Bytes of shared memory of the kernel that uses most.
pub fn shared(form: Form, keys: usize, width: usize) -> usize {
    let gradients = if form == Form::ByKey { key_gradients_shared() } else { gradients_shared(form, keys) };
    cotangents_shared(form, keys, width).max(gradients)
}

/// Bytes of shared memory of `cotangents.cu`: as the op, by the delta rule with one more matrix of values.
fn cotangents_shared(form: Form, keys: usize, width: usize) -> usize {
    super::shared(form, keys, width, true) + of_delta(form, rows(CHUNK, width))
}

/// Bytes of shared memory of `gradients.cu`, all but sums twice: dy, U, by the delta rule dZ and v, and both states, or in
/// their place products of steps; q, k and factors.
fn gradients_shared(form: Form, keys: usize) -> usize {
    let twice = |bytes: usize| 2 * bytes + 2 * of_delta(form, bytes);
    let values = twice(rows(CHUNK, WIDTH)) + 2 * rows(padded(keys), WIDTH);
    let products = twice(rows(CHUNK, CHUNK)) + 4 * CHUNK * (CHUNK + 1);
    let inputs = 2 * rows(CHUNK, padded(keys)) + 4 * factors(form, keys);
    let sums = 4 * (6 * SPLIT * CHUNK + CHUNK + THREADS / 32);
    2 * (values.max(products) + inputs) + sums
}

/// Bytes of shared memory of `key_gradients.cu`: q and k; dy, v and both states, or in their place decays and a matrix; sums
/// of tiles and of states.
fn key_gradients_shared() -> usize {
    let values = 2 * rows(CHUNK, WIDTH) + 2 * rows(PART, WIDTH);
    let pairs = decays(PART) + rows(CHUNK, CHUNK);
    2 * rows(CHUNK, PART) + values.max(pairs) + 4 * (2 * CHUNK / 16 + 1) * PART
}
