//! The gradient of the scan on CUDA: its launches, and the layout of the work.

mod plan;

use super::super::{ClampGrad, Form, Problem};
use super::plan::Pass;
use super::{Scan, given, groups};
use crate::cuda::{Buffer, Kernel, Lane, Source, grid_size, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::border::Border;
use crate::ops::scan::sequences::{CHUNK, Table};
use crate::tensor::{DType, Spec};
pub use plan::BackwardPlan;
use plan::{Rooms, STAGE, SUB, TILE, Way};
use std::ops::Range;

const BACKWARD: Source<Params<()>> = Source::new(
    "selective_scan_backward",
    concat!(
        include_str!("../../step_size.cu"),
        include_str!("../../slopes.cu"),
        include_str!("../../sequence.cu"),
        include_str!("../backward/row.cu"),
        include_str!("../common.cu"),
        include_str!("../backward/thread.cu"),
        include_str!("../backward/ends.cu"),
        include_str!("../backward/gradients.cu"),
        include_str!("../backward.cu"),
    ),
);
const COMPOSE: Source<Compose> = Source::new(
    "compose",
    concat!(include_str!("../../sequence.cu"), include_str!("../backward/row.cu"), include_str!("../compose.cu")),
);
const SUM_PARTS: Source<Jobs> = Source::new("sum_parts", include_str!("../sum_parts.cu"));

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    backward_as(problem, inputs, outputs, lane, None)
}

/// Like `backward`, with the caller's plan if there is one; for tests and measurements.
#[doc(hidden)]
pub fn backward_as(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
    plan: Option<BackwardPlan>,
) -> Result<()> {
    run(&Scan::of_batch(problem), inputs, outputs, lane, plan)
}

/// Queues the gradient of packed sequences, all at once.
pub fn backward_packed(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    steps: &[Range<usize>],
    lane: &Lane,
) -> Result<bool> {
    match Scan::of_packed(problem, steps) {
        Some(scan) => run(&scan, inputs, outputs, lane, None).map(|()| true),
        None => Ok(false),
    }
}

fn run(
    scan: &Scan,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
    plan: Option<BackwardPlan>,
) -> Result<()> {
    match scan.problem.dtype {
        DType::F64 => Call::<f64>::new(scan, inputs, outputs, lane)?.run(plan, |bound| bound),
        _ => Call::<f32>::new(scan, inputs, outputs, lane)?.run(plan, |bound| bound as f32),
    }
}

params! {
    /// The parameters of `backward.cu`.
    #[derive(Default)]
    struct Params<R> {
        x: u64 as "const STORAGE*",
        dt: u64 as "const STORAGE*",
        z: u64 as "const STORAGE*",
        b: u64 as "const STORAGE*",
        c: u64 as "const STORAGE*",
        dy: u64 as "const STORAGE*",
        a: u64 as "const REAL*",
        d: u64 as "const REAL*",
        dt_bias: u64 as "const REAL*",
        initial_state: u64 as "const REAL*",
        dlast_state: u64 as "const REAL*",
        dstates: u64 as "const REAL*",
        dx: u64 as "STORAGE*",
        ddt: u64 as "STORAGE*",
        dz: u64 as "STORAGE*",
        db: u64 as "STORAGE*",
        dc: u64 as "STORAGE*",
        dinitial_state: u64 as "REAL*",
        // `bounds`: states after every tile but the last, (tiles - 1, B, D, N). Where there are several chunks, they
        // start from zero in each chunk, and `passed` has the sums of the chunk's deltas up to the end of each tile,
        // (tiles, B, D). Both are (rows, D, N) and (rows, D) with the rows of row.cu where sequences are packed.
        bounds: u64 as "REAL*",
        passed: u64 as "REAL*",
        // The outgoing adjoints of chunks, and after `compose` their incoming ones, (chunks, B, D, N).
        adjoints: u64 as "REAL*",
        // Partial sums: over runs, (runs, D, N) and (runs, D); over blocks, (blocks, B, span, N), or (blocks, steps, N)
        // where sequences are packed. `part_a` reuses the memory of `adjoints`.
        part_a: u64 as "REAL*",
        part_const_b: u64 as "REAL*",
        part_const_c: u64 as "REAL*",
        part_d: u64 as "REAL*",
        part_bias: u64 as "REAL*",
        part_b: u64 as "REAL*",
        part_c: u64 as "REAL*",
        // Sums over the previous slabs of states, three of (B, L, D).
        slabs: u64 as "REAL*",
        sequences: u64 as "const int*", // of a packed call: see sequences.rs
        batch: i64,
        length: i64,
        steps: i64, // of all sequences
        channels: i64,
        state: i64,
        // Groups of B and C, and channels in each.
        groups_b: i64,
        groups_c: i64,
        share_b: i64,
        share_c: i64,
        // Channels of a section. No block has channels of two sections, so that it reads a single group of B and C.
        section: i64,
        // Steps per chunk, a multiple of the tile; the number of chunks; the first chunk of this launch, and its number
        // of chunks.
        chunk: i64,
        chunks: i64,
        first_chunk: i64,
        some_chunks: i64,
        // Steps of this launch.
        span: i64,
        // Batches that a block processes one after the other; 1 where there are several chunks.
        batches: i64,
        first_state: i64,
        // The number of sections, and of blocks in each.
        sections: u32,
        section_blocks: u32,
        lo: R,
        hi: R,
        first_slab: i32,
        last_slab: i32,
    }
}

