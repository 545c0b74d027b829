//! The scan on CUDA: what is launched, and how the work is laid out.

mod plan;

use super::{Form, Problem};
use crate::cuda::{Buffer, Kernel, Lane, Source};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};
pub use plan::Plan;
use plan::Way;

const FORWARD: Source = Source { name: "selective_scan_forward", text: include_str!("forward.cu") };

/// CUDA's limit on the blocks of one launch.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// Queues the scan.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    forward_as(problem, inputs, outputs, lane, None)
}

/// The same, laid out as the caller says; for tests and measurements.
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
    match problem.dtype {
        DType::F64 => Call::<f64>::new(problem, inputs, outputs, lane)?.run(plan, |bound| bound),
        _ => Call::<f32>::new(problem, inputs, outputs, lane)?.run(plan, |bound| bound as f32),
    }
}

/// The kernel's parameters; the same struct is declared in `forward.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params<R> {
    x: u64,
    dt: u64,
    z: u64,
    b: u64,
    c: u64,
    a: u64,
    d: u64,
    dt_bias: u64,
    h0: u64,
    y: u64,
    last_state: u64,
    states: u64,
    ends: u64,
    sums: u64,
    partial: u64,
    batch: i64,
    length: i64,
    channels: i64,
    state: i64,
    groups_b: i64,
    groups_c: i64,
    share_b: i64,
    share_c: i64,
    section: i64,
    sections: i64,
    section_blocks: i64,
    batch_blocks: i64,
    chunk: i64,
    chunks: i64,
    first_block: i64,
    first_state: i64,
    lo: R,
    hi: R,
    first_slab: i32,
    last_slab: i32,
}

/// A call whose buffers are known, with the parameters that do not depend on its layout.
struct Call<'a, R> {
    problem: &'a Problem,
    lane: &'a Lane,
    params: Params<R>,
}

impl<'a, R: Copy + Default> Call<'a, R> {
    fn new(problem: &'a Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &'a Lane) -> Result<Self> {
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
            h0: at(inputs, "h0")?,
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
        Ok(Call { problem, lane, params })
    }

    /// Launches slab after slab of states: registers hold only so many.
    fn run(mut self, plan: Option<Plan>, round: impl Fn(f64) -> R) -> Result<()> {
        let Problem { batch, length, channels, state, dtype, .. } = *self.problem;
        if let Some((lo, hi)) = self.problem.options.dt_clamp {
            (self.params.lo, self.params.hi) = (round(lo), round(hi));
        }
        let most = plan::most_states(dtype);
        let slabs = state.div_ceil(most).max(1);
        let partial = if slabs > 1 { &[batch, length, channels][..] } else { &[0] };
        let partial = self.lane.scratch(Spec::new(dtype.wide(), partial)?)?;
        self.params.partial = partial.address();
        for slab in 0..slabs {
            let states = most.min(state - slab * most);
            self.params.first_state = (slab * most) as i64;
            (self.params.first_slab, self.params.last_slab) = ((slab == 0) as i32, (slab + 1 == slabs) as i32);
            let facts = self.lane.device().facts();
            let way = Way::choose(self.problem, states, slabs > 1, facts.multiprocessors as usize, plan);
            self.slab(&way)?;
        }
        Ok(())
    }

    /// One launch; or two where time is cut into chunks: the first finds where the chunks end.
    fn slab(&mut self, way: &Way) -> Result<()> {
        let Problem { batch, channels, dtype, .. } = *self.problem;
        self.params.section = way.section as i64;
        self.params.sections = (channels / way.section) as i64;
        self.params.section_blocks = way.section_blocks() as i64;
        self.params.batch_blocks = self.params.sections * self.params.section_blocks;
        self.params.chunk = way.chunk as i64;
        self.params.chunks = way.chunks as i64;
        let cuts = way.chunks - 1;
        let ends = self.lane.scratch(Spec::new(dtype.wide(), &[cuts, batch, channels, way.states])?)?;
        let sums = self.lane.scratch(Spec::new(dtype.wide(), &[cuts, batch, channels])?)?;
        (self.params.ends, self.params.sums) = (ends.address(), sums.address());
        if cuts > 0 {
            self.launch(way, 1, cuts)?;
        }
        self.launch(way, 0, way.chunks)
    }

    fn launch(&mut self, way: &Way, pass: u32, chunks: usize) -> Result<()> {
        let kernel = self.kernel(way, pass)?;
        let blocks = (way.blocks(self.problem) * chunks) as u64;
        let mut first = 0;
        while first < blocks {
            let some = (blocks - first).min(MOST_BLOCKS);
            self.params.first_block = first as i64;
            // SAFETY: Params is the struct that the kernel declares; the op's checks prove that all
            // sizes fit the buffers, whose addresses are this lane's.
            unsafe { self.lane.launch(&kernel, some as u32, 32 * way.plan.warps as u32, &self.params)? };
            first += some;
        }
        Ok(())
    }

    fn kernel(&self, way: &Way, pass: u32) -> Result<Kernel> {
        let Problem { dtype, ref options, .. } = *self.problem;
        let (storage, real) = match dtype {
            DType::F64 => ("double", "double"),
            DType::F32 => ("float", "float"),
            DType::Bf16 => ("bf16", "float"),
            DType::F16 => ("f16", "float"),
        };
        let Plan { lanes, owned, warps, .. } = way.plan;
        let given = |address: u64| u32::from(address != 0);
        let options = format!(
            "-DSTORAGE={storage} -DREAL={real} -DN={} -DK={} -DP={lanes} -DQ={} -DS={owned} \
             -DWARPS={warps} -DNEAR={} -DFORM_B={} -DFORM_C={} -DHAS_D={} -DHAS_Z={} -DHAS_BIAS={} -DSOFTPLUS={} -DCLAMP={} \
             -DSTATES={} -DSLABS={} -DPASS={pass}",
            way.states,
            way.per_lane(),
            way.together,
            u32::from(way.is_near(self.problem)),
            way.form_b as u32,
            way.form_c as u32,
            given(self.params.d),
            given(self.params.z),
            given(self.params.dt_bias),
            u32::from(options.dt_softplus),
            u32::from(options.dt_clamp.is_some()),
            given(self.params.states),
            u32::from(way.slabs),
        );
        self.lane.device().kernel(&FORWARD, &options)
    }
}

fn groups(form: Form) -> usize {
    match form {
        Form::PerStep { groups } => groups,
        Form::Constant => 1,
    }
}
