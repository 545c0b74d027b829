//! A step of a few sequences on CUDA: four kernels a layer, recorded once for each number of sequences and queued by
//! one call. What lies between layers is f32; states are changed in place.
//!
//! A kernel that does so little is over sooner than the next one begins, so each lets the next one begin early, as far
//! as reading weights; then it waits (programmatic dependent launches, on devices that have them).

use super::model::Input;
use super::{Config, State, Weights};
use crate::cuda::{Buffer, Device, Graph, Kernel, Lane, Pinned, Source, grid_size, pack, types};
use crate::error::Result;
use crate::tensor::{DType, Described, Spec, ViewMut};

const EMBED: Source = Source { name: "step_embed", text: include_str!("step/embed.cu") };
const DENSE: Source =
    Source { name: "step_dense", text: concat!(include_str!("../cuda/pack.cu"), include_str!("step/dense.cu")) };
const SCAN: Source = Source { name: "step_scan", text: include_str!("step/scan.cu") };
const NORM: Source = Source { name: "step_norm", text: include_str!("step/norm.cu") };

/// Sequences that are few: with more of them the dense layers are no longer bound by reading their weights.
pub(super) const FEW: usize = 8;

const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;
/// Packs of weights that a lane of a warp holds at most.
const PACKS: usize = 8;
/// Threads that have a channel of the scan together, at most.
const LANES: usize = 16;