params! {
    /// The parameters of `compose.cu`.
    struct Compose {
        a: u64 as "const REAL*",
        initial_state: u64 as "const REAL*",
        dlast_state: u64 as "const REAL*",
        dinitial_state: u64 as "REAL*", // where states come first
        // As in backward.cu.
        bounds: u64 as "REAL*",
        adjoints: u64 as "REAL*",
        passed: u64 as "const REAL*",
        sequences: u64 as "const int*",
        batch: i64,
        length: i64,
        chunk: i64,
        channels: i64,
        width: i64,
        state: i64,
        first_state: i64,
    }
}

params! {
    /// `groups` times `rows` rows of `width` sums over `parts` rows that lie groups-major in `from`, as
    /// (groups, parts, rows, width). The rows are some of batches of `length`: `span` in each from `first` on,
    /// and go to (batches, length, groups, state), from column `column` on.
    #[derive(Default)]
    struct Job {
        from: u64 as "const REAL*",
        to: u64 as "void*",
        parts: i64,
        groups: i64,
        rows: i64,
        width: i64,
        span: i64,
        length: i64,
        first: i64,
        state: i64,
        column: i64,
        wide: i64,
    }
}

/// Threads of a block of `compose.cu` and `sum_parts.cu`.
const THREADS: u32 = 256;

/// The most sums of a call in one launch.
const MOST_JOBS: usize = 5;

params! {
    #[derive(Default)]
    struct Jobs with Job {
        jobs: [Job; MOST_JOBS],
    }
}

/// A call with the addresses of its buffers and the parameters that do not depend on its layout.
struct Call<'a, R> {
    scan: &'a Scan<'a>,
    problem: &'a Problem,
    lane: &'a Lane,
    border: Border<'a>,
    params: Params<R>,
    /// The memory of `params.sequences`.
    _table: Table,
    /// Addresses of the gradients that are sums over batch and time.
    da: u64,
    dd: u64,
    dbias: u64,
}

