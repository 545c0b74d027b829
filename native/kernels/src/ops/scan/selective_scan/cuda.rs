//! The scan on CUDA: its launches, and the layout of the work.

mod backward;
mod plan;

use super::{Form, Problem};
use crate::cuda::{Buffer, Kernel, Lane, Source, grid_size, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::border::Border;
use crate::ops::scan::sequences::{CHUNK, MOST_STEPS, Sequences, Table};
use crate::tensor::{DType, Spec};
pub use backward::{BackwardPlan, backward, backward_as, backward_packed};
pub use plan::Plan;
use plan::{Pass, Way};
use std::ops::Range;

const FORWARD: Source<Params<()>> = Source::new(
    "selective_scan_forward",
    concat!(
        include_str!("../step_size.cu"),
        include_str!("../sequence.cu"),
        include_str!("common.cu"),
        include_str!("forward.cu")
    ),
);

const LAST: Source<Params<()>> =
    Source::new("selective_scan_last", concat!(include_str!("common.cu"), include_str!("last.cu")));

/// CUDA's limit on a grid's second and third size; the first is 2^31 - 1.
const MOST_ROWS: usize = 65535;

/// Queues the scan.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    forward_as(problem, inputs, outputs, lane, None)
}

/// Like `forward`, with the caller's plan if there is one; for tests and measurements.
#[doc(hidden)]
pub fn forward_as(
    problem: &Problem,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
    plan: Option<Plan>,
) -> Result<()> {
    if problem.batch * problem.channels == 0 {
        return Ok(());
    }
    run(&Scan::of_batch(problem), inputs, outputs, lane, plan)
}

/// Queues the scan of packed sequences, all at once.
pub fn forward_packed(
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

fn run(scan: &Scan, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane, plan: Option<Plan>) -> Result<()> {
    match scan.problem.dtype {
        DType::F64 => Call::<f64>::new(scan, inputs, outputs, lane)?.run(plan, |bound| bound),
        _ => Call::<f32>::new(scan, inputs, outputs, lane)?.run(plan, |bound| bound as f32),
    }
}

/// A call over the sequences of a batch, or over packed ones.
struct Scan<'a> {
    /// Its batch is the number of sequences, and its length that of the longest one.
    problem: Problem,
    /// The problem of a batch of such length that keeps the device as busy: layouts are chosen by it.
    like: Problem,
    sequences: Sequences<'a>,
}

impl<'a> Scan<'a> {
    fn of_batch(problem: &Problem) -> Scan<'static> {
        let sequences = Sequences::Batch { count: problem.batch, length: problem.length };
        Scan { problem: problem.clone(), like: problem.clone(), sequences }
    }

    /// `None` where nothing is to be done, or too much to count in 32 bits.
    fn of_packed(problem: &Problem, steps: &'a [Range<usize>]) -> Option<Scan<'a>> {
        let sequences = Sequences::Packed(steps);
        let of = |batch| Problem { batch, length: sequences.longest(), ..problem.clone() };
        let fits = (1..MOST_STEPS).contains(&sequences.steps()) && problem.channels > 0;
        fits.then(|| Scan { problem: of(steps.len()), like: of(sequences.batch()), sequences })
    }

    /// The most chunks of time: where sequences are packed, each has workspace for those of the longest one, which should
    /// be a sixteenth of all states at most.
    fn most_chunks(&self) -> usize {
        match self.sequences {
            Sequences::Batch { .. } => usize::MAX,
            Sequences::Packed(all) => (self.sequences.steps() / (16 * all.len())).max(1),
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self.sequences, Sequences::Packed(_))
    }

    /// Uploads the table of packed sequences, in such rounds.
    fn table(&self, round: usize, lane: &Lane) -> Result<Table> {
        self.sequences.table(self.problem.length.max(1), round, lane)
    }
}

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params<R> {
        x: u64 as "const STORAGE*",
        dt: u64 as "const STORAGE*",
        z: u64 as "const STORAGE*",
        b: u64 as "const STORAGE*",
        c: u64 as "const STORAGE*",
        a: u64 as "const REAL*",
        d: u64 as "const REAL*",
        dt_bias: u64 as "const REAL*",
        initial_state: u64 as "const REAL*",
        y: u64 as "STORAGE*",
        last_state: u64 as "REAL*",
        states: u64 as "REAL*",
        // End states and sums of delta of the first `end_chunks` chunks, (chunks, B, D, N) and (chunks, B, D).
        ends: u64 as "REAL*",
        sums: u64 as "REAL*",
        // Sums of y over the slabs of states before this one, (B, L, D).
        partial: u64 as "REAL*",
        sequences: u64 as "const int*", // of a packed call: see sequences.rs
        batch: i64,
        length: i64,
        channels: i64,
        state: i64,
        // Groups of B and C, and channels in each.
        groups_b: i64,
        groups_c: i64,
        share_b: i64,
        share_c: i64,
        // Channels of a section. No block has channels of two sections, so that its tiles of B and C are those of one
        // group.
        section: i64,
        // Steps per chunk, a multiple of the tile, and the number of chunks.
        chunk: i64,
        chunks: i64,
        end_chunks: i64,
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

/// A call with the addresses of its buffers and the parameters that do not depend on its layout.
struct Call<'a, R> {
    scan: &'a Scan<'a>,
    problem: &'a Problem,
    lane: &'a Lane,
    border: Border<'a>,
    params: Params<R>,
}

