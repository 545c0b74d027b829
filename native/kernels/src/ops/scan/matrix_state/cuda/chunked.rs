//! The recurrences in chunks of [`CHUNK`] steps on tensor cores, for 16-bit storage (the WY form of Yang, Wang, Zhang, Shen
//! and Kim 2024, arXiv 2406.06484, section 3, with decays). With `l_i` the sum of `g` from the chunk's first step to step
//! `i`, the state `S` before the chunk and `T` its last step, the inputs `u_i = beta_i e_i` of all steps solve
//!
//! ```text
//! (I + L) U = R       L_ij = beta_i exp(l_i - l_j) k_i . k_j for j < i        R_i = beta_i (v_i - exp(l_i) S^T k_i)
//! y_i = scale exp(l_i) S^T q_i + sum_{j <= i} P_ij u_j                        P_ij = scale exp(l_i - l_j) q_i . k_j
//! S  <- exp(l_T) S + sum_j exp(l_T - l_j) k_j u_j^T
//! ```
//!
//! `(I + L)^-1` and `P` do not depend on states: `inner.cu` computes them for all chunks at once, before `chunked.cu` takes
//! states from chunk to chunk. The factors of all products are rounded to the storage type, those within the inverse to
//! TF32; sums are in f32, and the state stays in f32.
//!
//! Without the delta rule `U` is `V`, and `chunked.cu` computes `P` itself. With a decay for each key, `by_key.cu` puts
//! decays into `q` and `k` and computes `P` before (section 4 of Yang, Wang, Shen, Panda and Kim 2024, arXiv 2312.06635):
//!
//! ```text
//! y_i = (scale exp(l_i) * q_i) S + sum_{j <= i} P_ij v_j              P_ij = scale sum_k q_ik k_jk exp(l_ik - l_jk)
//! S  <- Diag(exp(l_T)) S + sum_j (exp(l_T - l_j) * k_j) v_j^T
//! ```
//!
//! Where there are too few heads for the device, sequences are cut into segments. A first pass computes the states at their
//! ends, starting from zeros; the true states are carried from segment to segment. Cotangents of states are carried in
//! reverse. By the delta rule a segment takes a state `S` to `M S` plus its own, and the first pass computes `M` too.

mod gradient;

use super::{CHUNK, Call, Form, Params, Problem};
use crate::cuda::{Buffer, Source, grid_size, launch_each};
use crate::error::Result;
use crate::ops::scan::sequences::{self, MOST_STEPS, Sequences};
use crate::tensor::{DType, Spec};

const INNER: Source<Params> =
    Source::new("matrix_state_inner", include_str!("../inner.cu")).after(&[MMA, ROWS, OF_CHUNK]);
const CHUNKED: Source<Params> = Source::new("matrix_state_chunked", include_str!("../chunked.cu")).after(&[
    MMA,
    ROWS,
    OF_CHUNK,
    sequences::PART,
    TILES,
]);
const FACTORS_OF_SUMS: Source<Params> =
    Source::new("matrix_state_factors", include_str!("../factors.cu")).after(&[MMA, ROWS, OF_CHUNK]);
const ENDS: Source<Params> =
    Source::new("matrix_state_ends", include_str!("../ends.cu")).after(&[MMA, ROWS, OF_CHUNK, sequences::PART, TILES]);
const CARRY_BY_DELTA: Source<Params> =
    Source::new("matrix_state_carry", include_str!("../carry.cu")).after(&[MMA, ROWS, OF_CHUNK, sequences::PART]);
const BY_KEY: Source<Params> =
    Source::new("matrix_state_by_key", include_str!("../by_key.cu")).after(&[MMA, ROWS, OF_CHUNK, DECAYS]);
const CARRY: Source<Params> = Source::new("carry_states", sequences::CARRY).after(&[sequences::TEXT, sequences::PART]);

/// Sources that precede those of the kernels over chunks.
const MMA: &str = include_str!("../../../../cuda/include/mma.cu");
const ROWS: &str = include_str!("../../../../cuda/include/rows.cu");
const OF_CHUNK: &str =
    concat!(include_str!("../../sequence.cu"), include_str!("../../sequences.cu"), include_str!("../chunk.cu"));
