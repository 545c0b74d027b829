//! The scan of a decode step of the first Mamba, fused with the projection of `dt`.

use super::FEW;
use super::plan::Plan;
use super::queue::{Step, THREADS};
use crate::mamba::{Config, Layer, Mixer};
use sidewinder_kernels::cuda::{Buffer, EARLY, Source, grid_size, params, type_names};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::ops::layers::mamba_block::Weights;
use sidewinder_kernels::tensor::Described;

const SCAN: Source<Scan> = Source::new("step_scan", include_str!("scan.cu")).after(&[EARLY, SHARES]);
/// How threads divide the states of a channel.
pub const SHARES: &str = include_str!("shares.cu");

/// Upper limits for the threads that share a channel; the second one is for larger batches.
const LANES: usize = 16;
const LANES_OF_MANY: usize = 4;
/// Upper limit for the states per thread, unless `LANES` threads are too few for it.
pub const HELD: usize = 16;

params! {
    struct Scan {
        x: u64 as "const BETWEEN*", // (batch, channels), out of the convolution; rows apart by x_stride
        z: u64 as "const BETWEEN*", // (batch, channels), the gate; rows apart by z_stride
        projected: u64 as "const BETWEEN*", // (batch, rank + 2 states): input of dt's projection, B, C
        dt_w: u64 as "const STORAGE*", // (channels, rank)
        dt_b: u64 as "const REAL*", // (channels)
        a: u64 as "const REAL*", // (channels, states)
        d: u64 as "const REAL*", // (channels)
        states: u64 as "const REAL* const*", // addresses of ssm_state, each (layers, channels, states)
        next_states: u64 as "REAL* const*", // those of ssm_state after the step
        y: u64 as "BETWEEN*", // (batch, channels)
        layer: i64,
        channels: i64,
        rank: i64,
        count: i64,
        x_stride: i64,
        z_stride: i64,
        eps: f32,
    }
}

/// The threads that share a channel. Small batches use as many as possible, to occupy all multiprocessors. Larger batches
/// use fewer, so that each thread loads whole packs.
pub fn lanes(states: usize, batch: usize) -> usize {
    let lanes = states.next_power_of_two();
    if batch > FEW { lanes.min(LANES_OF_MANY.max(lanes / HELD)) } else { lanes }.min(LANES)
}

/// How threads divide the states and the rank of a channel.
struct Scanned {
    /// Threads that share a channel.
    lanes: usize,
    states: usize,
    ranks: usize,
    /// Whether shares are contiguous and can be read in packs.
    aligned: bool,
}

impl Scanned {
    fn new(config: &Config, batch: usize) -> Scanned {
        let Config { state, rank, .. } = *config;
        let lanes = lanes(state, batch);
        let (states, ranks) = (state.div_ceil(lanes), rank.div_ceil(lanes));
        // Every row must start at a whole pack.
        let part = |count: usize| 1 << count.trailing_zeros().min(2);
        let aligned = [state, rank].iter().all(|count| count.is_multiple_of(lanes))
            && rank.is_multiple_of(part(states))
            && (rank + 2 * state).is_multiple_of(part(ranks).max(part(states)));
        Scanned { lanes, states, ranks, aligned }
    }
}

impl std::fmt::Display for Scanned {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Scanned { lanes, states, ranks, aligned } = self;
        write!(f, "-DLANES={lanes} -DSTATES={states} -DRANKS={ranks} -DALIGNED={}", u32::from(*aligned))
    }
}

impl Step<'_> {
    /// The scan of the convolution's output `x` with the gate `z`, whose rows are `x_stride` and `z_stride` elements
    /// apart.
    pub fn scan(
        &self,
        i: usize,
        layer: &Layer<Buffer>,
        block: &Weights<Buffer>,
        [x, z]: [u64; 2],
        [x_stride, z_stride]: [i64; 2],
    ) -> Result<()> {
        let Plan { config, projected, y, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let (normed, eps) = match config.mixer {
            Mixer::FalconMamba(eps) => (1, eps as f32),
            _ => (0, 0.0),
        };
        let params = Scan {
            x,
            z,
            projected: at(projected)?,
            dt_w: at(&block.dt_w)?,
            dt_b: at(&block.dt_b)?,
            a: at(&layer.a)?,
            d: at(&block.d)?,
            states: self.input(self.plan.layout.now.ssm)?,
            next_states: self.input(self.plan.layout.next.ssm)?,
            y: at(y)?,
            layer: i as i64,
            channels: config.inner as i64,
            rank: config.rank as i64,
            count: config.state as i64,
            x_stride,
            z_stride,
            eps,
        };
        let layout = Scanned::new(config, self.plan.batch);
        let (between, _) = type_names(y.spec().dtype);
        let kernel = self.kernel(&SCAN, THREADS, &format!("-DBETWEEN={between} -DNORMED={normed} {layout}"))?;
        let blocks = grid_size(config.inner.div_ceil(THREADS as usize / layout.lanes))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [blocks, self.plan.batch as u32, 1], THREADS, 0, &params) }
    }
}