impl<'a, R: Copy + Default> Call<'a, R> {
    fn new(scan: &'a Scan, inputs: &Named<&'a Buffer>, outputs: &Named<&'a Buffer>, lane: &'a Lane) -> Result<Self> {
        let problem = &scan.problem;
        let at = |tensors: &Named<&Buffer>, name| tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
        let wanted = |name, wanted: bool| if wanted { at(outputs, name) } else { Ok(0) };
        let (groups_b, groups_c) = (groups(problem.b), groups(problem.c));
        let params = Params {
            x: at(inputs, "x")?,
            dt: at(inputs, "dt")?,
            z: at(inputs, "z")?,
            b: at(inputs, "B")?,
            c: at(inputs, "C")?,
            a: at(inputs, "A")?,
            d: at(inputs, "D")?,
            dt_bias: at(inputs, "dt_bias")?,
            y: at(outputs, "y")?,
            last_state: wanted("last_state", problem.options.return_state)?,
            states: wanted("states", problem.options.return_states)?,
            batch: problem.batch as i64,
            length: problem.length as i64,
            channels: problem.channels as i64,
            state: problem.state as i64,
            groups_b: groups_b as i64,
            groups_c: groups_c as i64,
            share_b: (problem.channels / groups_b) as i64,
            share_c: (problem.channels / groups_c) as i64,
            ..Params::default()
        };
        Ok(Call { scan, problem, lane, border: Border::new(inputs, outputs, false), params })
    }

    /// Launches one slab of states after another: registers do not hold all of them.
    fn run(mut self, plan: Option<Plan>, round: impl Fn(f64) -> R) -> Result<()> {
        let Problem { batch, channels, state, dtype, .. } = *self.problem;
        if let Some((lo, hi)) = self.problem.options.dt_clamp {
            (self.params.lo, self.params.hi) = (round(lo), round(hi));
        }
        let most = plan::most_states(dtype);
        let slabs = state.div_ceil(most).max(1);
        let processors = self.lane.device().facts().multiprocessors as usize;
        let way = |slab| Way::choose(self.scan, most.min(state - slab * most), slabs > 1, processors, plan);
        let ways: Vec<Way> = (0..slabs).map(way).collect();
        let partial = if slabs > 1 { self.scan.sequences.steps() * channels } else { 0 };
        let states_first = self.lane.gives_states_first() && self.params.last_state != 0;
        let ended = |way: &Way| if states_first { way.chunks } else { way.chunks - 1 };
        let cuts = ways.iter().map(|way| ended(way) * way.end_elements(self.problem)).max().unwrap_or(0);
        let at = self.lane.scratch(Spec::new(dtype.wide(), &[partial + cuts])?.bytes())?;
        let after = |elements: usize| at + (elements * dtype.wide().size()) as u64;
        self.params.partial = at;
        let table = self.scan.table(ways[0].round(self.problem, processors), self.lane)?;
        self.params.sequences = table.sequences;
        for (slab, way) in ways.iter().enumerate() {
            let ends = ended(way) * batch * channels * way.states;
            self.params.end_chunks = ended(way) as i64;
            (self.params.ends, self.params.sums) = (after(partial), after(partial + ends));
            self.params.first_state = (slab * most) as i64;
            (self.params.first_slab, self.params.last_slab) = ((slab == 0) as i32, (slab + 1 == slabs) as i32);
            self.slab(way, states_first)?;
        }
        Ok(())
    }