impl<'a, R: Copy + Default> Call<'a, R> {
    fn new(scan: &'a Scan, inputs: &Named<&'a Buffer>, outputs: &Named<&'a Buffer>, lane: &'a Lane) -> Result<Self> {
        let (problem, table) = (&scan.problem, scan.table(usize::MAX, lane)?);
        let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let (groups_b, groups_c) = (groups(problem.b), groups(problem.c));
        let params = Params {
            x: at(inputs, "x")?,
            dt: at(inputs, "dt")?,
            z: at(inputs, "z")?,
            b: at(inputs, "B")?,
            c: at(inputs, "C")?,
            dy: at(inputs, "dy")?,
            a: at(inputs, "A")?,
            d: at(inputs, "D")?,
            dt_bias: at(inputs, "dt_bias")?,
            initial_state: at(inputs, "initial_state")?,
            dstates: at(inputs, "dstates")?,
            dx: at(outputs, "dx")?,
            ddt: at(outputs, "ddt")?,
            dz: at(outputs, "dz")?,
            db: at(outputs, "dB")?,
            dc: at(outputs, "dC")?,
            sequences: table.sequences,
            batch: problem.batch as i64,
            length: problem.length as i64,
            steps: scan.sequences.steps() as i64,
            channels: problem.channels as i64,
            state: problem.state as i64,
            groups_b: groups_b as i64,
            groups_c: groups_c as i64,
            share_b: (problem.channels / groups_b) as i64,
            share_c: (problem.channels / groups_c) as i64,
            ..Params::default()
        };
        let (da, dd, dbias) = (at(outputs, "dA")?, at(outputs, "dD")?, at(outputs, "ddt_bias")?);
        let border = Border::new(inputs, outputs, true);
        Ok(Call { scan, problem, lane, border, params, _table: table, da, dd, dbias })
    }

    /// Launches one slab of states after another: registers do not hold all of them.
    fn run(mut self, plan: Option<BackwardPlan>, round: impl Fn(f64) -> R) -> Result<()> {
        if let Some((lo, hi)) = self.problem.options.dt_clamp {
            (self.params.lo, self.params.hi) = (round(lo), round(hi));
        }
        let facts = self.lane.device().facts();
        let ways = Way::slabs(self.scan, &facts, plan);
        let rooms: Vec<Rooms> = ways.iter().map(|way| way.rooms(self.problem, &self.scan.sequences)).collect();
        let elements = rooms.iter().map(Rooms::elements).max().unwrap_or(0);
        let scratch = self.lane.scratch(Spec::new(self.problem.dtype.wide(), &[elements])?.bytes())?;
        for (slab, (way, rooms)) in ways.iter().zip(&rooms).enumerate() {
            self.settle(scratch, rooms);
            (self.params.first_slab, self.params.last_slab) = ((slab == 0) as i32, (slab + 1 == ways.len()) as i32);
            self.slab(way)?;
        }
        Ok(())
    }

    /// Assigns each array its place in the workspace.
    fn settle(&mut self, scratch: u64, rooms: &Rooms) {
        let mut next = scratch;
        let mut take = |elements: usize| {
            let place = if elements > 0 { next } else { 0 };
            next += (elements * self.problem.dtype.wide().size()) as u64;
            place
        };
        let params = &mut self.params;
        // First the array that slabs pass on, so that its address is the same for all of them.
        params.slabs = take(rooms.slabs);
        params.bounds = take(rooms.bounds);
        params.adjoints = take(rooms.run_states);
        params.part_a = params.adjoints;
        params.part_const_b = take(rooms.const_b);
        params.part_const_c = take(rooms.const_c);
        params.part_b = take(rooms.part_b);
        params.part_c = take(rooms.part_c);
        params.passed = take(rooms.passed);
        params.part_d = take(rooms.run_channels);
        params.part_bias = take(rooms.run_channels);
    }

