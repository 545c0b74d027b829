//! The scan in chunks of [`CHUNK`] steps on tensor cores, for 16-bit storage and heads of 64 rows.
//!
//! With `l_i` the sum of `delta A` from the chunk's first step to step `i`, the state `S` before the chunk and `T` its
//! last step:
//!
//! ```text
//! y_i = exp(l_i) C_i S + sum_{j <= i} (C_i . B_j) exp(l_i - l_j) delta_j x_j
//! S  <- exp(l_T) S + sum_j exp(l_T - l_j) delta_j x_j B_j
//! ```
//!
//! All four products take factors rounded to storage, and sum in f32; the state stays in f32. Where there are too few
//! heads for the device, sequences are cut into segments. A first pass finds the states at their ends from zeros, which
//! then go on from segment to segment.

use super::super::Problem;
use crate::cuda::{Buffer, Lane, Source, grid_size, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};

/// The text that all three kernels have.
macro_rules! text {
    ($($file:literal),*) => {
        concat!(include_str!("../../step_size.cu"), $(include_str!($file)),*)
    };
}

const STEPS: Source<Params> = Source::new("ssd_steps", text!("../steps.cu"));
const CHUNKS: Source<Params> = Source::new("ssd_chunks", text!("../../../../cuda/include/mma.cu", "../chunks.cu"));
const CARRY: Source<Params> = Source::new("ssd_carry", text!("../carry.cu"));

/// Steps of a chunk, and rows of a head: a warp has 16 of either.
const CHUNK: usize = 64;
/// The most states, whose sums fit a warp's registers.
const MOST_STATES: usize = 128;
/// Chunks of a segment at least: the first pass takes a good part of the time of the second.
const LEAST: usize = 8;
/// Blocks that a multiprocessor has room for.
const BLOCKS: usize = 2;
/// Bytes that are copied at a time.
const UNIT: u64 = 16;

params! {
    /// The kernels' parameters.
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
        delta: u64 as "float*",  // by batch, head, chunk and step
        decay: u64 as "float*",  // likewise, summed up from the chunk's first step, in powers of 2
        starts: u64 as "float*", // states by batch, head and segment: where it ends, then where it starts
        totals: u64 as "float*", // decays of segments
        length: i64,
        batch: i32,
        heads: i32,
        groups: i32,
        chunks: i32,
        segments: i32,
        each: i32, // chunks of a segment
        wide_skip: i32,
        lo: f32,
        hi: f32,
    }
}

impl Params {
    fn new(
        problem: &Problem,
        (inputs, outputs): (&Named<&Buffer>, &Named<&Buffer>),
        (cut, temporary): (&Cut, &Temporary),
        lane: &Lane,
    ) -> Result<Params> {
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
            initial: address(inputs, "initial_state")?,
            last: address(outputs, "last_state")?,
            delta: lane.address(&temporary.delta)?,
            decay: lane.address(&temporary.decay)?,
            starts: lane.address(&temporary.starts)?,
            totals: lane.address(&temporary.totals)?,
            length: problem.length as i64,
            batch: problem.batch as i32,
            heads: problem.heads as i32,
            groups: problem.groups as i32,
            chunks: cut.chunks as i32,
            segments: cut.segments as i32,
            each: cut.each as i32,
            wide_skip: i32::from(problem.wide_skip),
            lo: lo as f32,
            hi: hi as f32,
        })
    }
}

/// A call that this route takes.
pub struct Chunks<'a> {
    problem: &'a Problem,
    lane: &'a Lane,
    params: Params,
    /// What the parameters point to besides the op's tensors.
    _temporary: Temporary,
}

/// Step sizes and decays, and states and decays of segments.
struct Temporary {
    delta: Buffer,
    decay: Buffer,
    starts: Buffer,
    totals: Buffer,
}

impl Temporary {
    fn new(problem: &Problem, cut: &Cut, lane: &Lane) -> Result<Temporary> {
        let heads = problem.batch * problem.heads;
        let numbers = |dims: &[usize]| lane.temporary(Spec::new(DType::F32, dims)?);
        let held = if cut.segments > 1 { heads * cut.segments } else { 0 };
        Ok(Temporary {
            delta: numbers(&[heads, cut.chunks * CHUNK])?,
            decay: numbers(&[heads, cut.chunks * CHUNK])?,
            starts: numbers(&[held, problem.width, problem.state])?,
            totals: numbers(&[heads, cut.segments])?,
        })
    }
}

