//! Attention on CUDA: the choice of kernels for a call, and their parameters.
//!
//! Tensor cores compute calls in bf16 and f16 without mask and bias ([`mma`]; on Hopper [`specialised`]). All other calls
//! use multiply-adds in the type of the arithmetic ([`general`]), f32 too, which would lose digits on tensor cores.
//! Forward calls with few queries have kernels that divide the keys of a head among many blocks ([`few`]). Packed
//! sequences are one launch of `mma` or `general`: each block finds its sequence in a table.

mod few;
mod general;
mod mma;
mod specialised;

use super::{Problem, Strides};
use crate::cuda::{Buffer, Declared, Lane, Source, launch_each, params, types};
use crate::error::{Error, Kind, Result};
use crate::op::Named;
use crate::tensor::{DType, Described, Spec};
use std::cmp::Reverse;
use std::ops::Range;

const DELTA: Source<Params<()>> =
    Source::new("attention_delta", concat!(include_str!("common.cu"), include_str!("delta.cu")));

/// Limit for the numbers of queries and keys and for widths: kernels add three of these in 32 bits.
const MOST: usize = 1 << 29;

/// The most bytes of keys and values of heads whose tiles are interleaved, so that they stay in the cache.
const TOGETHER: usize = 16 << 20;

/// Queues attention.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    forward_of(problem, inputs, outputs, None, lane)
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    backward_of(problem, inputs, outputs, None, lane)
}

/// The steps of packed sequences, if they are some.
pub type Steps<'a> = Option<&'a [Range<usize>]>;

/// Queues attention over a batch, or over packed sequences.
pub fn forward_of(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: Steps,
    lane: &Lane,
) -> Result<()> {
    if problem.batch * problem.heads * problem.queries == 0 {
        return Ok(());
    }
    match problem.dtype {
        DType::F64 => {
            let call = Call::<f64>::new(problem, inputs, outputs, steps, lane)?;
            if few::fits(&call) { few::forward(&call) } else { general::forward(&call) }
        }
        _ => {
            let call = Call::<f32>::new(problem, inputs, outputs, steps, lane)?;
            if few::fits(&call) {
                few::forward(&call)
            } else if mma::fits(problem, lane) {
                mma::forward(&call)
            } else {
                general::forward(&call)
            }
        }
    }
}

/// Queues the gradient over a batch, or over packed sequences.
pub fn backward_of(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: Steps,
    lane: &Lane,
) -> Result<()> {
    match problem.dtype {
        DType::F64 => {
            let call = Call::<f64>::new(problem, inputs, outputs, steps, lane)?;
            call.backward(Statistics::Natural, general::backward)
        }
        _ => {
            let call = Call::<f32>::new(problem, inputs, outputs, steps, lane)?;
            if mma::fits(problem, lane) {
                mma::backward(&call)
            } else {
                call.backward(Statistics::Natural, general::backward)
            }
        }
    }
}

/// How kernels take the shift of scores and delta; `delta.cu` has the details.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Statistics {
    Natural,
    /// For scores that are exponents of 2.
    Binary,
    /// What sums begin with. Each head is padded to a multiple of `rows`.
    Preset {
        rows: usize,
    },
}

/// A type of the arithmetic.
trait Real: Copy + Default {
    fn of(value: f64) -> Self;
}

impl Real for f32 {
    fn of(value: f64) -> f32 {
        value as f32
    }
}

impl Real for f64 {
    fn of(value: f64) -> f64 {
        value
    }
}

params! {
    /// Strides: how many elements lie between neighbours.
    #[derive(Default)]
    struct At {
        batch: i64,
        head: i64,
        row: i64,
    }
}

impl From<Strides> for At {
    fn from(strides: Strides) -> At {
        At { batch: strides.batch as i64, head: strides.head as i64, row: strides.row as i64 }
    }
}

params! {
    /// The kernels' parameters.
    #[derive(Default)]
    struct Params<R> with At {
        q: u64 as "const STORAGE*",
        k: u64 as "const STORAGE*",
        v: u64 as "const STORAGE*",
        y: u64 as "const STORAGE*",
        dy: u64 as "const STORAGE*",
        mask: u64 as "const unsigned char*",
        bias: u64 as "const REAL*",
        lse: u64 as "const REAL*",
        dlse: u64 as "const REAL*",
        to: u64 as "STORAGE*",
        dq: u64 as "STORAGE*",
        dk: u64 as "STORAGE*",
        dv: u64 as "STORAGE*",
        to_lse: u64 as "REAL*",
        dbias: u64 as "REAL*",
        // Three numbers for each tile of packed sequences: the sequence's first row and length, and the tile.
        pieces: u64 as "const int*",
        // The shift of scores before exponentiation, and delta, both (B, H, `all_queries`).
        shift: u64 as "REAL*",
        delta: u64 as "REAL*",
        q_at: At,
        k_at: At,
        v_at: At,
        y_at: At,
        mask_at: [i64; 4],
        bias_at: [i64; 4],
        // Number of elements of the bias.
        bias_count: i64,
        batch: i32,
        heads: i32,
        key_heads: i32,
        queries: i32,
        keys: i32,
        // The queries of all packed sequences; for the gradient, the padded queries of a head.
        all_queries: i32,
        width: i32,
        value_width: i32,
        // The position of the first query among the keys, between -queries and keys.
        offset: i32,
        // Tiles of a head, and heads whose blocks are interleaved.
        tiles: i32,
        together: i32,
        // Parts into which the sum for dbias is divided.
        parts: i32,
        scale: R,
    }
}