    fn slab(&mut self, way: &Way) -> Result<()> {
        let Problem { batch, channels, .. } = *self.problem;
        self.params.section = way.section as i64;
        self.params.sections = grid_size(channels.checked_div(way.section).unwrap_or(0))?;
        self.params.section_blocks = grid_size(way.section_blocks())?;
        self.params.first_state = way.first_state as i64;
        self.params.chunk = way.chunk as i64;
        self.params.chunks = way.chunks as i64;
        self.params.batches = 1;
        if batch * channels > 0 {
            (self.params.first_chunk, self.params.some_chunks) = (0, way.chunks as i64);
            if way.chunks > 1 || self.problem.length > TILE {
                self.launch(way, Pass::Ends, batch * way.chunks)?;
            }
        }
        (self.params.dlast_state, self.params.dinitial_state) =
            (self.border.first(self.lane)?, self.border.last(self.lane)?);
        if way.chunks > 1 && batch * channels > 0 {
            self.compose(way)?;
        }
        self.params.batches = way.batches as i64;
        for first in (0..way.chunks).step_by(way.some_chunks) {
            self.round(way, first)?;
        }
        self.sum(&self.over_time(way))
    }

    /// Queues the backward pass over some chunks, and its sums over channels.
    fn round(&mut self, way: &Way, first: usize) -> Result<()> {
        let Problem { batch, length, channels, .. } = *self.problem;
        let some = way.some_chunks.min(way.chunks - first);
        let start = first * way.chunk;
        let span = (some * way.chunk).min(length - start);
        (self.params.first_chunk, self.params.some_chunks) = (first as i64, some as i64);
        self.params.span = span as i64;
        if batch * channels > 0 {
            self.launch(way, Pass::Results, batch.div_ceil(way.batches) * some)?;
        }
        self.sum(&self.over_channels(way, start, span))
    }

    /// Launches a pass over `runs` runs. A run is a chunk of a batch, or the batches that a block processes one by one.
    fn launch(&self, way: &Way, pass: Pass, runs: usize) -> Result<()> {
        let kernel = self.kernel(way, pass)?;
        let grid = [grid_size(way.blocks(self.problem) * runs)?, 1, 1];
        let (threads, shared) = (32 * way.plan.warps as u32, way.shared(self.problem, pass) as u32);
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, as is the
        // scratch memory.
        unsafe { self.lane.launch_with(&kernel, grid, threads, shared, &self.params) }
    }

    /// Queues the composition of chunks, which gives the cotangent of the initial state if states come first.
    fn compose(&mut self, way: &Way) -> Result<()> {
        let states_first = self.lane.gives_states_first();
        let dinitial_state = if states_first { std::mem::take(&mut self.params.dinitial_state) } else { 0 };
        let rows = self.problem.batch * self.problem.channels;
        let params = Compose {
            a: self.params.a,
            initial_state: self.params.initial_state,
            dlast_state: self.params.dlast_state,
            dinitial_state,
            bounds: self.params.bounds,
            adjoints: self.params.adjoints,
            passed: self.params.passed,
            sequences: self.params.sequences,
            batch: self.params.batch,
            length: self.params.length,
            chunk: self.params.chunk,
            channels: self.params.channels,
            width: way.states as i64,
            state: self.params.state,
            first_state: self.params.first_state,
        };
        let options = format!(
            "{} -DTHREADS={THREADS} -DTILE={TILE} {} -DCHUNK={CHUNK}",
            types(self.problem.dtype),
            self.scan.sequences.option()
        );
        let kernel = self.lane.device().kernel(&COMPOSE, &options)?;
        let grid = [grid_size((rows * way.states).div_ceil(THREADS as usize).max(1))?, 2, 1];
        // SAFETY: as above.
        unsafe { self.lane.launch(&kernel, grid, THREADS, &params)? };
        if states_first { self.border.written(self.lane) } else { Ok(()) }
    }

    /// The sums of dB and dC over the blocks of a group, where there are several.
    fn over_channels(&self, way: &Way, first: usize, span: usize) -> Vec<Job> {
        let Problem { batch, length, .. } = *self.problem;
        let steps = self.scan.sequences.steps();
        let [batch, span, length] = if self.scan.is_packed() { [1, steps, steps] } else { [batch, span, length] };
        let job = |form, from, to| {
            let groups = groups(form);
            // Without channels there are no parts, and the sum is zero.
            let parts = way.blocks(self.problem) / groups;
            let nothing = parts == 0 && matches!(form, Form::PerStep { .. });
            (from != 0 || nothing).then_some(Job {
                from,
                to,
                parts: parts as i64,
                groups: groups as i64,
                rows: (batch * span) as i64,
                width: way.states as i64,
                span: span as i64,
                length: length as i64,
                first: first as i64,
                state: self.params.state,
                column: self.params.first_state,
                wide: 0,
            })
        };
        let b = job(self.problem.b, self.params.part_b, self.params.db);
        let c = job(self.problem.c, self.params.part_c, self.params.dc);
        b.into_iter().chain(c).collect()
    }