const TILES: &str = include_str!("../tiles.cu");
const DECAYS: &str = include_str!("../decays.cu");

/// Threads of a block of `inner.cu`, and of `chunked.cu`.
const INNER_THREADS: usize = 2 * CHUNK;
const THREADS: usize = 4 * CHUNK;
/// The most keys: the state of a block must fit its registers.
const MOST_KEYS: usize = 128;
/// Columns of a state that a block may have.
const WIDTHS: [usize; 3] = [128, 64, 32];
/// The fewest steps of a call's longest sequence that are worth a chunk.
const LEAST: usize = CHUNK / 4;
/// The fewest chunks of a segment, since its first pass takes a good part of the time of the second.
const LEAST_CHUNKS: usize = 8;
/// The fewest segments that are worth their first pass by the delta rule, which takes longer than the second: columns of
/// values, and as many of the transition, go through all products.
const LEAST_SEGMENTS: usize = 6;
/// Elements of an asynchronous copy, and its bytes.
const UNIT: usize = 8;
const UNIT_BYTES: u64 = 16;

/// A call that runs in chunks.
pub struct Chunked<'a> {
    call: Call<'a>,
    sequences: Sequences<'a>,
    width: usize,
    /// Temporary buffers that the parameters point to.
    temporary: Vec<Buffer>,
}

