//! The recurrence on CUDA: a thread for each channel. Where these are too few to fill the device, time is cut into
//! chunks: their last states are computed, carried from chunk to chunk, and then all outputs.

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::border::Border;
use crate::tensor::DType;

const SCAN: Source<Params> = Source::new("linear_scan", include_str!("scan.cu"));
const CARRY: Source<Params> = Source::new("linear_scan_carry", include_str!("carry.cu"));

/// Threads that keep a multiprocessor busy, as each of them does little work.
const BUSY: usize = 1024;

/// The fewest steps of a chunk: the last states of chunks cost an additional pass over the inputs.
const SHORTEST_CHUNK: usize = 32;

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params {
        a: u64 as "const STORAGE*",
        b: u64 as "const STORAGE*",
        h: u64 as "const STORAGE*",
        dh: u64 as "const STORAGE*",
        initial_state: u64 as "const REAL*",
        dlast_state: u64 as "const REAL*",
        to: u64 as "STORAGE*",
        da: u64 as "STORAGE*",
        db: u64 as "STORAGE*",
        last_state: u64 as "REAL*",
        dinitial_state: u64 as "REAL*",
        // For each chunk the product of its a, and its last state from an initial state of zero, (chunks, B, K). The
        // latter is replaced by the state before it.
        products: u64 as "REAL*",
        ends: u64 as "REAL*",
        batch: i64,
        length: i64,
        channels: i64,
        chunk: i64,
        chunks: i64,
    }
}

/// Queues the recurrence.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    run(problem, inputs, outputs, lane, false)
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    run(problem, inputs, outputs, lane, true)
}

fn run(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
    backward: bool,
) -> Result<()> {
    let Problem { batch, length, channels, dtype, .. } = *problem;
    let rows = batch * channels;
    if rows == 0 {
        return Ok(());
    }
    let busy = BUSY * lane.device().facts().multiprocessors as usize;
    let wanted = (busy / rows).min(length / SHORTEST_CHUNK).max(1);
    let chunk = length.div_ceil(wanted).max(1);
    let chunks = length.div_ceil(chunk).max(1);
    let cut = chunks > 1 || lane.gives_states_first();
    let half = rows * chunks * dtype.wide().size();
    let scratch = if cut { lane.scratch(2 * half)? } else { 0 };
    let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
    let params = Params {
        a: at(inputs, "a")?,
        b: at(inputs, "b")?,
        h: at(inputs, "h")?,
        dh: at(inputs, "dh")?,
        to: at(outputs, "h")?,
        da: at(outputs, "da")?,
        db: at(outputs, "db")?,
        products: scratch,
        ends: scratch + half as u64,
        batch: batch as i64,
        length: length as i64,
        channels: channels as i64,
        chunk: chunk as i64,
        chunks: chunks as i64,
        ..Params::default()
    };
    let borders = [false, true].map(|reverse| Border::new(inputs, outputs, reverse));
    Call { lane, dtype, rows, backward, cut, borders, params }.run()
}

/// A call with the addresses of its buffers.
struct Call<'a> {
    lane: &'a Lane,
    dtype: DType,
    /// Channels of all batches.
    rows: usize,
    backward: bool,
    /// Whether states into chunks are computed beforehand.
    cut: bool,
    /// The states at both ends, and their cotangents.
    borders: [Border<'a>; 2],
    params: Params,
}

impl Call<'_> {
    fn run(mut self) -> Result<()> {
        let (lane, chunks) = (self.lane, self.params.chunks as usize);
        if self.cut {
            self.launch(&SCAN, "-DENDS=1", self.rows * chunks)?;
        }
        let [border, reverse] = self.borders;
        (self.params.initial_state, self.params.dlast_state) = (border.first(lane)?, reverse.first(lane)?);
        (self.params.last_state, self.params.dinitial_state) = (border.last(lane)?, reverse.last(lane)?);
        if self.cut {
            let states_first = lane.gives_states_first();
            self.launch(&CARRY, &format!("-DSTATES_FIRST={}", u32::from(states_first)), 32 * self.rows)?;
            if states_first {
                self.borders[usize::from(self.backward)].written(lane)?;
                (self.params.last_state, self.params.dinitial_state) = (0, 0);
            }
        }
        self.launch(&SCAN, "-DENDS=0", self.rows * chunks)
    }

    fn launch(&self, source: &Source<Params>, options: &str, threads: usize) -> Result<()> {
        let [backward, cut] = [self.backward, self.cut].map(u32::from);
        let options = format!("{} -DBACKWARD={backward} -DCUT={cut} {options}", types(self.dtype));
        let kernel = self.lane.device().kernel(source, &options)?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, as is the
        // scratch memory.
        unsafe { launch_each(self.lane, &kernel, threads, &self.params) }
    }
}
