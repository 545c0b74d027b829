//! The recurrences on CUDA, step by step in f32 (f64 for f64), for any type and sizes: `columns.cu`. A call with one step,
//! as in decoding, reads and writes each state once. Sequences run in chunks on tensor cores where storage and sizes allow.

mod backward;
mod chunked;

use super::{EPS, Form, Problem};
use crate::cuda::{Buffer, Lane, Source, grid_size, params, types};
use crate::error::{Error, Kind, Result};
use crate::op::Named;
use crate::ops::scan::border::Border;
use crate::ops::scan::sequences::{self, Sequences};
use crate::tensor::DType;
pub use backward::{backward, backward_packed};
use chunked::Chunked;
use std::ops::Range;

const COLUMNS: Source<Params> =
    Source::new("matrix_state_columns", concat!(include_str!("staged.cu"), include_str!("columns.cu")));

/// Steps between states that the gradient keeps.
const CHUNK: usize = sequences::CHUNK;
/// Warps of a block that fetch the inputs of steps.
const FETCHERS: usize = 4;
/// The most steps of a stage.
const MOST_STEPS: usize = 16;
/// The most bytes of shared memory that stages of several steps take: little enough that two blocks share a
/// multiprocessor, however large its cache.
const SHARED: usize = 48 << 10;

params! {
    /// The kernels' parameters.
    #[derive(Default)]
    pub struct Params {
        q: u64 as "const STORAGE*",
        k: u64 as "const STORAGE*",
        v: u64 as "const STORAGE*",
        beta: u64 as "const STORAGE*",
        dy: u64 as "const STORAGE*",
        g: u64 as "const REAL*",
        initial: u64 as "const REAL*",
        dlast: u64 as "const REAL*",
        y: u64 as "STORAGE*",
        last: u64 as "REAL*",
        dq: u64 as "STORAGE*",
        dk: u64 as "STORAGE*",
        dv: u64 as "STORAGE*",
        dbeta: u64 as "STORAGE*",
        dg: u64 as "REAL*",
        dinitial: u64 as "REAL*",
        errors: u64 as "REAL*",    // e (B, L, H, V)
        derrors: u64 as "REAL*",   // de
        q_factors: u64 as "REAL*", // inverse norms of q (B, L, G)
        k_factors: u64 as "REAL*",
        sums: [u64; 3] as "REAL*", // S dy, -a S (beta de) by the delta rule, and G (beta e) (slices, B, L, H, K)
        ends: u64 as "REAL*",      // states after chunks (B, H, chunks, K, V)
        products: u64 as "REAL*",  // inner products of `ends` and cotangents, by warp (B, H, chunks, products_each), or
                                   // without the delta rule by key (slices, B, H, chunks, K)
        changes: u64 as "REAL*",   // dg[t] - dg[t+1], of the shape of g
        inverses: u64 as "STORAGE*", // of I + L (H, chunks of all sequences, CHUNK, CHUNK); likewise P
        scores: u64 as "STORAGE*",
        factors: u64 as "float*",  // of the steps of chunks (H, chunks of all, 4, CHUNK), or decays by key (.., KEYS)
        by_key: [u64; 2] as "STORAGE*", // q and k with decays (B, L, H, K)
        before: u64 as "STORAGE*", // states before chunks (H, chunks of all, K, V)
        after: u64 as "STORAGE*",  // cotangents of states after chunks
        inputs: u64 as "STORAGE*", // U, and dZ (B, L, H, V)
        dz: u64 as "STORAGE*",
        sequences: u64 as "const int*", // of a packed call: see sequences.rs
        of_segments: u64 as "const int*",
        of_chunks: u64 as "const int*",
        starts: u64 as "float*", // states by segment of all sequences and head: at its end, then at its start
        totals: u64 as "float*", // log2 of the decays of segments
        transitions: [u64; 2] as "float*", // of segments by the delta rule (segments, H, K, K), transposed and not
        length: i64,
        chunks: i64, // of a sequence of a batch
        segments: i32,
        each: i32, // chunks of a segment
        all_segments: i32,
        size: i32, // elements of the state of a head
        decays: i32, // of a step of a head
        batch: i32,
        heads: i32,
        all_chunks: i32,
        groups: i32,
        keys: i32,
        values: i32,
        blocks: i32, // blocks of a head's columns, and of a transition's
        of_values: i32, // those of a head's columns
        slices: i32,
        products_each: i32,
        scale: f64,
    }
}

