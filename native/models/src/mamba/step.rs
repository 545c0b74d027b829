//! Steps several sequences on CUDA. The step is recorded once for each batch size and replayed by one call. States are
//! changed in place.
//!
//! Dense layers of few sequences are bound by reading their weights: four fused kernels per layer do everything, with
//! f32 activations between them. Dense layers of many sequences go through cuBLASLt. They take six kernels per layer,
//! with activations in the storage type, as in a pass over whole sequences.
//!
//! Such small kernels finish sooner than the next one can begin. So each lets the next one begin early and read
//! weights; the next one then waits (programmatic dependent launches, on devices that support them).

use super::model::Input;
use super::sample::Draw;
use super::{Config, HEAD, Layer, State, Weights};
use sidewinder_kernels::cuda::{
    Buffer, Device, Graph, Kernel, Lane, Pinned, Source, grid_size, pack, params, type_names, types,
};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::products::matrices;
use sidewinder_kernels::place::Cuda;
use sidewinder_kernels::tensor::{DType, Described, Spec, ViewMut};

/// The text of a kernel, made of these sources after the common prologue.
macro_rules! text {
    ($($part:literal),*) => {
        concat!(include_str!("../../../kernels/src/cuda/include/early.cu") $(, include_str!($part))*)
    };
}
const EMBED: Source<Embed> = Source::new("step_embed", text!("step/embed.cu"));
const DENSE: Source<Dense> =
    Source::new("step_dense", text!("../../../kernels/src/cuda/include/pack.cu", "step/convolve.cu", "step/dense.cu"));
const CHOOSE: Source<Choose> = Source::new("step_choose", text!("step/choose.cu"));
const CONV: Source<Conv> = Source::new("step_conv", text!("step/convolve.cu", "step/conv.cu"));
const SCAN: Source<Scan> = Source::new("step_scan", text!("step/scan.cu"));
const NORM: Source<Norm> =
    Source::new("step_norm", text!("../../../kernels/src/cuda/include/block_sum.cu", "step/norm.cu"));

/// The largest number of sequences that counts as few.
const FEW: usize = 4;
/// Larger batches are padded to a multiple of this, which limits the number of recordings.
const TIMES: usize = 8;

const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;
/// Threads that choose a token.
const CHOOSING: u32 = 1024;
/// The most packs of weights that a lane holds.
const PACKS: usize = 8;
/// The most threads that share a channel of the scan; the second limit is for many sequences.
const LANES: usize = 16;
const MANYS_LANES: usize = 4;
/// The most states per thread, as long as there are threads enough.
const HELD: usize = 16;

params! {
    struct Embed {
        from: u64 as "const STORAGE*", // (vocabulary, width), or (batch, width)
        tokens: u64 as "const unsigned*", // (batch), or none for features
        sum: u64 as "REAL*", // (batch, width)
        width: i64,
    }
}

params! {
    #[derive(Default)]
    struct Dense {
        w: u64 as "const STORAGE*", // (rows, columns)
        b: u64 as "const STORAGE*", // (rows), or none
        x: u64 as "const REAL*", // (BATCH, columns), rows apart by stride
        norm: u64 as "const REAL*", // (columns)
        y: u64 as "REAL*", // (BATCH, rows)
        narrow_y: u64 as "STORAGE*", // of the storage type
        conv_w: u64 as "const REAL*", // (rows / 2, WIDTH)
        conv_b: u64 as "const REAL*", // (rows / 2), or none
        samples: u64 as "STORAGE* const*", // BATCH sequences' last samples, each (layers, WIDTH - 1, rows / 2)
        layer: i64,
        rows: i64,
        columns: i64,
        stride: i64, // from row to row of x
        eps: f32,
        to_mean: f32,
    }
}

impl Dense {
    fn new(rows: i64, columns: i64) -> Dense {
        Dense { rows, columns, stride: columns, ..Dense::default() }
    }
}