/// The rows that the blocks of a launch own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Own {
    Queries,
    Keys,
}

/// A kernel, which takes a `P`, and how it is launched.
struct Launch<P: 'static = Params<()>> {
    source: &'static Source<P>,
    options: String,
    threads: usize,
    /// Bytes of shared memory.
    shared: usize,
    own: Own,
    /// Rows that a block owns.
    rows: usize,
    /// Blocks that share these rows, each for some columns of the result.
    slices: usize,
    /// The most blocks of the grid. Where there is more work, each block does several parts of it.
    most: u32,
}

/// A call with its buffers.
struct Call<'a, R> {
    problem: &'a Problem,
    /// The steps of packed sequences.
    steps: Steps<'a>,
    lane: &'a Lane,
    params: Params<R>,
    /// The gradient of the bias, if it is an output.
    dbias: Option<&'a Buffer>,
    /// The largest possible asynchronous copy into shared memory, in bytes, or 0.
    copy: usize,
}

impl<'a, R: Real> Call<'a, R> {
    fn new(
        problem: &'a Problem,
        inputs: &Named<&'a Buffer>,
        outputs: &Named<&'a Buffer>,
        steps: Steps<'a>,
        lane: &'a Lane,
    ) -> Result<Self> {
        let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let strides = |of: Option<[usize; 4]>| of.unwrap_or_default().map(|stride| stride as i64);
        let (queries, keys) = (count("q", problem.queries)?, count("k", problem.keys)?);
        let dbias = outputs.find("dbias").copied();
        let params = Params {
            q: at(inputs, "q")?,
            k: at(inputs, "k")?,
            v: at(inputs, "v")?,
            y: at(inputs, "y")?,
            dy: at(inputs, "dy")?,
            mask: at(inputs, "mask")?,
            bias: at(inputs, "bias")?,
            lse: at(inputs, "lse")?,
            dlse: at(inputs, "dlse")?,
            to: at(outputs, "y")?,
            dq: at(outputs, "dq")?,
            dk: at(outputs, "dk")?,
            dv: at(outputs, "dv")?,
            to_lse: at(outputs, "lse")?,
            dbias: at(outputs, "dbias")?,
            q_at: problem.q.into(),
            k_at: problem.k.into(),
            v_at: problem.v.into(),
            y_at: problem.y.into(),
            mask_at: strides(problem.mask),
            bias_at: strides(problem.bias),
            bias_count: dbias.map_or(0, |dbias| dbias.spec().shape.elements() as i64),
            batch: count("q", problem.batch)?,
            heads: count("q", problem.heads)?,
            key_heads: count("k", problem.key_heads)?,
            queries,
            keys,
            all_queries: queries,
            width: count("q", problem.width)?,
            value_width: count("v", problem.value_width)?,
            // Beyond these bounds the result does not change, and sums with the offset fit in 32 bits.
            offset: problem.causal.unwrap_or(0).clamp(-i64::from(queries), i64::from(keys)) as i32,
            scale: R::of(problem.scale),
            ..Params::default()
        };
        let mut call = Call { problem, steps, lane, params, dbias, copy: 0 };
        call.copy = call.widest_copy();
        Ok(call)
    }

    /// The largest copy whose size divides the addresses and the row strides of all tensors, or 0.
    fn widest_copy(&self) -> usize {
        let Params { q, k, v, y, dy, to, dq, dk, dv, .. } = self.params;
        let Problem { width, value_width, dtype, .. } = *self.problem;
        let row = |width: usize| (width * dtype.size()) as u64;
        let all = [q, k, v, y, dy, to, dq, dk, dv, row(width), row(value_width)];
        // A tensor without an address is not copied, or has no rows; 0 is a multiple of any size.
        let none = row(width) * row(value_width) == 0 || self.lane.device().facts().capability.0 < 8;
        let least = dtype.size().max(4);
        let fits = |bytes: &u64| *bytes >= least as u64 && all.iter().all(|at| at.is_multiple_of(*bytes));
        if none { 0 } else { [16, 8, 4].into_iter().find(fits).unwrap_or(0) as usize }
    }

    /// The compiler options common to all kernels.
    fn options(&self) -> String {
        let [causal, packed] = [self.problem.causal.is_some(), self.steps.is_some()].map(u32::from);
        format!("{} -DCAUSAL={causal} -DPACKED={packed}", types(self.problem.dtype))
    }

    /// Queues a launch over the owned rows of all heads.
    fn launch(&self, launch: &Launch) -> Result<()> {
        self.launch_with(launch, |params| params)
    }

