//! Recorded decode steps on CUDA. A step is recorded once for each batch size and replayed by one call.
//!
//! Small batches are bound by reading the weights of dense layers: four fused kernels per layer do everything, in Mamba-2
//! three (four with groups), with f32 activations between them. Dense layers of larger batches go through
//! cuBLASLt. They take six kernels per layer, in Mamba-2 five, with activations in the storage type, as in the forward
//! pass over whole sequences.
//!
//! These kernels are so short that the latency of launches would dominate. So each kernel lets the next one start early
//! and read weights; the next one then waits for the results of those before it (programmatic dependent launches, on
//! devices that support them).

mod few;
mod heads;
mod layout;
mod many;
mod plan;
mod queue;
mod scan;

use super::layers::States;
use super::model::Input;
use super::sample::Draw;
use super::{Config, Weights};
use plan::{Plan, Wanted};
use sidewinder_kernels::cuda::{Buffer, Device, Graph, Lane};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::{DType, ViewMut};

/// The largest batch that runs on the fused kernels of [`few`].
const FEW: usize = 4;
/// Larger batches are padded to a multiple of this, which limits the number of recordings.
const TIMES: usize = 8;

/// A recorded step of a model for a fixed batch size.
pub(super) struct Stepper {
    // The graph that returns rows, and the one that returns tokens; each is recorded on first use. Declared first, so
    // that they are dropped before the memory that they use: the driver waits for them.
    graphs: [Option<Graph>; 2],
    lane: Lane,
    plan: Plan,
}

impl Stepper {
    /// The padded batch size of the recorded step for `batch` sequences; `None` for f64, which has no recorded steps.
    pub(super) fn size(config: &Config, dtype: DType, batch: usize, device: &Device) -> Option<usize> {
        // A row in shared memory is padded to whole reads of a warp: `PACKS` packs of at most 8 elements per lane.
        let columns = config.inner.max(config.width).next_multiple_of(32 * 8 * few::PACKS);
        let fits = |batch: usize| batch * columns * 4 + (8 << 10) <= device.facts().shared as usize;
        match batch {
            _ if dtype == DType::F64 => None,
            ..=FEW if fits(batch) => Some(batch),
            _ => Some(batch.next_multiple_of(TIMES)),
        }
    }

    /// The step for `batch` sequences, which must come from [`Stepper::size`].
    pub(super) fn new(
        config: &Config,
        dtype: DType,
        weights: Weights<Buffer>,
        batch: usize,
        (device, tf32): (&Device, bool),
    ) -> Result<Stepper> {
        let lane = device.lane()?.allow_tf32(tf32);
        let plan = Plan::new(config, dtype, weights, batch, device)?;
        lane.fill(&plan.padding.conv, 0)?;
        lane.fill(&plan.padding.ssm, 0)?;
        Ok(Stepper { graphs: [None, None], lane, plan })
    }

    /// Steps `sequences`, given by their states, by one token or frame each, and writes an output row for each. There
    /// may be fewer than the recorded batch size.
    pub(super) fn step(&mut self, input: Input, sequences: &[States<Buffer>], to: ViewMut) -> Result<()> {
        let to = to.bytes();
        let rows = self.run(Wanted::Rows, input, sequences, &[])?;
        to.copy_from_slice(&rows[..to.len()]);
        Ok(())
    }

    /// Like [`Stepper::step`], but samples a token for each sequence by its draw; `None` where no logit is finite.
    pub(super) fn choose(
        &mut self,
        input: Input,
        sequences: &[States<Buffer>],
        draws: &[Draw],
    ) -> Result<Vec<Option<u32>>> {
        let tokens = self.run(Wanted::Tokens, input, sequences, draws)?;
        let tokens = tokens.chunks_exact(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
        Ok(tokens.take(sequences.len()).map(|token| (token != u32::MAX).then_some(token)).collect())
    }

    fn run(&mut self, wanted: Wanted, input: Input, sequences: &[States<Buffer>], draws: &[Draw]) -> Result<&[u8]> {
        let Stepper { graphs, lane, plan } = self;
        let graph = match &mut graphs[wanted as usize] {
            Some(graph) => graph,
            none => {
                // A first run on the padding's states, before recording: it compiles and loads the kernels, and lets
                // cuBLASLt allocate its workspace.
                plan.fill(None, &[], &[], lane)?;
                plan.queue(lane, wanted)?;
                lane.synchronize()?;
                none.insert(lane.record(|| plan.queue(lane, wanted))?)
            }
        };
        plan.fill(Some(input), sequences, draws, lane)?;
        // SAFETY: this lane recorded the graph, and its memory is in the plan or kept in use by the caller.
        unsafe { lane.replay(graph)? };
        lane.synchronize()?;
        Ok(plan.result(wanted))
    }
}