    /// One launch, or two where time is cut into chunks: the first computes the states at the ends of chunks, all but the
    /// last, whose end state no other chunk needs. With `states_first` also that, and the last state from them.
    fn slab(&mut self, way: &Way, states_first: bool) -> Result<()> {
        self.params.section = way.section as i64;
        self.params.chunk = way.chunk as i64;
        self.params.chunks = way.chunks as i64;
        self.params.sections = grid_size(self.problem.channels / way.section)?;
        self.params.section_blocks = grid_size(way.section_blocks())?;
        let ended = self.params.end_chunks as usize;
        if ended > 0 {
            self.launch(way, Pass::Ends, ended)?;
        }
        self.params.initial_state = self.border.first(self.lane)?;
        if !states_first {
            return self.launch(way, Pass::Results, way.chunks);
        }
        self.last(way)?;
        let last_state = std::mem::take(&mut self.params.last_state);
        self.launch(way, Pass::Results, way.chunks)?;
        self.params.last_state = last_state;
        Ok(())
    }

    /// Queues the last states from those at the ends of chunks.
    fn last(&self, way: &Way) -> Result<()> {
        let (threads, states) = (256, self.problem.batch * self.problem.channels * way.states);
        if states == 0 {
            return self.border.written(self.lane);
        }
        let options = format!("{} -DN={} -DK=1 -DP={1} -DTHREADS={threads}", types(self.problem.dtype), way.states);
        let kernel = self.lane.device().kernel(&LAST, &options)?;
        let grid = [grid_size(states.div_ceil(threads))?, 1, 1];
        // SAFETY: as below.
        unsafe { self.lane.launch(&kernel, grid, threads as u32, &self.params)? };
        self.border.written(self.lane)
    }

    fn launch(&self, way: &Way, pass: Pass, chunks: usize) -> Result<()> {
        let kernel = self.kernel(way, pass)?;
        let batch = self.problem.batch;
        let rows = batch.min(MOST_ROWS);
        let grid =
            [grid_size(way.blocks(self.problem) / batch * chunks)?, grid_size(rows)?, grid_size(batch.div_ceil(rows))?];
        // SAFETY: the op's checks prove that all sizes fit the buffers, whose addresses are this lane's, as is the
        // scratch memory.
        unsafe { self.lane.launch(&kernel, grid, 32 * way.plan.warps as u32, &self.params) }
    }

    fn kernel(&self, way: &Way, pass: Pass) -> Result<Kernel<Params<()>>> {
        let Problem { dtype, ref options, .. } = *self.problem;
        let Plan { lanes, owned, warps, .. } = way.plan;
        let options = format!(
            "{} -DN={} -DK={} -DP={lanes} -DQ={} -DS={owned} \
             -DWARPS={warps} -DMIN={} -DNEAR={} -DFORM_B={} -DFORM_C={} -DHAS_D={} -DHAS_Z={} -DHAS_BIAS={} -DSOFTPLUS={} -DCLAMP={} \
             -DSTATES={} -DSLABS={} -DENDS={} {} -DCHUNK={CHUNK}",
            types(dtype),
            way.states,
            way.per_lane(),
            way.together,
            way.resident,
            u32::from(way.is_near(self.problem)),
            way.form_b.name(),
            way.form_c.name(),
            given(self.params.d),
            given(self.params.z),
            given(self.params.dt_bias),
            u32::from(options.dt_softplus),
            u32::from(options.dt_clamp.is_some()),
            given(self.params.states),
            u32::from(way.slabs),
            u32::from(pass == Pass::Ends),
            self.scan.sequences.option(),
        );
        self.lane.device().kernel(&FORWARD, &options)
    }
}

/// 1 for an optional tensor that is given, else 0, for the compiler's options.
fn given(address: u64) -> u32 {
    u32::from(address != 0)
}

fn groups(form: Form) -> usize {
    match form {
        Form::PerStep { groups } => groups,
        Form::Constant => 1,
    }
}