    /// The same for a kernel with parameters of its own beside these.
    fn launch_with<P: Declared<Any: 'static>>(
        &self,
        launch: &Launch<P::Any>,
        params: impl Fn(Params<R>) -> P,
    ) -> Result<()> {
        let Problem { batch, heads, key_heads, queries, keys, .. } = *self.problem;
        let (heads, rows) = if launch.own == Own::Queries { (heads, queries) } else { (key_heads, keys) };
        let tiles = rows.div_ceil(launch.rows);
        let pieces = self.steps.map(|steps| self.pieces(steps, launch.own, launch.rows)).transpose()?;
        let places = pieces.as_ref().map_or(tiles * batch, |pieces| pieces.spec().shape[0]);
        let blocks = places * heads * launch.slices;
        if blocks == 0 {
            return Ok(());
        }
        let mut common = self.params;
        (common.tiles, common.together) = (tiles as i32, self.together(batch * heads) as i32);
        common.pieces = pieces.as_ref().map_or(Ok(0), |pieces| self.lane.address(pieces))?;
        let kernel = self.lane.device().kernel(launch.source, &launch.options)?;
        let (grid, threads, shared) =
            ([grid(blocks)?.min(launch.most), 1, 1], launch.threads as u32, launch.shared as u32);
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's; the shared
        // memory has the size that the kernels compute.
        unsafe { self.lane.launch_with(&kernel, grid, threads, shared, &params(common)) }
    }

    /// The tiles of packed sequences on the device: those of the longest sequence first, and of a sequence those with
    /// the most work.
    fn pieces(&self, steps: &[Range<usize>], own: Own, rows: usize) -> Result<Buffer> {
        let mut longest: Vec<&Range<usize>> = steps.iter().collect();
        longest.sort_by_key(|steps| Reverse(steps.len()));
        let tiles = |steps: &Range<usize>| steps.len().div_ceil(rows);
        let of = |steps: &Range<usize>, i: usize| {
            let tile = if own == Own::Queries { tiles(steps) - 1 - i } else { i };
            [steps.start, steps.len(), tile].map(|number| number as i32)
        };
        let pieces: Vec<[i32; 3]> =
            longest.into_iter().flat_map(|steps| (0..tiles(steps)).map(move |i| of(steps, i))).collect();
        let buffer = self.lane.temporary(Spec::new(DType::I32, &[pieces.len(), 3])?)?;
        self.lane.upload(bytemuck::cast_slice(&pieces), &buffer)?;
        Ok(buffer)
    }

    /// The number of heads whose tiles are interleaved. Causal tiles differ in their work, so several heads balance
    /// each other; their keys and values must fit in the cache together.
    fn together(&self, heads: usize) -> usize {
        let Problem { keys, width, value_width, dtype, causal, .. } = *self.problem;
        let bytes = keys * (width + value_width) * dtype.size();
        if causal.is_some() { (TOGETHER / bytes.max(1)).clamp(1, heads) } else { 1 }
    }

    /// Queues the gradient: first the statistics of each query, then the kernels of `rest`.
    fn backward(&self, statistics: Statistics, rest: impl Fn(&Self) -> Result<()>) -> Result<()> {
        let Problem { batch, heads, queries, dtype, .. } = *self.problem;
        let padded =
            if let Statistics::Preset { rows } = statistics { queries.next_multiple_of(rows) } else { queries };
        let facts = self.lane.temporary(Spec::new(dtype.wide(), &[2, batch, heads, padded])?)?;
        let shift = self.lane.address(&facts)?;
        let delta = shift + (facts.spec().bytes() / 2) as u64;
        let call = Call { params: Params { shift, delta, all_queries: count("q", padded)?, ..self.params }, ..*self };
        let binary = u32::from(statistics == Statistics::Binary);
        let preset = u32::from(matches!(statistics, Statistics::Preset { .. }));
        let lanes = if dtype.size() == 2 { 32 } else { 1 };
        let options = format!("{} -DCOPY=0 -DLANES={lanes} -DBINARY={binary} -DPRESET={preset}", self.options());
        let kernel = self.lane.device().kernel(&DELTA, &options)?;
        // SAFETY: as above; there are `lanes` threads per row.
        unsafe { launch_each(self.lane, &kernel, lanes * batch * heads * padded, &call.params)? };
        rest(&call)
    }
}

/// A size as i32, within the limits of the kernels.
fn count(name: &str, size: usize) -> Result<i32> {
    if size < MOST {
        return Ok(size as i32);
    }
    Err(Error::new(Kind::Size, name).expected(format_args!("sizes below {MOST}")).got(size))
}

/// The size of a grid. It always fits: larger ones would need more memory than any device has.
fn grid(blocks: usize) -> Result<u32> {
    let fits = u32::try_from(blocks).ok().filter(|&blocks| blocks < 1 << 31);
    fits.ok_or_else(|| Error::new(Kind::Size, "launch").expected("fewer than 2^31 blocks").got(blocks))
}