/// Queues the op.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call::new(problem, inputs, outputs, lane)?;
    match Chunked::of(call, call.of_batch()) {
        Some(chunked) => chunked?.forward(),
        None => call.with_first_states()?.columns(Wanted::Outputs),
    }
}

/// Queues a packed call of the op, if it runs in chunks.
pub fn forward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    let call = Call::new(problem, inputs, outputs, lane)?;
    Chunked::of(call, Sequences::Packed(steps)).map_or(Ok(false), |chunked| chunked?.forward().map(|()| true))
}

/// A call with the addresses of its buffers.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    problem: &'a Problem,
    lane: &'a Lane,
    /// The states at both ends, and their cotangents.
    borders: [Border<'a>; 2],
    params: Params,
}

/// The outputs of `columns.cu`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// `y` and the last state.
    Outputs,
    /// `e`, and states after chunks.
    Errors,
    /// `de`, and inner products of states and cotangents at the ends of chunks; without the delta rule `dv`.
    Cotangents,
}

impl<'a> Call<'a> {
    /// Takes the addresses of the call's tensors, but for [`Call::with_first_states`].
    pub fn new(
        problem: &'a Problem,
        inputs: &Named<&'a Buffer>,
        outputs: &Named<&'a Buffer>,
        lane: &'a Lane,
    ) -> Result<Call<'a>> {
        let from = |name| inputs.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let to = |name| outputs.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let columns = Columns::new(problem, lane);
        let params = Params {
            q: from("q")?,
            k: from("k")?,
            v: from("v")?,
            beta: from("beta")?,
            dy: from("dy")?,
            g: from("g")?,
            y: to("y")?,
            last: to("last_state")?,
            dq: to("dq")?,
            dk: to("dk")?,
            dv: to("dv")?,
            dbeta: to("dbeta")?,
            dg: to("dg")?,
            dinitial: to("dinitial_state")?,
            length: problem.length as i64,
            chunks: problem.length.div_ceil(CHUNK) as i64,
            batch: problem.batch as i32,
            heads: problem.heads as i32,
            decays: problem.decays() as i32,
            groups: problem.groups as i32,
            keys: problem.keys as i32,
            values: problem.values as i32,
            blocks: columns.blocks as i32,
            products_each: (columns.blocks * columns.workers) as i32,
            scale: problem.scale,
            ..Params::default()
        };
        let borders = [false, true].map(|reverse| Border::new(inputs, outputs, reverse));
        let call = Call { problem, lane, borders, params };
        if lane.gives_states_first() { Ok(call) } else { call.with_first_states() }
    }

    /// Takes the addresses of the states that sequences start from.
    fn with_first_states(mut self) -> Result<Call<'a>> {
        let [initial, dlast] = self.borders.map(|border| border.first(self.lane));
        (self.params.initial, self.params.dlast) = (initial?, dlast?);
        Ok(self)
    }

    /// The sequences of a call that is not packed.
    fn of_batch(&self) -> Sequences<'static> {
        Sequences::Batch { count: self.problem.batch, length: self.problem.length }
    }

    /// The compiler options of all kernels.
    fn options(&self) -> String {
        let Problem { qk_l2norm, dtype, form, .. } = *self.problem;
        // `columns.cu` computes the norms. Without values it has no blocks, and all sums are zero.
        let norm = qk_l2norm && self.problem.values > 0;
        let (gate, norm) = (u32::from(self.params.g != 0), u32::from(norm));
        let (delta, by_key) = (u32::from(form == Form::Delta), u32::from(form == Form::ByKey));
        let form = format!("-DDELTA={delta} -DBY_KEY={by_key}");
        format!("{} -DCHUNK={CHUNK} -DEPS={EPS:e} -DGATE={gate} -DNORM={norm} {form}", types(dtype))
    }

    /// Queues `columns.cu`.
    pub fn columns(&self, wanted: Wanted) -> Result<()> {
        let columns = Columns::new(self.problem, self.lane);
        let Columns { lanes, rows, each, workers, blocks } = columns;
        let Params { initial, last, dlast, dinitial, .. } = self.params;
        let unit = each * self.problem.dtype.wide().size();
        let aligned = [initial, last, dlast, dinitial].iter().all(|at| at.is_multiple_of(unit as u64));
        let vector = self.problem.values.is_multiple_of(each) && aligned;
        let options = format!(
            "-DLANES={lanes} -DROWS={rows} -DEACH={each} -DWANTED={} -DBACKWARD={} -DVECTOR={}",
            wanted as u32,
            u32::from(wanted == Wanted::Cotangents),
            u32::from(vector),
        );
        let decays = if self.problem.form == Form::ByKey { lanes * rows } else { 1 };
        let of_step = 2 * lanes * rows + workers * columns.of_warp() + decays + 1;
        let Problem { batch, heads, .. } = *self.problem;
        self.staged(&COLUMNS, &options, batch * heads * blocks, [workers, of_step])
    }

    /// Queues blocks that go through time in stages, with `workers` warps besides those that fetch. A step takes
    /// `of_step` elements of shared memory.
    fn staged(
        &self,
        source: &Source<Params>,
        options: &str,
        blocks: usize,
        [workers, of_step]: [usize; 2],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let stages = |steps: usize| 2 * (steps * of_step * self.problem.dtype.wide().size()).next_multiple_of(16);
        let fits = |steps: &usize| stages(*steps) <= SHARED;
        let steps = [MOST_STEPS, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let device = self.lane.device();
        if stages(steps) > device.facts().shared as usize {
            return Err(Error::new(Kind::Size, "q")
                .expected(format_args!("a step that fits {} bytes of shared memory twice", device.facts().shared))
                .got(format_args!("{} keys", self.problem.keys)));
        }
        let all = format!("{} -DWORKERS={workers} -DFETCHERS={FETCHERS} -DSTEPS={steps} {options}", self.options());
        let (kernel, threads) = (device.kernel(source, &all)?, 32 * (workers + FETCHERS) as u32);
        // SAFETY: the op's checks prove the sizes of its tensors, and temporary buffers are allocated for them; the
        // kernel uses shared memory for two stages.
        unsafe {
            self.lane.launch_with(&kernel, [grid_size(blocks)?, 1, 1], threads, stages(steps) as u32, &self.params)
        }
    }
}

