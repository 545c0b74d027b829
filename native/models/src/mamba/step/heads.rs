//! The convolution, the state space dual and the gate of a decode step of Mamba-2, as one kernel.

use super::FEW;
use super::plan::Plan;
use super::queue::{Step, THREADS};
use super::scan::{HELD, SHARES, lanes};
use crate::mamba::mamba2::Weights;
use crate::mamba::{Config, Heads};
use sidewinder_kernels::cuda::{Buffer, EARLY, Source, grid_size, params, type_names};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::scan::step_size::STEP_SIZE;
use sidewinder_kernels::tensor::Described;

const HEADS: Source<Scan> = Source::new("step_heads", concat!(include_str!("convolve.cu"), include_str!("heads.cu")))
    .after(&[EARLY, STEP_SIZE, SHARES]);

params! {
    struct Scan {
        projected: u64 as "const BETWEEN*", // (batch, [z | x | B | C | dt]), out of in_proj
        conv_w: u64 as "const REAL*", // (channels of the convolution, WIDTH)
        conv_b: u64 as "const REAL*", // (channels of the convolution), or none
        samples: u64 as "const STORAGE* const*", // addresses of conv_state, each (layers, WIDTH - 1, channels)
        next_samples: u64 as "STORAGE* const*", // those of conv_state after the step
        a: u64 as "const REAL*", // (heads)
        d: u64 as "const REAL*", // (heads)
        dt_b: u64 as "const REAL*", // (heads)
        states: u64 as "const REAL* const*", // addresses of ssm_state, each (layers, heads, width, states)
        next_states: u64 as "REAL* const*", // those of ssm_state after the step
        y: u64 as "REAL*", // (batch, heads, width)
        layer: i64,
        inner: i32,
        groups: i32,
        heads_of_group: i32,
        width: i32, // of a head
        count: i32, // of states
        lo: f32,
        hi: f32,
    }
}

/// Threads of a multiprocessor that read enough at once for larger batches, which are bound by their states.
const BUSY: usize = 1536;

/// The blocks of threads: threads that share a channel, threads of a block, and the least number of blocks that a
/// multiprocessor must have registers for.
struct Blocks {
    lanes: usize,
    threads: usize,
    least: usize,
}

impl Blocks {
    fn new(width: usize, state: usize, batch: usize) -> Blocks {
        let lanes = lanes(state, batch);
        if batch <= FEW {
            return Blocks { lanes, threads: THREADS as usize, least: 1 };
        }
        // A block has a whole head, if it fits, so that B and C are convolved once for it.
        let threads = (lanes * width).next_multiple_of(32).clamp(128, 2 * THREADS as usize);
        let least = if state.div_ceil(lanes) <= HELD { BUSY / threads } else { 1 };
        Blocks { lanes, threads, least }
    }
}

impl Step<'_> {
    /// Queues the kernel of layer `i`, from `xz` to `y`.
    pub fn heads(&self, i: usize, heads: &Heads, weights: &Weights<Buffer>, a: &Buffer) -> Result<()> {
        let Plan { config, layout, batch, xz, y, .. } = self.plan;
        let Config { inner, state, conv, .. } = *config;
        let at = |buffer| self.lane.address(buffer);
        let width = inner / heads.count;
        let params = Scan {
            projected: at(xz)?,
            conv_w: at(&weights.conv_w)?,
            conv_b: self.address_of(&weights.conv_b)?,
            samples: self.input(layout.now.conv)?,
            next_samples: self.input(layout.next.conv)?,
            a: at(a)?,
            d: at(&weights.d)?,
            dt_b: at(&weights.dt_b)?,
            states: self.input(layout.now.ssm)?,
            next_states: self.input(layout.next.ssm)?,
            y: at(y)?,
            layer: i as i64,
            inner: inner as i32,
            groups: heads.groups as i32,
            heads_of_group: (heads.count / heads.groups) as i32,
            width: width as i32,
            count: state as i32,
            lo: heads.limit.0 as f32,
            hi: heads.limit.1 as f32,
        };
        let Blocks { lanes, threads, least } = Blocks::new(width, state, *batch);
        let channels = threads / lanes;
        let needed = 2 * state + channels;
        let options = format!(
            "-DHAS_BIAS=1 -DSOFTPLUS=1 -DCLAMP=1 -DWIDTH={conv} -DBETWEEN={} -DLANES={lanes} -DSTATES={} -DALIGNED={} \
             -DHELD={} -DLEAST={least}",
            type_names(xz.spec().dtype).0,
            state.div_ceil(lanes),
            u32::from(state.is_multiple_of(lanes)),
            needed.div_ceil(threads),
        );
        let kernel = self.kernel(&HEADS, threads as u32, &options)?;
        let grid = [grid_size(width.div_ceil(channels))?, heads.count as u32, *batch as u32];
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, grid, threads as u32, (needed * size_of::<f32>()) as u32, &params) }
    }
}