params! {
    struct Scan {
        x: u64 as "const BETWEEN*", // (batch, channels), out of the convolution; rows apart by x_stride
        z: u64 as "const BETWEEN*", // (batch, channels), the gate; rows apart by z_stride
        projected: u64 as "const BETWEEN*", // (batch, rank + 2 states): dt's, B, C
        dt_w: u64 as "const STORAGE*", // (channels, rank)
        dt_b: u64 as "const REAL*", // (channels)
        a: u64 as "const REAL*", // (channels, states)
        d: u64 as "const REAL*", // (channels)
        states: u64 as "REAL* const*", // the sequences' states, each (layers, channels, states)
        y: u64 as "BETWEEN*", // (batch, channels)
        layer: i64,
        channels: i64,
        rank: i64,
        count: i64,
        x_stride: i64,
        z_stride: i64,
    }
}

params! {
    struct Conv {
        u: u64 as "const STORAGE*", // (batch, channels), rows apart by stride
        w: u64 as "const REAL*", // (channels, WIDTH)
        b: u64 as "const REAL*", // (channels), or none
        samples: u64 as "STORAGE* const*", // the sequences' last samples, each (layers, WIDTH - 1, channels)
        y: u64 as "STORAGE*", // (batch, channels)
        layer: i64,
        channels: i64,
        stride: i64,
    }
}

params! {
    struct Choose with Draw {
        logits: u64 as "const STORAGE*", // (batch, vocabulary)
        draws: u64 as "const Draw*", // (batch)
        tokens: u64 as "unsigned*", // (batch); ~0 where no logit is a finite number
        vocabulary: i64,
    }
}

params! {
    struct Norm {
        x: u64 as "const STORAGE*", // (batch, width), with ADD
        sum: u64 as "REAL*", // (batch, width)
        norm: u64 as "const REAL*", // (width)
        y: u64 as "STORAGE*", // (batch, width)
        width: i64,
        eps: f32,
        to_mean: f32,
    }
}

/// The epilogue of a dense layer, numbered as in `dense.cu`.
#[derive(Clone, Copy)]
enum Behind {
    Written = 0,
    Added = 1,
    Convolved = 2,
    Narrowed = 3,
}

/// A recorded step of a model for a fixed number of sequences.
pub(super) struct Stepper {
    // Dropped first: the driver waits for them. One returns rows, one tokens; each is recorded on first use.
    graphs: [Option<Graph>; 2],
    lane: Lane,
    plan: Plan,
}

/// The memory that a step reads and writes.
struct Plan {
    config: Config,
    dtype: DType,
    batch: usize,
    weights: Weights<Buffer>,
    /// Tokens or features, then the addresses of each sequence's samples, then those of its states, then the parameters
    /// of each choice.
    input: Buffer,
    sum: Buffer,
    xz: Buffer,
    projected: Buffer,
    y: Buffer,
    out: Buffer,
    tokens: Buffer,
    /// Additional memory for many sequences.
    many: Option<Many>,
    /// The contents of `input`, then those of `out`, then those of `tokens`.
    pinned: Pinned,
    /// Spare states for the padding of the batch.
    nobodys: State<Buffer>,
}

/// Normed rows, outputs of the convolution, and a layer's contribution to the sum.
struct Many {
    h: Buffer,
    c: Buffer,
    last: Buffer,
}

impl Stepper {
    /// The padded number of sequences in the recorded step for `batch` sequences, if there is one.
    pub(super) fn size(config: &Config, dtype: DType, batch: usize, device: &Device) -> Option<usize> {
        // Rounded up to whole packs; the last ones may be mostly empty.
        let columns = config.inner.max(config.width).next_multiple_of(32 * 8 * PACKS);
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
        lane.fill(&plan.nobodys.conv, 0)?;
        lane.fill(&plan.nobodys.ssm, 0)?;
        Ok(Stepper { graphs: [None, None], lane, plan })
    }

    /// Steps `sequences`, given by their samples and states, by one token or frame each, and writes a row for each.
    /// There may be fewer than in the recording.
    pub(super) fn step(&mut self, input: Input, sequences: &[[&Buffer; 2]], to: ViewMut) -> Result<()> {
        let to = to.bytes();
        let rows = self.run(Wanted::Rows, input, sequences, &[])?;
        to.copy_from_slice(&rows[..to.len()]);
        Ok(())
    }