/// How the columns of states are spread over warps.
#[derive(Clone, Copy)]
struct Columns {
    /// Lanes that share a column, and rows of each.
    lanes: usize,
    rows: usize,
    /// Columns of a lane.
    each: usize,
    /// Warps of a block that hold columns, and blocks of a head.
    workers: usize,
    blocks: usize,
}

impl Columns {
    /// Takes as many columns per lane as leave a block for each multiprocessor, since a lane reads keys once for all
    /// its columns.
    fn new(problem: &Problem, lane: &Lane) -> Columns {
        let lanes = [8, 16].into_iter().find(|lanes| problem.keys <= 16 * lanes).unwrap_or(32);
        let rows = 4 * problem.keys.div_ceil(4 * lanes).max(1);
        // The most elements of a state in the registers of a lane.
        let most = if problem.dtype == DType::F64 { 32 } else { 64 };
        let all =
            [4, 2].into_iter().filter(|each| each * rows <= most).map(|each| Columns::of([lanes, rows, each], problem));
        let busy = lane.device().facts().multiprocessors as usize;
        let mut enough = all.filter(|columns| problem.batch * problem.heads * columns.blocks >= busy);
        enough.next().unwrap_or(Columns::of([lanes, rows, 1], problem))
    }

    fn of([lanes, rows, each]: [usize; 3], problem: &Problem) -> Columns {
        let of_warp = 32 / lanes * each;
        let workers = problem.values.div_ceil(of_warp).clamp(1, 4);
        Columns { lanes, rows, each, workers, blocks: problem.values.div_ceil(workers * of_warp) }
    }

    /// Columns of a warp.
    fn of_warp(&self) -> usize {
        32 / self.lanes * self.each
    }
}
