//! The scan in chunks of [`CHUNK`] steps on tensor cores, for 16-bit storage and heads of [`WIDTH`] rows, and its gradient.
//! This module has what both use: the kernels' parameters, step sizes and decays, and states.
//!
//! Where there are too few heads for the device, sequences are cut into segments. A first pass computes the states at
//! their ends, starting from zeros; the true states are then carried from segment to segment. Cotangents of states are
//! carried in reverse.

mod forward;
mod gradient;
mod shares;

use super::super::{ClampGrad, Problem};
use crate::cuda::{Buffer, Lane, Source, grid_size, launch_each, params, type_names, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::border::Border;
use crate::ops::scan::sequences::{self, CHUNK, MOST_STEPS, Sequences};
use crate::ops::scan::step_size::STEP_SIZE;
use crate::tensor::{DType, Described, Spec};
pub use forward::Chunks;
pub use gradient::Gradient;

/// Sources that precede those of the kernels over chunks.
const MMA: &str = include_str!("../../../../cuda/include/mma.cu");
const ROWS: &str = concat!(include_str!("../../../../cuda/include/rows.cu"), include_str!("../copies.cu"));
const SEGMENTS: &str = include_str!("../segments.cu");

const STEPS: Source<Params> =
    Source::new("ssd_steps", include_str!("../steps.cu")).after(&[STEP_SIZE, sequences::TEXT]);
const STATES: Source<Params> = Source::new("ssd_states", include_str!("../states.cu")).after(&[
    MMA,
    ROWS,
    sequences::TEXT,
    sequences::PART,
    SEGMENTS,
]);
const CARRY: Source<Params> = Source::new("carry_states", sequences::CARRY).after(&[sequences::TEXT, sequences::PART]);

/// Rows of a head, as many as steps of a chunk: a warp has 16 of either.
pub const WIDTH: usize = CHUNK;
/// Threads of a block that has a head's state in its registers.
const THREADS: usize = 2 * CHUNK;
/// The most states of a row: a warp's accumulators must fit its registers.
const MOST_STATES: usize = 128;
/// The fewest chunks of a segment, since the first pass takes a good part of the time of the second.
const LEAST: usize = 8;
/// Resident blocks of a multiprocessor.
const BLOCKS: usize = 2;
/// Bytes of an asynchronous copy.
const UNIT: u64 = 16;

params! {
    /// The kernels' parameters.
    #[derive(Default)]
    struct Params {
        x: u64 as "const STORAGE*",
        dt: u64 as "const STORAGE*",
        b: u64 as "const STORAGE*",
        c: u64 as "const STORAGE*",
        z: u64 as "const STORAGE*",
        y: u64 as "STORAGE*",
        a: u64 as "const float*",
        d: u64 as "const float*",
        dt_bias: u64 as "const float*",
        initial: u64 as "const float*",
        last: u64 as "float*",
        dy: u64 as "const STORAGE*",
        dlast: u64 as "const float*",
        dx: u64 as "STORAGE*",
        ddt: u64 as "DDT*",
        db: u64 as "STORAGE*",
        dc: u64 as "STORAGE*",
        dz: u64 as "STORAGE*",
        dinitial: u64 as "float*",
        delta: u64 as "float*",  // by chunk of all sequences, head and step
        decay: u64 as "float*",  // likewise: log2 of the decay from the chunk's start
        starts: u64 as "float*", // states by segment of all sequences and head: at its end, then at its start
        totals: u64 as "float*", // log2 of the decays of segments
        before: u64 as "STORAGE*", // states before chunks, by chunk and head
        after: u64 as "STORAGE*",  // likewise, cotangents of the states after chunks
        part_a: u64 as "float*",   // parts of gradients by chunk
        part_d: u64 as "float*",
        part_bias: u64 as "float*",
        part_b: u64 as "float*", // parts of gradients by part of a group, from step first_part on
        part_c: u64 as "float*",
        sequences: u64 as "const int*", // of a packed call: see sequences.rs
        of_segments: u64 as "const int*",
        of_chunks: u64 as "const int*",
        length: i64,
        batch: i32,
        heads: i32,
        groups: i32,
        chunks: i32, // of a sequence of a batch
        segments: i32,
        each: i32, // chunks of a segment
        all_chunks: i32,
        all_segments: i32,
        size: i32, // elements of the state of a head
        decays: i32, // of it, for `carry_states`
        first_part: i64,
        part_steps: i64,
        whole: i32, // chunks whose groups have one part
        parts: i32, // of a group of the other chunks
        some_heads: i32, // heads of a part
        wide_skip: i32,
        lo: f32,
        hi: f32,
    }
}

impl Params {
    fn new(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<Params> {
        let address = |of: &Named<&Buffer>, name| of.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let (lo, hi) = problem.step_size.clamp.unwrap_or_default();
        Ok(Params {
            x: address(inputs, "x")?,
            dt: address(inputs, "dt")?,
            b: address(inputs, "B")?,
            c: address(inputs, "C")?,
            z: address(inputs, "z")?,
            y: address(outputs, "y")?,
            a: address(inputs, "A")?,
            d: address(inputs, "D")?,
            dt_bias: address(inputs, "dt_bias")?,
            dy: address(inputs, "dy")?,
            dx: address(outputs, "dx")?,
            ddt: address(outputs, "ddt")?,
            db: address(outputs, "dB")?,
            dc: address(outputs, "dC")?,
            dz: address(outputs, "dz")?,
            length: problem.length as i64,
            batch: problem.batch as i32,
            heads: problem.heads as i32,
            groups: problem.groups as i32,
            size: (problem.width * problem.state) as i32,
            decays: 1,
            wide_skip: i32::from(problem.wide_skip),
            lo: lo as f32,
            hi: hi as f32,
            ..Params::default()
        })
    }

    /// Whether all tensors that are copied in units are aligned to [`UNIT`] bytes.
    fn is_aligned(&self) -> bool {
        let Params { x, b, c, z, y, initial, last, dy, dlast, dx, db, dc, dz, dinitial, .. } = *self;
        let all = [x, b, c, z, y, initial, last, dy, dlast, dx, db, dc, dz, dinitial];
        all.iter().all(|address| address.is_multiple_of(UNIT))
    }
}

/// A call that runs in chunks.
struct Call<'a> {
    problem: &'a Problem,
    sequences: Sequences<'a>,
    lane: &'a Lane,
    /// The states at both ends, and their cotangents.
    borders: [Border<'a>; 2],
    params: Params,
    /// The type of the gradient of `dt`.
    ddt: DType,
    /// Temporary buffers that the parameters point to.
    temporary: Vec<Buffer>,
}

/// Chunks of a segment: sequences are cut into as many segments as the device has room for at once, of at least
/// [`LEAST`] chunks.
fn chunks_of_segment(problem: &Problem, sequences: &Sequences, lane: &Lane) -> usize {
    let blocks = BLOCKS * lane.device().facts().multiprocessors as usize;
    let segments = (blocks / (sequences.batch() * problem.heads)).max(1);
    sequences.longest().div_ceil(CHUNK).div_ceil(segments).max(LEAST)
}

/// Whether the kernels support the type, the sizes and the device.
pub fn fits(problem: &Problem, lane: &Lane) -> bool {
    let Problem { batch, length, heads, width, state, dtype, .. } = *problem;
    let sizes = width == WIDTH && state.is_multiple_of(16) && (16..=MOST_STATES).contains(&state);
    let facts = lane.device().facts();
    let device = facts.capability >= (8, 0) && states_shared(state, true) <= facts.shared as usize;
    dtype.size() == 2 && sizes && device && batch * length * heads > 0 && batch * length < MOST_STEPS
}

impl<'a> Call<'a> {
    /// The call, or `None` where the kernels do not support it.
    fn new(
        problem: &'a Problem,
        sequences: Sequences<'a>,
        inputs: &Named<&'a Buffer>,
        outputs: &Named<&'a Buffer>,
        lane: &'a Lane,
    ) -> Result<Option<Call<'a>>> {
        if !fits(problem, lane) {
            return Ok(None);
        }
        let borders = [false, true].map(|reverse| Border::new(inputs, outputs, reverse));
        let mut params = Params::new(problem, inputs, outputs, lane)?;
        (params.last, params.dinitial) = (borders[0].last(lane)?, borders[1].last(lane)?);
        if !lane.gives_states_first() {
            (params.initial, params.dlast) = (borders[0].first(lane)?, borders[1].first(lane)?);
        }
        if !params.is_aligned() {
            return Ok(None);
        }
        let ddt = outputs.find("ddt").map_or(problem.dtype, |ddt| ddt.spec().dtype);
        let mut call = Call { problem, sequences, lane, borders, params, ddt, temporary: vec![] };
        call.cut(chunks_of_segment(problem, &sequences, lane))?;
        Ok(Some(call))
    }

    /// Allocates step sizes and decays, and states and decays of segments of `each` chunks.
    fn cut(&mut self, each: usize) -> Result<()> {
        let Problem { length, heads, width, state, .. } = *self.problem;
        let (chunks, segments) = (self.sequences.chunks(), self.sequences.segments(each));
        let held = if self.has_starts(segments) { segments * heads } else { 0 };
        let table = self.sequences.table(each, usize::MAX, self.lane)?;
        self.params = Params {
            delta: self.numbers(&[chunks * heads, CHUNK])?,
            decay: self.numbers(&[chunks * heads, CHUNK])?,
            starts: self.numbers(&[held, width, state])?,
            totals: self.numbers(&[held])?,
            sequences: table.sequences,
            of_segments: table.of_segments,
            of_chunks: table.of_chunks,
            chunks: length.div_ceil(CHUNK) as i32,
            segments: (segments / self.sequences.count()) as i32,
            each: each as i32,
            all_chunks: chunks as i32,
            all_segments: segments as i32,
            ..self.params
        };
        self.temporary.extend(table.memory);
        Ok(())
    }

    /// Whether states at the starts of segments are computed beforehand.
    fn has_starts(&self, segments: usize) -> bool {
        self.lane.gives_states_first() || segments > self.sequences.count()
    }

    /// Chunks of all heads of all sequences, and segments likewise.
    fn chunks(&self) -> usize {
        self.params.all_chunks as usize * self.problem.heads
    }

    fn segments(&self) -> usize {
        self.params.all_segments as usize * self.problem.heads
    }

    /// Allocates a temporary buffer of f32 with these dimensions; returns its address.
    fn numbers(&mut self, dims: &[usize]) -> Result<u64> {
        self.hold(Spec::new(DType::F32, dims)?)
    }

    /// Allocates a temporary buffer that lives as long as the call; returns its address.
    fn hold(&mut self, spec: Spec) -> Result<u64> {
        let buffer = self.lane.temporary(spec)?;
        let address = self.lane.address(&buffer)?;
        self.temporary.push(buffer);
        Ok(address)
    }

    /// Queues step sizes and decays.
    fn steps(&self) -> Result<()> {
        let kernel = self.lane.device().kernel(&STEPS, &self.options())?;
        // SAFETY: the op's checks prove the sizes of its tensors; temporary buffers are allocated for these chunks.
        unsafe { launch_each(self.lane, &kernel, 32 * self.chunks(), &self.params) }
    }

    /// Queues the states at the starts of segments, or with `reverse` the cotangents at their ends, where some sequence
    /// has several segments.
    fn starts(&mut self, reverse: bool) -> Result<()> {
        let (Problem { width, state, .. }, lane) = (*self.problem, self.lane);
        if !self.has_starts(self.params.all_segments as usize) {
            return Ok(());
        }
        self.states(reverse, false)?;
        let border = self.borders[usize::from(reverse)];
        *if reverse { &mut self.params.dlast } else { &mut self.params.initial } = border.first(lane)?;
        let kernel = lane.device().kernel(&CARRY, &self.directed(reverse, true))?;
        // SAFETY: as above; `starts` and `totals` are allocated for these segments.
        unsafe { launch_each(lane, &kernel, self.segments() * width * state, &self.params)? };
        if lane.gives_states_first() {
            border.written(lane)?;
            *if reverse { &mut self.params.dinitial } else { &mut self.params.last } = 0;
        }
        Ok(())
    }

    /// Queues a pass over states: with `each` it writes those before each chunk, else those at the ends of segments.
    /// With `reverse` these are cotangents of the states after chunks, or at the starts of segments.
    fn states(&self, reverse: bool, each: bool) -> Result<()> {
        let options = format!("{} -DTHREADS={THREADS} -DEACH={}", self.directed(reverse, !each), u32::from(each));
        let kernel = self.lane.device().kernel(&STATES, &options)?;
        let shared = states_shared(self.problem.state, reverse && self.params.z != 0) as u32;
        let blocks = grid_size(self.segments())?;
        // SAFETY: as above; with `each` the caller allocated the states of each chunk, and the kernel uses `shared`
        // bytes of shared memory.
        unsafe { self.lane.launch_with(&kernel, [blocks, 1, 1], THREADS as u32, shared, &self.params) }
    }

    /// The options of kernels that go through states; only a pass of `ends` depends on which come first.
    fn directed(&self, reverse: bool, ends: bool) -> String {
        let states_first = u32::from(ends && self.lane.gives_states_first());
        format!("{} -DREVERSE={} -DSTATES_FIRST={states_first}", self.options(), u32::from(reverse))
    }

    /// The compiler options of all kernels.
    fn options(&self) -> String {
        let there = |address: u64| u32::from(address != 0);
        let Problem { width, state, dtype, step_size, .. } = self.problem;
        format!(
            "{} {} -DTILES=1 -DHALF={} -DCHUNK={CHUNK} -DWIDTH={width} -DSTATE={state} -DSIZE={} -DHAS_BIAS={} \
             -DSOFTPLUS={} -DCLAMP={} -DMASK={} -DSKIP={} -DGATE={} -DDDT={}",
            types(*dtype),
            self.sequences.option(),
            u32::from(*dtype == DType::F16),
            width * state,
            there(self.params.dt_bias),
            u32::from(step_size.softplus),
            u32::from(step_size.clamp.is_some()),
            u32::from(step_size.clamp_grad == ClampGrad::Mask),
            there(self.params.d),
            there(self.params.z),
            type_names(self.ddt).0,
        )
    }
}

/// Bytes of the rows of a chunk or of a head in shared memory, each padded by eight elements against bank conflicts.
const fn rows(width: usize) -> usize {
    2 * CHUNK * (width + 8)
}

/// Bytes of the step sizes and decays of a chunk.
const STEP_BYTES: usize = 2 * 4 * CHUNK;

/// Bytes of shared memory of a pass over states: two stages of states, rows, their gate and steps, and the state.
fn states_shared(state: usize, gated: bool) -> usize {
    2 * (rows(state) + rows(CHUNK) + optional_rows(gated) + STEP_BYTES) + rows(state)
}

/// Bytes of optional rows; where they are absent, their array has one unit.
const fn optional_rows(there: bool) -> usize {
    if there { rows(CHUNK) } else { UNIT as usize }
}