/// How sequences are cut.
struct Cut {
    chunks: usize,
    segments: usize,
    /// Chunks of a segment.
    each: usize,
}

impl Cut {
    /// Segments of all heads that the device has room for at a time.
    fn new(problem: &Problem, lane: &Lane) -> Cut {
        let chunks = problem.length.div_ceil(CHUNK);
        let blocks = BLOCKS * lane.device().facts().multiprocessors as usize;
        let segments = (blocks / (problem.batch * problem.heads)).max(1);
        let each = chunks.div_ceil(segments).max(LEAST);
        Cut { chunks, segments: chunks.div_ceil(each), each }
    }
}

/// Whether the kernels are made for the type, the sizes and the device.
fn fits(problem: &Problem, lane: &Lane) -> bool {
    let (facts, Problem { batch, length, heads, width, state, dtype, .. }) = (lane.device().facts(), *problem);
    let sizes = width == CHUNK && state.is_multiple_of(16) && (16..=MOST_STATES).contains(&state);
    let device = facts.capability >= (8, 0) && shared(state) <= facts.shared as usize;
    dtype.size() == 2 && sizes && device && batch * length * heads > 0
}

impl<'a> Chunks<'a> {
    /// The call, unless it is for another route.
    pub fn new(
        problem: &'a Problem,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        lane: &'a Lane,
    ) -> Result<Option<Chunks<'a>>> {
        if !fits(problem, lane) {
            return Ok(None);
        }
        let cut = Cut::new(problem, lane);
        let temporary = Temporary::new(problem, &cut, lane)?;
        let params = Params::new(problem, (inputs, outputs), (&cut, &temporary), lane)?;
        let Params { x, b, c, z, y, initial, last, .. } = params;
        let aligned = [x, b, c, z, y, initial, last].iter().all(|address| address.is_multiple_of(UNIT));
        Ok(aligned.then_some(Chunks { problem, lane, params, _temporary: temporary }))
    }

    /// Queues the op.
    pub fn forward(&self) -> Result<()> {
        let Problem { batch, heads, width, state, .. } = *self.problem;
        let Params { chunks, segments, .. } = self.params;
        let options = self.options();
        let device = self.lane.device();
        let steps = device.kernel(&STEPS, &options)?;
        // SAFETY: the op's checks prove the sizes of its tensors; the others are made for these chunks and segments.
        unsafe {
            launch_each(self.lane, &steps, 32 * batch * heads * chunks as usize, &self.params)?;
            if segments > 1 {
                self.pass(&format!("{options} -DOUTPUT=0"))?;
                let carry = device.kernel(&CARRY, &options)?;
                launch_each(self.lane, &carry, batch * heads * width * state, &self.params)?;
            }
            self.pass(&format!("{options} -DOUTPUT=1"))
        }
    }

    /// Queues a pass over all chunks.
    ///
    /// # Safety
    /// All addresses are valid on this lane.
    unsafe fn pass(&self, options: &str) -> Result<()> {
        let Params { batch, heads, segments, .. } = self.params;
        let kernel = self.lane.device().kernel(&CHUNKS, options)?;
        let blocks = grid_size(batch as usize * heads as usize * segments as usize)?;
        let shared = shared(self.problem.state) as u32;
        // SAFETY: as the caller promises; the kernel takes that much shared memory.
        unsafe { self.lane.launch_with(&kernel, [blocks, 1, 1], 2 * CHUNK as u32, shared, &self.params) }
    }

    fn options(&self) -> String {
        let there = |address: u64| u32::from(address != 0);
        let Problem { width, state, dtype, step_size, .. } = self.problem;
        format!(
            "{} -DTILES=1 -DHALF={} -DCHUNK={CHUNK} -DWIDTH={width} -DSTATE={state} -DSIZE={} -DHAS_BIAS={} \
             -DSOFTPLUS={} -DCLAMP={} -DSKIP={} -DGATE={}",
            types(*dtype),
            u32::from(*dtype == DType::F16),
            width * state,
            there(self.params.dt_bias),
            u32::from(step_size.softplus),
            u32::from(step_size.clamp.is_some()),
            there(self.params.d),
            there(self.params.z),
        )
    }
}

/// Bytes of shared memory: two stages of C, B, x and steps, and the state. Rows have eight numbers more, and those of C
/// room for y.
fn shared(state: usize) -> usize {
    let rows = |width: usize| 2 * CHUNK * (width + 8);
    2 * (rows(state.max(CHUNK)) + rows(state) + rows(CHUNK) + 2 * 4 * CHUNK) + rows(state)
}
