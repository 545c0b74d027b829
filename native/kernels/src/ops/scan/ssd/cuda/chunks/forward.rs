//! The scan in chunks. With `l_i` the sum of `delta A` from the chunk's first step to step `i`, the state `S` before the chunk
//! and `T` its last step:
//!
//! ```text
//! y_i = exp(l_i) C_i S + sum_{j <= i} (C_i . B_j) exp(l_i - l_j) delta_j x_j
//! S  <- exp(l_T) S + sum_j exp(l_T - l_j) delta_j x_j B_j
//! ```
//!
//! The factors of all four products are rounded to the storage type, and sums are in f32; the state stays in f32.

use super::{CHUNK, Call, MMA, Params, Problem, ROWS, SEGMENTS, STEP_BYTES, Sequences, THREADS, rows};
use crate::cuda::{Buffer, Lane, Source, grid_size};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::sequences;

const CHUNKS: Source<Params> = Source::new("ssd_chunks", include_str!("../../chunks.cu")).after(&[
    MMA,
    ROWS,
    sequences::TEXT,
    sequences::PART,
    SEGMENTS,
]);

/// A call that the kernels support.
pub struct Chunks<'a>(Call<'a>);

impl<'a> Chunks<'a> {
    /// The call, or `None` where the kernels do not support it.
    pub fn new(
        problem: &'a Problem,
        sequences: Sequences<'a>,
        inputs: &Named<&'a Buffer>,
        outputs: &Named<&'a Buffer>,
        lane: &'a Lane,
    ) -> Result<Option<Chunks<'a>>> {
        if shared(problem.state) > lane.device().facts().shared as usize {
            return Ok(None);
        }
        Ok(Call::new(problem, sequences, inputs, outputs, lane)?.map(Chunks))
    }

    /// Queues the op.
    pub fn forward(self) -> Result<()> {
        let Chunks(mut call) = self;
        call.steps()?;
        call.starts(false)?;
        let kernel = call.lane.device().kernel(&CHUNKS, &format!("{} -DTHREADS={THREADS}", call.options()))?;
        let (blocks, shared) = (grid_size(call.segments())?, shared(call.problem.state) as u32);
        // SAFETY: the op's checks prove the sizes of its tensors, the others are the call's; the kernel uses `shared`
        // bytes of shared memory.
        unsafe { call.lane.launch_with(&kernel, [blocks, 1, 1], THREADS as u32, shared, &call.params) }
    }
}

/// Bytes of shared memory: two stages of C, B, x and steps, and the state. Rows of C have room for y.
fn shared(state: usize) -> usize {
    2 * (rows(state.max(CHUNK)) + rows(state) + rows(CHUNK) + STEP_BYTES) + rows(state)
}