impl<'a> Chunked<'a> {
    /// The call in chunks; `None` where the kernels do not support it.
    pub fn of(call: Call<'a>, sequences: Sequences<'a>) -> Option<Result<Chunked<'a>>> {
        Chunked::width(&call, &sequences).map(|width| Chunked::new(call, sequences, width))
    }

    fn new(call: Call<'a>, sequences: Sequences<'a>, width: usize) -> Result<Chunked<'a>> {
        let mut chunked = Chunked { call, sequences, width, temporary: vec![] };
        chunked.cut()?;
        let Problem { batch, length, heads, keys, values, dtype, form, .. } = *chunked.call.problem;
        let square = Spec::new(dtype, &[chunked.chunks(), CHUNK, CHUNK])?;
        if form == Form::Delta {
            chunked.call.params.inverses = chunked.hold(square)?;
        }
        if form == Form::ByKey {
            let rows = Spec::new(dtype, &[batch, length, heads, keys])?;
            chunked.call.params.by_key = [chunked.hold(rows)?, chunked.hold(rows)?];
        }
        if form != Form::ByHead {
            chunked.call.params.scores = chunked.hold(square)?;
        }
        chunked.call.params.factors = chunked.hold(Spec::new(DType::F32, &[chunked.chunks(), factors(form, keys)])?)?;
        chunked.call.params.blocks = values.div_ceil(width) as i32;
        chunked.call.params.of_values = chunked.call.params.blocks;
        Ok(chunked)
    }

    /// Cuts sequences into segments: into as many as there are multiprocessors for, of at least [`LEAST_CHUNKS`] chunks.
    fn cut(&mut self) -> Result<()> {
        let Problem { heads, keys, values, form, .. } = *self.call.problem;
        let (sequences, lane) = (self.sequences, self.call.lane);
        let blocks = sequences.batch() * heads * values.div_ceil(self.width);
        let wanted = lane.device().facts().multiprocessors as usize / blocks;
        let chunks = sequences.longest().div_ceil(CHUNK);
        let is_cut = segments(&self.call, &sequences) > 1;
        let each = if is_cut { chunks.div_ceil(wanted.max(1)).max(LEAST_CHUNKS) } else { chunks };
        let (table, segments) = (sequences.table(each, usize::MAX, lane)?, sequences.segments(each));
        let held = if self.has_starts(segments) { segments * heads } else { 0 };
        let numbers = |of: usize| Spec::new(DType::F32, &[held, of]);
        let (size, decays) = (self.call.problem.state(), self.call.problem.decays());
        let transition = if form == Form::Delta { keys * keys } else { 0 };
        self.call.params = Params {
            sequences: table.sequences,
            of_segments: table.of_segments,
            of_chunks: table.of_chunks,
            starts: self.hold(numbers(size)?)?,
            totals: self.hold(numbers(decays)?)?,
            transitions: [self.hold(numbers(transition)?)?, self.hold(numbers(transition)?)?],
            segments: (segments / sequences.count()) as i32,
            each: each as i32,
            all_segments: segments as i32,
            all_chunks: sequences.chunks() as i32,
            size: size as i32,
            ..self.call.params
        };
        self.temporary.extend(table.memory);
        Ok(())
    }

    /// Whether states at the starts of segments are computed beforehand.
    fn has_starts(&self, segments: usize) -> bool {
        self.call.lane.gives_states_first() || segments > self.sequences.count()
    }

    /// The columns of a block, or `None` where the kernels do not support the call: the most that leave few
    /// multiprocessors without a block.
    fn width(call: &Call, sequences: &Sequences) -> Option<usize> {
        let Problem { heads, keys, values, form, .. } = *call.problem;
        let facts = call.lane.device().facts();
        let used = |width| match call.params.dy {
            0 => shared(form, keys, width, true),
            _ => gradient::shared(form, keys, width),
        };
        let fits = |width: &usize| used(*width) <= facts.shared as usize && *width < 2 * values.max(WIDTHS[2]);
        let rows = sequences.batch() * heads * segments(call, sequences);
        let busy = |width: &usize| 4 * rows * values.div_ceil(*width) >= 3 * facts.multiprocessors as usize;
        let widths = || WIDTHS.into_iter().filter(fits);
        widths().find(busy).or_else(|| widths().next_back()).filter(|_| supports(call, sequences))
    }

    /// Allocates a temporary buffer that lives as long as the call; returns its address.
    fn hold(&mut self, spec: Spec) -> Result<u64> {
        let buffer = self.call.lane.temporary(spec)?;
        let address = self.call.lane.address(&buffer)?;
        self.temporary.push(buffer);
        Ok(address)
    }

    /// Queues the op.
    pub fn forward(mut self) -> Result<()> {
        self.inner()?;
        self.starts(false)?;
        self.pass(Writes::Outputs)
    }

    /// Chunks of all heads.
    fn chunks(&self) -> usize {
        self.sequences.chunks() * self.call.problem.heads
    }

    /// Queues what does not depend on states: the factors of all chunks, and the matrices of a form that has them.
    fn inner(&self) -> Result<()> {
        let (width, chunks, keys) = (format!("-DWIDTH={}", self.width), self.chunks(), self.call.problem.keys);
        match self.call.problem.form {
            Form::Delta => self.launch(&INNER, &width, [INNER_THREADS, chunks, inner_shared(keys)], &self.call.params),
            Form::ByKey => self.launch(&BY_KEY, &width, [THREADS, chunks, by_key_shared(keys)], &self.call.params),
            Form::ByHead => {
                let blocks = (32 * chunks).div_ceil(THREADS);
                self.launch(&FACTORS_OF_SUMS, &width, [THREADS, blocks, 0], &self.call.params)
            }
        }
    }

    /// Queues the states at the starts of segments, or with `reverse` the cotangents at their ends, where some sequence
    /// has several segments.
    fn starts(&mut self, reverse: bool) -> Result<()> {
        if !self.has_starts(self.call.params.all_segments as usize) {
            return Ok(());
        }
        self.ends(reverse)?;
        let (lane, border) = (self.call.lane, self.call.borders[usize::from(reverse)]);
        let params = &mut self.call.params;
        *if reverse { &mut params.dlast } else { &mut params.initial } = border.first(lane)?;
        self.carry(reverse)?;
        if lane.gives_states_first() {
            border.written(lane)?;
            let params = &mut self.call.params;
            *if reverse { &mut params.dinitial } else { &mut params.last } = 0;
        }
        Ok(())
    }

    /// Queues the states at the ends of segments that start from zeros, and the decays or transitions of segments.
    fn ends(&self, reverse: bool) -> Result<()> {
        let Call { problem, params, .. } = &self.call;
        if problem.form != Form::Delta {
            let shared = ends_shared(problem.form, problem.keys, self.width);
            let options = format!("-DQUERIES=1 -DREVERSE={} {}", u32::from(reverse), self.states_first(true));
            return self.states(&ENDS, &options, shared, params);
        }
        if reverse { self.cotangents(true) } else { self.pass(Writes::Ends) }
    }

    /// Queues the states at the starts of segments, from those at their ends.
    fn carry(&self, reverse: bool) -> Result<()> {
        let Call { problem, lane, params, .. } = &self.call;
        let Problem { heads, keys, values, form, .. } = **problem;
        if form != Form::Delta {
            let (call, sequences) = (self.call.options(), self.sequences.option());
            let options = format!("{call} {sequences} -DREVERSE={} {}", u32::from(reverse), self.states_first(true));
            let kernel = lane.device().kernel(&CARRY, &options)?;
            // SAFETY: as below; `starts` and `totals` are allocated for these segments.
            return unsafe {
                launch_each(lane, &kernel, params.all_segments as usize * heads * problem.state(), params)
            };
        }
        let columns = THREADS / padded(keys) * UNIT;
        let params = Params { blocks: values.div_ceil(columns) as i32, ..*params };
        let blocks = params.all_segments as usize * heads * params.blocks as usize;
        let options = format!("-DWIDTH={} -DREVERSE={} {}", self.width, u32::from(reverse), self.states_first(true));
        self.launch(&CARRY_BY_DELTA, &options, [THREADS, blocks, 4 * keys * keys], &params)
    }

    /// Queues a pass of states through all chunks, or through those of each segment.
    fn pass(&self, writes: Writes) -> Result<()> {
        let Problem { form, keys, .. } = *self.call.problem;
        let (name, queries) = (writes.name(), writes == Writes::Outputs);
        let of_transition = if writes == Writes::Ends { keys.div_ceil(self.width) } else { 0 };
        let params = Params { blocks: self.call.params.of_values + of_transition as i32, ..self.call.params };
        let states_first = self.states_first(writes == Writes::Ends);
        let options = format!("-DWRITES={name} -DQUERIES={} {states_first}", u32::from(queries));
        self.states(&CHUNKED, &options, shared(form, keys, self.width, queries), &params)
    }

    /// Queues a kernel with blocks for the columns of each segment.
    fn states(&self, source: &Source<Params>, options: &str, shared: usize, params: &Params) -> Result<()> {
        let problem = self.call.problem;
        let blocks = params.all_segments as usize * problem.heads * params.blocks as usize;
        // With decays in them, each head has its own q and k.
        let params = match (problem.form, params.by_key) {
            (Form::ByKey, [q, k]) => Params { q, k, groups: params.heads, ..*params },
            _ => *params,
        };
        self.launch(source, &format!("-DWIDTH={} {options}", self.width), [THREADS, blocks, shared], &params)
    }

    /// The compiler option of kernels that go through segments; only a pass of `ends` depends on it.
    fn states_first(&self, ends: bool) -> String {
        format!("-DSTATES_FIRST={}", u32::from(ends && self.call.lane.gives_states_first()))
    }

    /// Queues blocks of a kernel that uses `shared` bytes of shared memory.
    fn launch(
        &self,
        source: &Source<Params>,
        options: &str,
        [threads, blocks, shared]: [usize; 3],
        params: &Params,
    ) -> Result<()> {
        let Call { problem, lane, .. } = &self.call;
        let options = format!(
            "{} {} -DTILES=1 -DHALF={} -DKEYS={} -DTHREADS={threads} {options}",
            self.call.options(),
            self.sequences.option(),
            u32::from(problem.dtype == DType::F16),
            padded(problem.keys),
        );
        let kernel = lane.device().kernel(source, &options)?;
        // SAFETY: the op's checks prove the sizes of its tensors, temporary buffers are allocated for these chunks, and
        // the kernel uses `shared` bytes of shared memory.
        unsafe { lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], threads as u32, shared as u32, params) }
    }
}

