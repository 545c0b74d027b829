//! Progress of long calls, and their early end.

use sidewinder_kernels::chunks::Chunks;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::place::Place;
use std::cell::Cell;

/// A stage of a long call. Loading has several; other calls have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Files are copied into memory, counted in bytes.
    Read,
    /// Tensors are written to a file, counted in bytes.
    Write,
    /// Weights are taken from a checkpoint and converted to the model's type, counted in layers and one for the rest.
    Convert,
    /// Matrices of a model are quantized, counted in layers and one for the head; or one matrix, counted in the numbers
    /// of each pass over it.
    Quantize,
    /// A matrix is converted back to floats, counted in its numbers.
    Dequantize,
    /// Weights are copied to a device, counted in bytes.
    Upload,
    /// Whole sequences run, counted in layers and one for the head.
    Forward,
    /// A sequence runs in a session, counted in layers and one for the head.
    Prefill,
    /// A sequence is predicted, counted in layers and one for the head of each of its chunks.
    Loss,
    /// A training step, counted in layers of the forward and of the backward pass, and one for the head.
    Train,
}

impl Stage {
    /// The name by which other languages match on it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Read => "read",
            Stage::Write => "write",
            Stage::Convert => "convert",
            Stage::Quantize => "quantize",
            Stage::Dequantize => "dequantize",
            Stage::Upload => "upload",
            Stage::Forward => "forward",
            Stage::Prefill => "prefill",
            Stage::Loss => "loss",
            Stage::Train => "train",
        }
    }
}

/// What a long call reports to, in the thread that called.
pub trait Watch {
    /// Whether the work of layers must be done when it is reported. Otherwise it may be queued on a GPU.
    fn exact(&self) -> bool;
    /// Gets the number of parts of a stage that are done, which grows from 0 to `total`. An error ends the call, which
    /// returns it.
    fn report(&self, stage: Stage, done: usize, total: usize) -> Result<()>;
}

/// The watch of calls that run to their end.
pub struct Unwatched;

impl Watch for Unwatched {
    fn exact(&self) -> bool {
        false
    }
    fn report(&self, _stage: Stage, _done: usize, _total: usize) -> Result<()> {
        Ok(())
    }
}

/// Counts the parts of a stage for a watch.
pub(crate) struct Tally<'w> {
    watch: &'w dyn Watch,
    stage: Stage,
    done: Cell<usize>,
    total: usize,
}

impl<'w> Tally<'w> {
    /// Reports that the stage begins.
    pub fn begin(watch: &'w dyn Watch, stage: Stage, total: usize) -> Result<Tally<'w>> {
        watch.report(stage, 0, total)?;
        Ok(Tally { watch, stage, done: Cell::new(0), total })
    }

    /// Reports that these parts are done, too.
    pub fn add(&self, parts: usize) -> Result<()> {
        self.done.set(self.done.get() + parts);
        self.watch.report(self.stage, self.done.get(), self.total)
    }

    /// Reports that a part is done, whose last work may be queued at `place`.
    pub fn add_at(&self, place: &impl Place) -> Result<()> {
        if self.watch.exact() {
            place.wait()?;
        }
        self.add(1)
    }
}

/// Does the work of a stage, which tells by its chunks how many of `total` parts are done.
pub fn in_chunks<T>(
    watch: &dyn Watch,
    stage: Stage,
    total: usize,
    work: impl FnOnce(Chunks) -> Result<T>,
) -> Result<T> {
    let tally = Tally::begin(watch, stage, total)?;
    work(Chunks::heard(&|parts| tally.add(parts)))
}