    /// The sums over batch and time.
    fn over_time(&self, way: &Way) -> Vec<Job> {
        let (channels, runs) = (self.params.channels, way.runs(self.problem) as i64);
        let job = |from, to, width: i64, state, column, wide| Job {
            from,
            to,
            parts: runs,
            groups: 1,
            rows: channels,
            width,
            span: channels,
            length: channels,
            first: 0,
            state,
            column,
            wide,
        };
        let states =
            |from, to, wide| job(from, to, way.states as i64, self.params.state, self.params.first_state, wide);
        let constant = |form, from, to| (form == Form::Constant).then(|| states(from, to, 0));
        let by_channel = |from, to| (to != 0 && self.params.last_slab != 0).then(|| job(from, to, 1, 1, 0, 1));
        [
            Some(states(self.params.part_a, self.da, 1)),
            constant(self.problem.b, self.params.part_const_b, self.params.db),
            constant(self.problem.c, self.params.part_const_c, self.params.dc),
            by_channel(self.params.part_d, self.dd),
            by_channel(self.params.part_bias, self.dbias),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Computes some sums in one launch.
    fn sum(&self, jobs: &[Job]) -> Result<()> {
        let elements = |job: &Job| (job.groups * job.rows * job.width) as usize;
        let most = jobs.iter().map(elements).max().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        let mut params = Jobs::default();
        params.jobs[..jobs.len()].copy_from_slice(jobs);
        let options = format!("{} -DTHREADS={THREADS} -DMOST_JOBS={MOST_JOBS}", types(self.problem.dtype));
        let kernel = self.lane.device().kernel(&SUM_PARTS, &options)?;
        // SAFETY: as above.
        unsafe {
            self.lane.launch(
                &kernel,
                [grid_size(most.div_ceil(THREADS as usize))?, jobs.len() as u32, 1],
                THREADS,
                &params,
            )
        }
    }

    fn kernel(&self, way: &Way, pass: Pass) -> Result<Kernel<Params<()>>> {
        let options = &self.problem.options;
        let constant = |form| u32::from(form == Form::Constant);
        let options = format!(
            "{} -DN={} -DK={} -DP={} -DM={} -DWARPS={} -DMIN={} -DRAGGED={} -DCONSTANT_B={} -DCONSTANT_C={} -DHAS_D={} \
             -DHAS_Z={} -DHAS_BIAS={} -DSOFTPLUS={} -DCLAMP={} -DMASK={} -DDSTATES={} -DSLABS={} -DCHUNKED={} \
             -DENDS={} -DTILE={TILE} -DSUB={SUB} -DSTAGE={STAGE} {} -DCHUNK={CHUNK}",
            types(self.problem.dtype),
            way.states,
            way.per_lane,
            way.lanes,
            way.plan.channels,
            way.plan.warps,
            way.resident(self.problem, pass),
            u32::from(way.is_ragged()),
            constant(self.problem.b),
            constant(self.problem.c),
            given(self.params.d),
            given(self.params.z),
            given(self.params.dt_bias),
            u32::from(options.dt_softplus),
            u32::from(options.dt_clamp.is_some()),
            u32::from(options.clamp_grad == ClampGrad::Mask),
            given(self.params.dstates),
            u32::from(way.slabs),
            u32::from(way.chunks > 1),
            u32::from(pass == Pass::Ends),
            self.scan.sequences.option(),
        );
        self.lane.device().kernel(&BACKWARD, &options)
    }
}