/// The parameters of the kernels; the same structs are declared there.
#[repr(C)]
#[derive(Clone, Copy)]
struct Embed {
    from: u64,
    tokens: u64,
    sum: u64,
    width: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Dense {
    w: u64,
    b: u64,
    x: u64,
    norm: u64,
    y: u64,
    narrow_y: u64,
    conv_w: u64,
    conv_b: u64,
    samples: u64,
    layer: i64,
    rows: i64,
    columns: i64,
    stride: i64,
    eps: f32,
    to_mean: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Scan {
    xz: u64,
    projected: u64,
    dt_w: u64,
    dt_b: u64,
    a: u64,
    d: u64,
    states: u64,
    y: u64,
    layer: i64,
    channels: i64,
    rank: i64,
    count: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Norm {
    sum: u64,
    norm: u64,
    y: u64,
    width: i64,
    eps: f32,
    to_mean: f32,
}

/// What is done with the sums of a dense layer; the numbers are those of `dense.cu`.
#[derive(Clone, Copy)]
enum Behind {
    Written = 0,
    Added = 1,
    Convolved = 2,
    Narrowed = 3,
}

/// A recorded step of so many sequences of a model.
pub(super) struct Stepper {
    // Dropped first: the driver waits for it.
    graph: Graph,
    lane: Lane,
    plan: Plan,
}

/// Where all lies that a step reads and writes.
struct Plan {
    config: Config,
    dtype: DType,
    batch: usize,
    weights: Weights<Buffer>,
    /// Tokens or features, then where the samples of each sequence are, then where its states are.
    input: Buffer,
    sum: Buffer,
    xz: Buffer,
    projected: Buffer,
    y: Buffer,
    out: Buffer,
    /// What goes into `input`, then what comes out of `out`.
    pinned: Pinned,
}

impl Stepper {
    /// Whether there is such a step.
    pub(super) fn knows(config: &Config, dtype: DType, batch: usize, device: &Device) -> bool {
        // With room for the last packs, which may be mostly empty.
        let columns = config.inner.max(config.width).next_multiple_of(32 * 8 * PACKS);
        dtype != DType::F64 && batch <= FEW && batch * columns * 4 + (8 << 10) <= device.facts().shared as usize
    }

    pub(super) fn new(
        config: &Config,
        dtype: DType,
        weights: Weights<Buffer>,
        batch: usize,
        device: &Device,
    ) -> Result<Stepper> {
        let lane = device.lane()?;
        let mut plan = Plan::new(config, dtype, weights, batch, device)?;
        // Once as it is, so that kernels are compiled and loaded; of sequences whose states nobody has.
        let nobodys = State::specs(config, dtype)?.try_map(|spec| Buffer::new(device, *spec))?;
        lane.fill(&nobodys.conv, 0)?;
        lane.fill(&nobodys.ssm, 0)?;
        let at = [lane.address(&nobodys.conv)?, lane.address(&nobodys.ssm)?];
        plan.fill(None, &vec![at; batch]);
        plan.queue(&lane)?;
        lane.synchronize()?;
        let graph = lane.record(|| plan.queue(&lane))?;
        Ok(Stepper { graph, lane, plan })
    }

    /// Steps the sequences whose samples and states these are, each by one token or frame.
    pub(super) fn step(&mut self, input: Input, sequences: &[[&Buffer; 2]], to: ViewMut) -> Result<()> {
        let address = |[samples, states]: &[&Buffer; 2]| Ok([self.lane.address(samples)?, self.lane.address(states)?]);
        let at = sequences.iter().map(address).collect::<Result<Vec<_>>>()?;
        self.plan.fill(Some(input), &at);
        // SAFETY: it was recorded by this lane, and all of it is in the plan or in use by the caller.
        unsafe { self.lane.replay(&self.graph)? };
        self.lane.synchronize()?;
        to.bytes().copy_from_slice(self.plan.result());
        Ok(())
    }
}

impl Plan {
    fn new(config: &Config, dtype: DType, weights: Weights<Buffer>, batch: usize, device: &Device) -> Result<Plan> {
        let Config { width, inner, rank, state, vocabulary, .. } = *config;
        let wide = |columns| Buffer::new(device, Spec::new(DType::F32, &[batch, columns])?);
        let out = Spec::new(dtype, &[batch, if vocabulary > 0 { vocabulary } else { width }])?;
        let input = Spec::new(DType::U8, &[input_bytes(config, dtype, batch) + 16 * batch])?;
        Ok(Plan {
            config: *config,
            dtype,
            batch,
            weights,
            pinned: Pinned::new(device, input.bytes() + out.bytes())?,
            input: Buffer::new(device, input)?,
            sum: wide(width)?,
            xz: wide(2 * inner)?,
            projected: wide(rank + 2 * state)?,
            y: wide(inner)?,
            out: Buffer::new(device, out)?,
        })
    }

    /// Writes what a step is to read.
    fn fill(&mut self, input: Option<Input>, at: &[[u64; 2]]) {
        let first = input_bytes(&self.config, self.dtype, self.batch);
        let pinned = self.pinned.bytes_mut();
        match input {
            Some(Input::Tokens(tokens)) => pinned[..4 * tokens.len()].copy_from_slice(bytemuck::cast_slice(tokens)),
            Some(Input::Features(features)) => pinned[..features.bytes().len()].copy_from_slice(features.bytes()),
            None => pinned[..first].fill(0),
        }
        for (sequence, pair) in at.iter().enumerate() {
            for (kind, address) in pair.iter().enumerate() {
                let at = first + 8 * (kind * self.batch + sequence);
                pinned[at..at + 8].copy_from_slice(&address.to_ne_bytes());
            }
        }
    }

    fn result(&self) -> &[u8] {
        let input = self.input.spec().bytes();
        &self.pinned.bytes()[input..input + self.out.spec().bytes()]
    }

    /// Queues a step.
    fn queue(&self, lane: &Lane) -> Result<()> {
        let Config { width, layers, inner, state, rank, .. } = self.config;
        let step = Step { plan: self, lane };
        lane.from_pinned(&self.pinned, 0, &self.input)?;
        step.embed()?;
        for (i, layer) in self.weights.layers.iter().enumerate().take(layers) {
            let of = |name: &str| layer.block.get(name).map(|buffer| lane.recorded_address(buffer));
            let maybe = |name: &str| layer.block.find(name).map_or(0, |buffer| lane.recorded_address(buffer));
            step.dense(
                Behind::Convolved,
                Dense {
                    w: of("in_proj")?,
                    b: maybe("in_proj_b"),
                    x: lane.recorded_address(&self.sum),
                    norm: lane.recorded_address(&layer.norm),
                    y: lane.recorded_address(&self.xz),
                    conv_w: of("conv_w")?,
                    conv_b: maybe("conv_b"),
                    samples: step.pointers(0),
                    layer: i as i64,
                    rows: 2 * inner as i64,
                    columns: width as i64,
                    ..Dense::default()
                },
            )?;
            step.dense(
                Behind::Written,
                Dense {
                    w: of("x_proj")?,
                    x: lane.recorded_address(&self.xz),
                    y: lane.recorded_address(&self.projected),
                    rows: (rank + 2 * state) as i64,
                    columns: inner as i64,
                    stride: 2 * inner as i64,
                    ..Dense::default()
                },
            )?;
            step.scan(Scan {
                xz: lane.recorded_address(&self.xz),
                projected: lane.recorded_address(&self.projected),
                dt_w: of("dt_w")?,
                dt_b: of("dt_b")?,
                a: lane.recorded_address(&layer.a),
                d: of("D")?,
                states: step.pointers(1),
                y: lane.recorded_address(&self.y),
                layer: i as i64,
                channels: inner as i64,
                rank: rank as i64,
                count: state as i64,
            })?;
            step.dense(
                Behind::Added,
                Dense {
                    w: of("out_proj")?,
                    b: maybe("out_proj_b"),
                    x: lane.recorded_address(&self.y),
                    y: lane.recorded_address(&self.sum),
                    rows: width as i64,
                    columns: inner as i64,
                    ..Dense::default()
                },
            )?;
        }
        step.head()?;
        lane.to_pinned(&self.out, &self.pinned, self.input.spec().bytes())
    }
}

/// Bytes of the tokens or features of a step; addresses follow.
fn input_bytes(config: &Config, dtype: DType, batch: usize) -> usize {
    let each = if config.vocabulary > 0 { 4 } else { config.width * dtype.size() };
    (batch * each).next_multiple_of(8)
}

/// A step on its way to a lane.
struct Step<'a> {
    plan: &'a Plan,
    lane: &'a Lane,
}

impl Step<'_> {
    fn kernel(&self, source: &Source, options: &str) -> Result<Kernel> {
        self.lane.device().kernel(source, &format!("{} -DTHREADS={THREADS} {options}", types(self.plan.dtype)))
    }

    /// Where the addresses of the sequences' samples are, or with 1 those of their states.
    fn pointers(&self, kind: usize) -> u64 {
        let Plan { config, dtype, batch, .. } = self.plan;
        self.lane.recorded_address(&self.plan.input) + (input_bytes(config, *dtype, *batch) + 8 * kind * batch) as u64
    }

    fn embed(&self) -> Result<()> {
        let input = self.lane.recorded_address(&self.plan.input);
        let (from, tokens) = match &self.plan.weights.embedding {
            Some(table) if self.plan.config.vocabulary > 0 => (self.lane.recorded_address(table), input),
            _ => (input, 0),
        };
        let sum = self.lane.recorded_address(&self.plan.sum);
        let params = Embed { from, tokens, sum, width: self.plan.config.width as i64 };
        let kernel = self.kernel(&EMBED, "")?;
        // SAFETY: Embed is the struct that the kernel declares; tokens were checked to be rows.
        unsafe { self.lane.launch_early(&kernel, [self.plan.batch as u32, 1, 1], THREADS, 0, &params) }
    }

    fn dense(&self, behind: Behind, params: Dense) -> Result<()> {
        let Plan { config, dtype, batch, .. } = self.plan;
        let stride = if params.stride == 0 { params.columns } else { params.stride };
        let params = Dense { stride, eps: config.eps as f32, to_mean: 1.0 / params.columns as f32, ..params };
        let (rows, columns) = (params.rows as usize, params.columns as usize);
        let size = dtype.size();
        let vec = pack(size, &[params.w, (columns * size) as u64]);
        let multiprocessors = self.lane.device().facts().multiprocessors as usize;
        // Two rows share what is read of x, where there are rows for all.
        let each = if rows >= 2 * WARPS * multiprocessors { 2 } else { 1 };
        let packs = columns.div_ceil(32 * vec).clamp(1, PACKS / each);
        let options = format!(
            "-DBATCH={batch} -DROWS={each} -DPACKS={packs} -DVEC={vec} -DWIDTH={} -DNORM={} -DBEHIND={}",
            config.conv,
            u32::from(params.norm != 0),
            behind as u32,
        );
        let kernel = self.kernel(&DENSE, &options)?;
        // As many blocks as there are registers for at once.
        let blocks = rows.div_ceil(WARPS * each).min(2 * multiprocessors);
        let shared = (batch * columns.next_multiple_of(32 * vec * packs) * 4) as u32;
        // SAFETY: Dense is the struct that the kernel declares; sizes are those of the plan's buffers.
        unsafe { self.lane.launch_early(&kernel, [grid_size(blocks)?, 1, 1], THREADS, shared, &params) }
    }

    fn scan(&self, params: Scan) -> Result<()> {
        let lanes = (params.count as usize).next_power_of_two().min(LANES);
        let kernel = self.kernel(&SCAN, &format!("-DLANES={lanes}"))?;
        let blocks = grid_size((params.channels as usize).div_ceil(THREADS as usize / lanes))?;
        // SAFETY: as above.
        unsafe { self.lane.launch_early(&kernel, [blocks, self.plan.batch as u32, 1], THREADS, 0, &params) }
    }

    /// The logits, or the normed features of a backbone.
    fn head(&self) -> Result<()> {
        let Plan { config, weights, sum, out, .. } = self.plan;
        let address = |buffer| self.lane.recorded_address(buffer);
        let (norm, x, to) = (address(&weights.norm), address(sum), address(out));
        if let Some(head) = &weights.head {
            return self.dense(
                Behind::Narrowed,
                Dense {
                    w: address(head),
                    x,
                    norm,
                    narrow_y: to,
                    rows: config.vocabulary as i64,
                    columns: config.width as i64,
                    ..Dense::default()
                },
            );
        }
        let (width, eps) = (config.width as i64, config.eps as f32);
        let params = Norm { sum: x, norm, y: to, width, eps, to_mean: 1.0 / config.width as f32 };
        let kernel = self.kernel(&NORM, "")?;
        // SAFETY: Norm is the struct that the kernel declares.
        unsafe { self.lane.launch_early(&kernel, [self.plan.batch as u32, 1, 1], THREADS, 0, &params) }
    }
}