/// What a pass of `chunked.cu` writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    Outputs,
    States,
    Ends,
}

impl Writes {
    /// The name in `chunked.cu`.
    fn name(self) -> &'static str {
        match self {
            Writes::Outputs => "OUTPUTS",
            Writes::States => "STATES",
            Writes::Ends => "ENDS",
        }
    }
}

/// The most segments of the longest sequence; 1 where the delta rule has too few of them, or heads enough.
fn segments(call: &Call, sequences: &Sequences) -> usize {
    let Problem { heads, form, .. } = *call.problem;
    let segments = sequences.longest().div_ceil(LEAST_CHUNKS * CHUNK).max(1);
    let places = call.lane.device().facts().multiprocessors as usize / (sequences.batch() * heads).max(1);
    if form == Form::Delta && segments.min(places) < LEAST_SEGMENTS { 1 } else { segments }
}

/// Whether the kernels support the type, the sizes and the device, and all tensors that are copied in units are aligned.
fn supports(call: &Call, sequences: &Sequences) -> bool {
    let Problem { batch, length, heads, keys, values, dtype, .. } = *call.problem;
    let Params { q, k, v, y, dy, initial, last, dlast, dq, dk, dv, dinitial, .. } = call.params;
    let whole = |size: usize| size > 0 && size.is_multiple_of(UNIT);
    let sizes = whole(keys) && keys <= MOST_KEYS && whole(values) && sequences.count() * heads > 0;
    let steps = sequences.longest() >= LEAST && batch * length < MOST_STEPS;
    let copied = [q, k, v, y, dy, initial, last, dlast, dq, dk, dv, dinitial];
    let aligned = copied.iter().all(|address| address.is_multiple_of(UNIT_BYTES));
    dtype.size() == 2 && sizes && steps && aligned && call.lane.device().facts().capability >= (8, 0)
}