    /// Like [`Stepper::step`], but chooses a token for each by its draw; `None` where no logit is finite.
    pub(super) fn choose(
        &mut self,
        input: Input,
        sequences: &[[&Buffer; 2]],
        draws: &[Draw],
    ) -> Result<Vec<Option<u32>>> {
        let tokens = self.run(Wanted::Tokens, input, sequences, draws)?;
        let tokens = tokens.chunks_exact(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().expect("four bytes")));
        Ok(tokens.take(sequences.len()).map(|token| (token != u32::MAX).then_some(token)).collect())
    }

    fn run(&mut self, wanted: Wanted, input: Input, sequences: &[[&Buffer; 2]], draws: &[Draw]) -> Result<&[u8]> {
        let Stepper { graphs, lane, plan } = self;
        let graph = match &mut graphs[wanted as usize] {
            Some(graph) => graph,
            none => {
                // A first run on the spare states, without recording: it compiles and loads the kernels, and lets
                // cuBLASLt allocate its memory.
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

/// The requested result of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Rows = 0,
    Tokens = 1,
}

impl Plan {
    fn new(config: &Config, dtype: DType, weights: Weights<Buffer>, batch: usize, device: &Device) -> Result<Plan> {
        let Config { width, inner, rank, state, vocabulary, .. } = *config;
        let rows = |dtype, columns| Buffer::new(device, Spec::new(dtype, &[batch, columns])?);
        let out = if vocabulary > 0 { vocabulary } else { width };
        let input = Spec::new(DType::U8, &[input_bytes(config, dtype, batch) + (16 + size_of::<Draw>()) * batch])?;
        let out_bytes = (batch * out * dtype.size()).next_multiple_of(8);
        let many = || Ok(Many { h: rows(dtype, width)?, c: rows(dtype, inner)?, last: rows(dtype, width)? });
        // Kernels for few sequences read float weights.
        let many = (batch > FEW || weights.is_quantized()).then(many).transpose()?;
        let between = if many.is_some() { dtype } else { DType::F32 };
        Ok(Plan {
            config: *config,
            dtype,
            batch,
            weights,
            pinned: Pinned::new(device, input.bytes() + out_bytes + 4 * batch)?,
            nobodys: State::specs(config, dtype)?.try_map(|spec| Buffer::new(device, *spec))?,
            input: Buffer::new(device, input)?,
            sum: rows(DType::F32, width)?,
            xz: rows(between, 2 * inner)?,
            projected: rows(between, rank + 2 * state)?,
            y: rows(between, inner)?,
            out: rows(dtype, out)?,
            tokens: Buffer::new(device, Spec::new(DType::U8, &[4 * batch])?)?,
            many,
        })
    }

    /// Writes the inputs of a step; the padding of the batch gets zeros and the spare states.
    fn fill(&mut self, input: Option<Input>, sequences: &[[&Buffer; 2]], draws: &[Draw], lane: &Lane) -> Result<()> {
        let first = input_bytes(&self.config, self.dtype, self.batch);
        let given = match &input {
            Some(Input::Tokens(tokens)) => bytemuck::cast_slice(tokens),
            Some(Input::Features(features)) => features.bytes(),
            None => &[],
        };
        let pinned = self.pinned.bytes_mut();
        pinned[..given.len()].copy_from_slice(given);
        pinned[given.len()..first].fill(0);
        for sequence in 0..self.batch {
            let pair = sequences.get(sequence).copied().unwrap_or([&self.nobodys.conv, &self.nobodys.ssm]);
            for (kind, buffer) in pair.into_iter().enumerate() {
                let at = first + 8 * (kind * self.batch + sequence);
                pinned[at..at + 8].copy_from_slice(&lane.address(buffer)?.to_ne_bytes());
            }
        }
        let (given, first) = (bytemuck::cast_slice(draws), first + 16 * self.batch);
        pinned[first..first + given.len()].copy_from_slice(given);
        pinned[first + given.len()..first + size_of::<Draw>() * self.batch].fill(0);
        Ok(())
    }

    /// The offset of the rows, or of the tokens, in pinned memory.
    fn place(&self, wanted: Wanted) -> usize {
        let rows = self.input.spec().bytes();
        match wanted {
            Wanted::Rows => rows,
            Wanted::Tokens => rows + self.out.spec().bytes().next_multiple_of(8),
        }
    }

    fn result(&self, wanted: Wanted) -> &[u8] {
        &self.pinned.bytes()[self.place(wanted)..]
    }

    /// Queues a step.
    fn queue(&self, lane: &Lane, wanted: Wanted) -> Result<()> {
        let step = Step { plan: self, lane };
        lane.from_pinned(&self.pinned, 0, &self.input)?;
        step.embed()?;
        match &self.many {
            None => step.of_few()?,
            Some(many) => step.of_many(many)?,
        }
        if wanted == Wanted::Tokens {
            step.choose()?;
        }
        let from = if wanted == Wanted::Tokens { &self.tokens } else { &self.out };
        lane.to_pinned(from, &self.pinned, self.place(wanted))
    }
}

/// Bytes of the tokens or features of a step; the addresses follow them.
fn input_bytes(config: &Config, dtype: DType, batch: usize) -> usize {
    let each = if config.vocabulary > 0 { 4 } else { config.width * dtype.size() };
    (batch * each).next_multiple_of(8)
}

/// The share of a channel that a thread of the scan handles.
struct Scanned {
    /// Threads that share a channel.
    lanes: usize,
    states: usize,
    ranks: usize,
    /// Whether shares are contiguous and can be read in packs.
    aligned: bool,
}

impl Scanned {
    /// For few sequences shares are minimal, so that all multiprocessors have threads. For many they are as large as
    /// one pack.
    fn new(config: &Config, batch: usize) -> Scanned {
        let Config { state, rank, .. } = *config;
        let lanes = state.next_power_of_two();
        let lanes = if batch > FEW { lanes.min(MANYS_LANES.max(lanes / HELD)) } else { lanes }.min(LANES);
        let (states, ranks) = (state.div_ceil(lanes), rank.div_ceil(lanes));
        // The shares of every row that is read must start at whole packs.
        let part = |count: usize| 1 << count.trailing_zeros().min(3);
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

/// A step that is being queued on a lane.
struct Step<'a> {
    plan: &'a Plan,
    lane: &'a Lane,
}

impl Step<'_> {
    fn kernel<P>(&self, source: &Source<P>, threads: u32, options: &str) -> Result<Kernel<P>> {
        let options = format!("{} -DTHREADS={threads} {options}", types(self.plan.dtype));
        // SAFETY: every kernel of a step waits before it accesses memory that others write; none writes weights.
        Ok(unsafe { self.lane.device().kernel(source, &options)?.early() })
    }

    /// The address of the addresses of the sequences' samples, or for `kind` 1 of those of their states.
    fn pointers(&self, kind: usize) -> Result<u64> {
        let Plan { config, dtype, batch, input, .. } = self.plan;
        Ok(self.lane.address(input)? + (input_bytes(config, *dtype, *batch) + 8 * kind * batch) as u64)
    }

    fn embed(&self) -> Result<()> {
        let Plan { config, weights, input, sum, batch, .. } = self.plan;
        let input = self.lane.address(input)?;
        let (from, tokens) = match &weights.embedding {
            Some(table) if config.vocabulary > 0 => (self.lane.address(table)?, input),
            _ => (input, 0),
        };
        let params = Embed { from, tokens, sum: self.lane.address(sum)?, width: config.width as i64 };
        let kernel = self.kernel(&EMBED, THREADS, "")?;
        // SAFETY: tokens were checked to be rows.
        unsafe { self.lane.launch_with(&kernel, [*batch as u32, 1, 1], THREADS, 0, &params) }
    }

    fn of_few(&self) -> Result<()> {
        let Plan { config, weights, sum, xz, projected, y, .. } = self.plan;
        let [width, inner, rank, state] = [config.width, config.inner, config.rank, config.state].map(|n| n as i64);
        let at = |buffer| self.lane.address(buffer);
        for (i, layer) in weights.layers.iter().enumerate() {
            let of = |name: &str| at(layer.block.get(name)?);
            let maybe = |name: &str| layer.block.find(name).map_or(Ok(0), at);
            let in_proj = Dense {
                w: of("in_proj")?,
                b: maybe("in_proj_b")?,
                x: at(sum)?,
                norm: at(&layer.norm)?,
                y: at(xz)?,
                conv_w: of("conv_w")?,
                conv_b: maybe("conv_b")?,
                samples: self.pointers(0)?,
                layer: i as i64,
                ..Dense::new(2 * inner, width)
            };
            self.dense(Behind::Convolved, in_proj)?;
            let x_proj =
                Dense { w: of("x_proj")?, x: at(xz)?, y: at(projected)?, ..Dense::new(rank + 2 * state, inner) };
            self.dense(Behind::Written, Dense { stride: 2 * inner, ..x_proj })?;
            self.scan(i, layer, [at(xz)?, at(xz)? + 4 * inner as u64], [2 * inner; 2])?;
            let (w, b) = (of("out_proj")?, maybe("out_proj_b")?);
            self.dense(Behind::Added, Dense { w, b, x: at(y)?, y: at(sum)?, ..Dense::new(width, inner) })?;
        }
        self.head_of_few()
    }

    fn of_many(&self, many: &Many) -> Result<()> {
        let Plan { config, weights, xz, projected, y, out, .. } = self.plan;
        let Many { h, c, last } = many;
        let inner = config.inner as i64;
        let at = |buffer| self.lane.address(buffer);
        self.lane.fill(last, 0)?;
        for (i, layer) in weights.layers.iter().enumerate() {
            let block = &layer.block;
            self.add_norm(many, &layer.norm)?;
            self.linear(h, block, "in_proj", xz)?;
            self.conv(i, layer, c)?;
            self.linear(c, block, "x_proj", projected)?;
            let z = at(xz)? + (inner as usize * self.plan.dtype.size()) as u64;
            self.scan(i, layer, [at(c)?, z], [inner, 2 * inner])?;
            self.linear(y, block, "out_proj", last)?;
        }
        self.add_norm(many, &weights.norm)?;
        match weights.head.is_empty() {
            false => self.linear(h, &weights.head, HEAD, out),
            true => self.lane.copy(h, out),
        }
    }

    /// Adds the last layer's output to the sum, and norms it.
    fn add_norm(&self, many: &Many, w: &Buffer) -> Result<()> {
        self.norm(self.lane.address(&many.last)?, w, &many.h)
    }

    /// Norms the sum. If `x` is not 0, it is the address of rows to be added first.
    fn norm(&self, x: u64, w: &Buffer, y: &Buffer) -> Result<()> {
        let Plan { config, sum, batch, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let (width, eps, to_mean) = (config.width as i64, config.eps as f32, 1.0 / config.width as f32);
        let params = Norm { x, sum: at(sum)?, norm: at(w)?, y: at(y)?, width, eps, to_mean };
        let held = config.width.div_ceil(THREADS as usize);
        let kernel = self.kernel(&NORM, THREADS, &format!("-DADD={} -DHELD={held}", u32::from(x != 0)))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [*batch as u32, 1, 1], THREADS, 0, &params) }
    }

    fn linear(&self, x: &Buffer, of: &Named<Buffer>, name: &str, y: &Buffer) -> Result<()> {
        let (w, b) = (matrices::find::<Cuda>(of, name)?, of.find(&format!("{name}_b")).cloned());
        matrices::multiply(&Cuda(self.lane), x.clone(), w, b, y.clone())
    }

    fn conv(&self, i: usize, layer: &Layer<Buffer>, y: &Buffer) -> Result<()> {
        let channels = self.plan.config.inner as i64;
        let at = |buffer| self.lane.address(buffer);
        let params = Conv {
            u: at(&self.plan.xz)?,
            w: at(layer.block.get("conv_w")?)?,
            b: layer.block.find("conv_b").map_or(Ok(0), at)?,
            samples: self.pointers(0)?,
            y: at(y)?,
            layer: i as i64,
            channels,
            stride: 2 * channels,
        };
        let kernel = self.kernel(&CONV, THREADS, &format!("-DWIDTH={}", self.plan.config.conv))?;
        let blocks = grid_size(self.plan.config.inner.div_ceil(THREADS as usize))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [blocks, self.plan.batch as u32, 1], THREADS, 0, &params) }
    }

    fn dense(&self, behind: Behind, params: Dense) -> Result<()> {
        let Plan { config, dtype, batch, .. } = self.plan;
        let params = Dense { eps: config.eps as f32, to_mean: 1.0 / params.columns as f32, ..params };
        let (rows, columns) = (params.rows as usize, params.columns as usize);
        let size = dtype.size();
        let vec = pack(size, &[params.w, (columns * size) as u64]);
        let multiprocessors = self.lane.device().facts().multiprocessors as usize;
        // Two rows share each read of x, where there are rows enough for all warps.
        let each = if rows >= 2 * WARPS * multiprocessors { 2 } else { 1 };
        let packs = columns.div_ceil(32 * vec).clamp(1, PACKS / each);
        let options = format!(
            "-DBATCH={batch} -DROWS={each} -DPACKS={packs} -DVEC={vec} -DWIDTH={} -DNORM={} -DBEHIND={}",
            config.conv,
            u32::from(params.norm != 0),
            behind as u32,
        );
        let kernel = self.kernel(&DENSE, THREADS, &options)?;
        // As many blocks as registers allow at once.
        let blocks = rows.div_ceil(WARPS * each).min(2 * multiprocessors);
        let shared = (batch * columns.next_multiple_of(32 * vec * packs) * 4) as u32;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], THREADS, shared, &params) }
    }

    /// The scan of the convolution's output `x` with the gate `z`, whose rows are `x_stride` and `z_stride` elements
    /// apart.
    fn scan(&self, i: usize, layer: &Layer<Buffer>, [x, z]: [u64; 2], [x_stride, z_stride]: [i64; 2]) -> Result<()> {
        let Plan { config, projected, y, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let of = |name: &str| at(layer.block.get(name)?);
        let params = Scan {
            x,
            z,
            projected: at(projected)?,
            dt_w: of("dt_w")?,
            dt_b: of("dt_b")?,
            a: at(&layer.a)?,
            d: of("D")?,
            states: self.pointers(1)?,
            y: at(y)?,
            layer: i as i64,
            channels: config.inner as i64,
            rank: config.rank as i64,
            count: config.state as i64,
            x_stride,
            z_stride,
        };
        let layout = Scanned::new(config, self.plan.batch);
        let (between, _) = type_names(y.spec().dtype);
        let kernel = self.kernel(&SCAN, THREADS, &format!("-DBETWEEN={between} {layout}"))?;
        let blocks = grid_size(config.inner.div_ceil(THREADS as usize / layout.lanes))?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [blocks, self.plan.batch as u32, 1], THREADS, 0, &params) }
    }

    /// The logits, or the normed features of a backbone.
    fn head_of_few(&self) -> Result<()> {
        let Plan { config, weights, sum, out, .. } = self.plan;
        let at = |buffer| self.lane.address(buffer);
        let Some(head) = weights.head.find(HEAD) else {
            return self.norm(0, &weights.norm, out);
        };
        let (w, x, norm, narrow_y) = (at(head)?, at(sum)?, at(&weights.norm)?, at(out)?);
        let head = Dense { w, x, norm, narrow_y, ..Dense::new(config.vocabulary as i64, config.width as i64) };
        self.dense(Behind::Narrowed, head)
    }

    fn choose(&self) -> Result<()> {
        let Plan { config, batch, out, tokens, .. } = self.plan;
        let (logits, tokens) = (self.lane.address(out)?, self.lane.address(tokens)?);
        // The draws follow the addresses of states.
        let params = Choose { logits, draws: self.pointers(2)?, tokens, vocabulary: config.vocabulary as i64 };
        let kernel = self.kernel(&CHOOSE, CHOOSING, "")?;
        // SAFETY: sizes are those of the plan's buffers.
        unsafe { self.lane.launch_with(&kernel, [*batch as u32, 1, 1], CHOOSING, 0, &params) }
    }
}
