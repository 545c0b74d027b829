//! The convolution on CUDA: a thread per channel and stretch (a chunk of rows).

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;

const CONV: Source<Params> = Source::new("causal_conv1d", include_str!("conv.cu"));

/// Threads per multiprocessor that keep it busy.
const BUSY: usize = 2048;

/// Rows per stretch: short stretches make more threads, long ones read fewer rows twice.
const STRETCH: std::ops::RangeInclusive<usize> = 8..=64;

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params {
        x: u64 as "const STORAGE*",
        initial_state: u64 as "const STORAGE*",
        dy: u64 as "const STORAGE*",
        dlast_state: u64 as "const STORAGE*",
        w: u64 as "const REAL*",
        bias: u64 as "const REAL*",
        y: u64 as "STORAGE*",
        last_state: u64 as "STORAGE*",
        dx: u64 as "STORAGE*",
        dinitial_state: u64 as "STORAGE*",
        dw: u64 as "REAL*",
        dbias: u64 as "REAL*",
        // (B * stretches, W + 1, D): partial sums of the columns of dw, and of dbias.
        partial: u64 as "REAL*",
        // `rows` are those that are cut into stretches: L, or for the gradient L + W - 1.
        batch: i64,
        length: i64,
        channels: i64,
        rows: i64,
        stretch: i64,
        stretches: i64,
    }
}

/// Queues the convolution.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call::new(problem, inputs, outputs, lane, problem.length)?;
    call.launch("FORWARD", call.threads())
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let mut call = Call::new(problem, inputs, outputs, lane, problem.rows())?;
    let sums = problem.width + 1;
    call.params.partial = lane.scratch((call.threads() * sums * problem.dtype.wide().size()).max(1))?;
    call.launch("BACKWARD", call.threads())?;
    call.launch("SUMS", sums * problem.channels)
}

struct Call<'a> {
    problem: &'a Problem,
    lane: &'a Lane,
    params: Params,
}

impl<'a> Call<'a> {
    fn new(
        problem: &'a Problem,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        lane: &'a Lane,
        rows: usize,
    ) -> Result<Self> {
        let Problem { batch, length, channels, .. } = *problem;
        let busy = BUSY * lane.device().facts().multiprocessors as usize;
        let stretch = (batch * channels * rows / busy).clamp(*STRETCH.start(), *STRETCH.end()).max(problem.width);
        let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let params = Params {
            x: at(inputs, "x")?,
            initial_state: at(inputs, "initial_state")?,
            dy: at(inputs, "dy")?,
            dlast_state: at(inputs, "dlast_state")?,
            w: at(inputs, "w")?,
            bias: at(inputs, "bias")?,
            y: at(outputs, "y")?,
            last_state: at(outputs, "last_state")?,
            dx: at(outputs, "dx")?,
            dinitial_state: at(outputs, "dinitial_state")?,
            dw: at(outputs, "dw")?,
            dbias: at(outputs, "dbias")?,
            partial: 0,
            batch: batch as i64,
            length: length as i64,
            channels: channels as i64,
            rows: rows as i64,
            stretch: stretch as i64,
            // At least one: with a length of 0 the state must still be written.
            stretches: rows.div_ceil(stretch).max(1) as i64,
        };
        Ok(Call { problem, lane, params })
    }

    fn threads(&self) -> usize {
        self.problem.batch * self.problem.channels * self.params.stretches as usize
    }

    fn launch(&self, part: &str, threads: usize) -> Result<()> {
        let silu = u32::from(self.problem.activation.is_some());
        let options = format!("{} -DW={} -DSILU={silu} -DPART={part}", types(self.problem.dtype), self.problem.width);
        let kernel = self.lane.device().kernel(&CONV, &options)?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, as is the
        // scratch memory.
        unsafe { launch_each(self.lane, &kernel, threads, &self.params) }
    }
}