/// Keys, rounded up to what the warps share evenly.
fn padded(keys: usize) -> usize {
    if keys <= MOST_KEYS / 2 { MOST_KEYS / 2 } else { MOST_KEYS }
}

/// Bytes of `count` rows in shared memory, each padded by a unit against bank conflicts.
fn rows(count: usize, width: usize) -> usize {
    2 * count * (width + UNIT)
}

/// Bytes of what only the delta rule needs, and of P where it is computed beforehand: `bytes`, else one unit.
fn of_delta(form: Form, bytes: usize) -> usize {
    if form == Form::Delta { bytes } else { UNIT_BYTES as usize }
}
fn of_scores(form: Form) -> usize {
    if form == Form::ByHead { UNIT_BYTES as usize } else { rows(CHUNK, CHUNK) }
}

/// Elements of a chunk's factors.
fn factors(form: Form, keys: usize) -> usize {
    if form == Form::ByKey { padded(keys) } else { 4 * CHUNK }
}

/// Bytes of the decays of a chunk's steps for `keys` keys: of steps, and up to them.
fn decays(keys: usize) -> usize {
    4 * 2 * CHUNK * (keys + 4)
}

/// Bytes of shared memory of `inner.cu`: q and k, L in f32, and factors.
fn inner_shared(keys: usize) -> usize {
    2 * rows(CHUNK, padded(keys)) + 2 * rows(CHUNK, CHUNK) + 4 * factors(Form::Delta, keys)
}

/// Bytes of shared memory of `by_key.cu`: q and k, P, and decays.
fn by_key_shared(keys: usize) -> usize {
    2 * rows(CHUNK, padded(keys)) + rows(CHUNK, CHUNK) + decays(padded(keys))
}

/// Bytes of shared memory of `ends.cu`: two stages of keys, values and factors.
fn ends_shared(form: Form, keys: usize, width: usize) -> usize {
    2 * (rows(CHUNK, padded(keys)) + rows(CHUNK, width) + 4 * factors(form, keys))
}

/// Bytes of shared memory of `chunked.cu`: two stages of k, v, factors, the inverse, and with `queries` of q and P; and the
/// state; by the delta rule also U.
fn shared(form: Form, keys: usize, width: usize, queries: bool) -> usize {
    let of_keys = rows(CHUNK, padded(keys));
    let [of_q, scores] = if queries { [of_keys, of_scores(form)] } else { [UNIT_BYTES as usize; 2] };
    let inverse = of_delta(form, rows(CHUNK, CHUNK));
    let stage = of_q + of_keys + rows(CHUNK, width) + inverse + scores + 4 * factors(form, keys);
    2 * stage + rows(padded(keys), width) + of_delta(form, rows(CHUNK, width))
}
