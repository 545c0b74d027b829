//! The recurrence on CUDA: one persistent launch walks through time, with the matrices on the multiprocessors. Matrices
//! that fit in the registers and shared memory of a cluster are held by every cluster, each of which walks one or a few
//! sequences. Larger ones are divided over the whole device, which walks a few sequences at a time.
//!
//! As on the CPU, terms that do not depend on the state, or only on known states, are computed before and after the
//! walk, as products of large matrices.

mod plan;

use super::{EPS, Problem};
use crate::cuda::{
    self, Buffer, Epilogue, Kernel, Lane, Matrix, Source, Together, grid_size, launch_each, params, type_names,
};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Described, Spec};
use plan::{Plan, Walk};

macro_rules! walk {
    ($name:literal, $file:literal) => {
        Source::new(
            $name,
            concat!(
                include_str!("../../../cuda/include/activation.cu"),
                include_str!("../../../cuda/include/cluster.cu"),
                include_str!("walk.cu"),
                include_str!($file)
            ),
        )
    };
}

const FORWARD: Source<Params<()>> = walk!("recurrence_forward", "forward.cu");
const BACKWARD: Source<Params<()>> = walk!("recurrence_backward", "backward.cu");
const CONVERT: Source<Prepare> = Source::new("recurrence_convert", include_str!("prepare.cu"));
const BEFORE: Source<Prepare> = Source::new("recurrence_before", include_str!("prepare.cu"));
const SIZES: Source<Sizes<()>> = Source::new(
    "recurrence_sizes",
    concat!(
        include_str!("../../../cuda/include/activation.cu"),
        include_str!("../../../cuda/include/block_sum.cu"),
        include_str!("sizes.cu")
    ),
);

params! {
    /// The parameters of both walks.
    #[derive(Default)]
    struct Params<R> {
        z: u64 as "const STORAGE*",
        gamma: u64 as "const STORAGE*",
        w_gate: u64 as "const STORAGE*",
        b_gate: u64 as "const STORAGE*",
        w_mix: u64 as "const STORAGE*",
        b_mix: u64 as "const STORAGE*",
        h: u64 as "const STORAGE*",
        dh: u64 as "const STORAGE*",
        of_z: u64 as "const REAL*",
        initial_state: u64 as "const REAL*",
        dlast_state: u64 as "const REAL*",
        before: u64 as "const REAL*",
        sizes: u64 as "const REAL*",
        to: u64 as "STORAGE*",
        dgamma: u64 as "STORAGE*",
        last: u64 as "REAL*",
        dinitial_state: u64 as "REAL*",
        first: u64 as "REAL*",
        second: u64 as "REAL*",
        dz: u64 as "REAL*",
        // For walks by the grid only: buffers for exchange between blocks, and the count of arrivals at the grid's
        // barrier.
        exchange: u64 as "REAL*",
        parts: u64 as "REAL*",
        arrived: u64 as "unsigned*",
        far: u64 as "STORAGE*",
        batch: i64,
        length: i64,
        width: i64,
        first_batch: i64,
        mix: R,
        clip: R,
    }
}

params! {
    /// The parameters of `prepare.cu`.
    struct Prepare {
        from: u64 as "const FROM*",
        initial_state: u64 as "const REAL*",
        to: u64 as "TO*",
        batch: i64,
        length: i64,
        width: i64,
        count: i64,
    }
}

params! {
    /// The parameters of `sizes.cu`.
    struct Sizes<R> {
        z: u64 as "const STORAGE*",
        gamma: u64 as "const STORAGE*",
        b_gate: u64 as "const STORAGE*",
        b_mix: u64 as "const STORAGE*",
        before: u64 as "const REAL*",
        first: u64 as "const REAL*",
        second: u64 as "const REAL*",
        sizes: u64 as "REAL*",
        width: i64,
        mix: R,
    }
}

/// Queues the recurrence.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    if problem.batch * problem.length * problem.width == 0 {
        return call.copy_or_zero("initial_state", "last_state");
    }
    let of_z = call.of_z(inputs.get("z")?, inputs.find("w_mix").copied())?;
    let mut params = call.params()?;
    params.of_z = call.at(of_z.as_ref())?;
    (params.to, params.last) = (call.output("h")?, call.output("last_state")?);
    call.walk(&FORWARD, false, params)
}

/// Queues the gradient.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let call = Call { problem, inputs, outputs, lane };
    if problem.batch * problem.length * problem.width == 0 {
        for (_, output) in outputs.iter().filter(|(name, _)| *name != "dinitial_state") {
            lane.fill(output, 0)?;
        }
        return if outputs.find("dinitial_state").is_some() {
            call.copy_or_zero("dlast_state", "dinitial_state")
        } else {
            Ok(())
        };
    }
    let known = Known::new(&call)?;
    let dz = call.wide_output("dz")?;
    let mut params = call.params()?;
    (params.before, params.first) = (lane.address(&known.before)?, lane.address(&known.first)?);
    (params.second, params.dz) = (call.at(known.second.as_ref())?, lane.address(&dz)?);
    let sizes = if problem.norm { Some(call.sizes(&params)?) } else { None };
    params.sizes = call.at(sizes.as_ref())?;
    (params.dgamma, params.dinitial_state) = (call.output("dgamma")?, call.output("dinitial_state")?);
    call.walk(&BACKWARD, true, params)?;
    call.through_gates(&known, &dz)
}

/// Intermediate tensors of the gradient, in the type of the arithmetic.
struct Known {
    z: Buffer,
    w_mix: Option<Buffer>,
    before: Buffer,
    /// The gates' pre-activations without biases, overwritten by their gradients during the walk.
    first: Buffer,
    second: Option<Buffer>,
}

impl Known {
    fn new(call: &Call) -> Result<Known> {
        let z = call.widened("z")?;
        let w_gate = call.widened("w_gate")?;
        let w_mix = call.inputs.find("w_mix").map(|_| call.widened("w_mix")).transpose()?;
        let before = call.before()?;
        let first = call.sequence()?;
        call.multiply([call.rows(&before)?, call.square(&w_gate)?.transposed(), call.rows(&first)?], false)?;
        let second = call.of_z(&z, w_mix.as_ref())?;
        if let (Some(second), Some(w_mix)) = (&second, &w_mix) {
            let [_, of_h] = call.halves(w_mix)?;
            call.multiply([call.rows(&before)?, of_h.transposed(), call.rows(second)?], true)?;
        }
        Ok(Known { z, w_mix, before, first, second })
    }
}

/// A call on a lane.
struct Call<'a> {
    problem: &'a Problem,
    inputs: &'a Named<&'a Buffer>,
    outputs: &'a Named<&'a Buffer>,
    lane: &'a Lane,
}

impl Call<'_> {
    fn at(&self, buffer: Option<&Buffer>) -> Result<u64> {
        buffer.map_or(Ok(0), |buffer| self.lane.address(buffer))
    }

    fn input(&self, name: &str) -> Result<u64> {
        self.at(self.inputs.find(name).copied())
    }

    fn output(&self, name: &str) -> Result<u64> {
        self.at(self.outputs.find(name).copied())
    }

    fn wide(&self) -> DType {
        self.problem.dtype.wide()
    }

    /// Allocates a tensor like `z`, in the type of the arithmetic.
    fn sequence(&self) -> Result<Buffer> {
        let Problem { batch, length, width, .. } = *self.problem;
        self.lane.temporary(Spec::new(self.wide(), &[batch, length, width])?)
    }

    /// The output of that name if it has the type of the arithmetic, otherwise memory for its unrounded values.
    fn wide_output(&self, name: &str) -> Result<Buffer> {
        let output = *self.outputs.get(name)?;
        let spec = Spec { dtype: self.wide(), ..output.spec() };
        if spec == output.spec() { Ok(output.clone()) } else { self.lane.temporary(spec) }
    }

    fn copy_or_zero(&self, from: &str, to: &str) -> Result<()> {
        let to = self.outputs.get(to)?;
        match self.inputs.find(from) {
            Some(from) => self.lane.copy(from, to),
            None => self.lane.fill(to, 0),
        }
    }

    fn params(&self) -> Result<Params<f64>> {
        let Problem { batch, length, width, mix, clip, .. } = *self.problem;
        Ok(Params {
            z: self.input("z")?,
            gamma: self.input("gamma")?,
            w_gate: self.input("w_gate")?,
            b_gate: self.input("b_gate")?,
            w_mix: self.input("w_mix")?,
            b_mix: self.input("b_mix")?,
            dh: self.input("dh")?,
            initial_state: self.input("initial_state")?,
            dlast_state: self.input("dlast_state")?,
            batch: batch as i64,
            length: length as i64,
            width: width as i64,
            mix,
            clip: clip.unwrap_or(f64::INFINITY),
            ..Params::default()
        })
    }

    /// A sequence tensor as a matrix with a row for each batch and time.
    fn rows(&self, of: &Buffer) -> Result<Matrix> {
        let Problem { batch, length, width, .. } = *self.problem;
        Ok(Matrix::new(self.lane.address(of)?, batch * length, width))
    }

    fn square(&self, of: &Buffer) -> Result<Matrix> {
        Ok(Matrix::new(self.lane.address(of)?, self.problem.width, self.problem.width))
    }

    /// The halves of a matrix like `w_mix`: the one that multiplies `z`, and the one that multiplies the state.
    fn halves(&self, of: &Buffer) -> Result<[Matrix; 2]> {
        let (width, dtype) = (self.problem.width, of.spec().dtype);
        let whole = Matrix::new(self.lane.address(of)?, width, 2 * width);
        Ok([whole.part(0..width, dtype), whole.part(width..2 * width, dtype)])
    }

    /// Queues a product in the type of the arithmetic.
    fn multiply(&self, matrices: [Matrix; 3], add: bool) -> Result<()> {
        self.multiply_as(self.wide(), matrices, add)
    }

    fn multiply_as(&self, dtype: DType, matrices: [Matrix; 3], add: bool) -> Result<()> {
        let epilogue = Epilogue { add, ..Epilogue::default() };
        // SAFETY: the op's checks prove the sizes, none of which is 0.
        unsafe { self.lane.multiply_with([dtype, self.wide()], matrices, epilogue) }
    }

    /// The part of the second gate's pre-activations that comes from `z`.
    fn of_z(&self, z: &Buffer, w_mix: Option<&Buffer>) -> Result<Option<Buffer>> {
        let Some(w_mix) = w_mix else { return Ok(None) };
        let (sums, [of_z, _]) = (self.sequence()?, self.halves(w_mix)?);
        self.multiply_as(z.spec().dtype, [self.rows(z)?, of_z.transposed(), self.rows(&sums)?], false)?;
        Ok(Some(sums))
    }

    /// An input, widened to the type of the arithmetic.
    fn widened(&self, name: &str) -> Result<Buffer> {
        let from = *self.inputs.get(name)?;
        let spec = Spec { dtype: self.wide(), ..from.spec() };
        if spec == from.spec() {
            return Ok(from.clone());
        }
        let to = self.lane.temporary(spec)?;
        self.prepare(&CONVERT, from, &to)?;
        Ok(to)
    }

    /// For each time the state before it.
    fn before(&self) -> Result<Buffer> {
        let before = self.sequence()?;
        self.prepare(&BEFORE, self.inputs.get("h")?, &before)?;
        Ok(before)
    }

    fn prepare(&self, source: &Source<Prepare>, from: &Buffer, to: &Buffer) -> Result<()> {
        let Problem { batch, length, width, .. } = *self.problem;
        let [of_from, of_to] = [from, to].map(|buffer| type_names(buffer.spec().dtype).0);
        let real = type_names(self.wide()).0;
        let kernel = self.lane.device().kernel(source, &format!("-DFROM={of_from} -DTO={of_to} -DREAL={real}"))?;
        let count = to.spec().shape.elements();
        let params = Prepare {
            from: self.lane.address(from)?,
            initial_state: self.input("initial_state")?,
            to: self.lane.address(to)?,
            batch: batch as i64,
            length: length as i64,
            width: width as i64,
            count: count as i64,
        };
        // SAFETY: both buffers have `count` elements.
        unsafe { launch_each(self.lane, &kernel, count, &params) }
    }

    /// The norm's divisor of the state at each time.
    fn sizes(&self, of: &Params<f64>) -> Result<Buffer> {
        const THREADS: u32 = 256;
        let Problem { batch, length, dtype, .. } = *self.problem;
        let sizes = self.lane.temporary(Spec::new(self.wide(), &[batch, length])?)?;
        let kernel =
            self.lane.device().kernel(&SIZES, &format!("{} -DTHREADS={THREADS} -DEPS={EPS:?}", cuda::types(dtype)))?;
        let grid = [grid_size(batch * length)?, 1, 1];
        let to = self.lane.address(&sizes)?;
        let Params { z, gamma, b_gate, b_mix, before, first, second, width, mix, .. } = *of;
        macro_rules! with {
            ($mix:expr) => {
                Sizes { z, gamma, b_gate, b_mix, before, first, second, sizes: to, width, mix: $mix }
            };
        }
        // SAFETY: there is one block per time of each sequence.
        unsafe {
            match self.wide() {
                DType::F64 => self.lane.launch(&kernel, grid, THREADS, &with!(mix))?,
                _ => self.lane.launch(&kernel, grid, THREADS, &with!(mix as f32))?,
            }
        }
        Ok(sizes)
    }

    /// After the walk: the gradients of weights and biases, and the part of `dz` that goes through the second gate.
    fn through_gates(&self, known: &Known, dz: &Buffer) -> Result<()> {
        let rows = self.problem.batch * self.problem.length;
        let dw_gate = self.wide_output("dw_gate")?;
        let (before, first) = (self.rows(&known.before)?, self.rows(&known.first)?.transposed());
        self.multiply([first, before, self.square(&dw_gate)?], false)?;
        self.finish("dw_gate", &dw_gate)?;
        cuda::columns(&known.first, rows, self.outputs.get("db_gate")?, self.lane)?;
        if let (Some(second), Some(w_mix)) = (&known.second, &known.w_mix) {
            let (dm, dw_mix) = (self.rows(second)?, self.wide_output("dw_mix")?);
            let ([of_z, _], [to_z, to_h]) = (self.halves(w_mix)?, self.halves(&dw_mix)?);
            self.multiply([dm, of_z, self.rows(dz)?], true)?;
            self.multiply([dm.transposed(), self.rows(&known.z)?, to_z], false)?;
            self.multiply([dm.transposed(), before, to_h], false)?;
            self.finish("dw_mix", &dw_mix)?;
            cuda::columns(second, rows, self.outputs.get("db_mix")?, self.lane)?;
        }
        self.finish("dz", dz)
    }

    /// Rounds values into an output, unless they are the output itself.
    fn finish(&self, name: &str, from: &Buffer) -> Result<()> {
        let to = self.outputs.get(name)?;
        if from.same(to) { Ok(()) } else { self.prepare(&CONVERT, from, to) }
    }

    /// Queues a walk for all sequences.
    fn walk(&self, source: &Source<Params<()>>, backward: bool, params: Params<f64>) -> Result<()> {
        let walk = Walk::new(self.problem, backward);
        match self.in_clusters(source, &walk)? {
            Some((plan, kernel)) => {
                let groups = self.problem.batch.div_ceil(plan.sequences);
                let together = Together::Cluster(plan.blocks as u32);
                self.launch(&plan, &kernel, together, grid_size(groups * plan.blocks)?, params)
            }
            None => self.on_grid(source, &walk, params),
        }
    }

    /// A plan with clusters, if the device has them and the weights fit in one. The fewer sequences per cluster the
    /// better, as long as all clusters are resident at once.
    fn in_clusters(&self, source: &Source<Params<()>>, walk: &Walk) -> Result<Option<(Plan, Kernel<Params<()>>)>> {
        let facts = self.lane.device().facts();
        if facts.capability.0 < 9 {
            return Ok(None);
        }
        let (mut sequences, mut best) = (1, None);
        while let Some(plan) = walk.in_clusters(sequences, &facts) {
            let kernel = self.lane.device().kernel(source, &self.options(walk, &plan))?;
            let size = [plan.threads() as u32, plan.shared as u32];
            let clusters = self.lane.device().clusters(&kernel, plan.blocks as u32, size)?;
            if clusters == 0 {
                break;
            }
            best = Some((plan, kernel));
            let wanted = plan::together(self.problem.batch, clusters);
            if wanted <= sequences {
                break;
            }
            sequences = wanted;
        }
        Ok(best)
    }

    fn options(&self, walk: &Walk, plan: &Plan) -> String {
        walk.options(plan, self.problem.dtype)
    }

    fn on_grid(&self, source: &Source<Params<()>>, walk: &Walk, mut params: Params<f64>) -> Result<()> {
        let batch = self.problem.batch;
        let plan = walk.on_grid(plan::together(batch, 1), &self.lane.device().facts())?;
        let kernel = self.lane.device().kernel(source, &self.options(walk, &plan))?;
        let elements = |dtype: DType, count: usize| self.lane.temporary(Spec::new(dtype, &[count])?);
        let exchange = elements(self.wide(), 2 * plan.sequences * plan.padded())?;
        let parts = elements(self.wide(), 2 * plan.sequences * plan.blocks)?;
        let (far, arrived) = (elements(self.problem.dtype, plan.far_elements())?, elements(DType::F32, 1)?);
        (params.exchange, params.parts) = (self.lane.address(&exchange)?, self.lane.address(&parts)?);
        (params.far, params.arrived) = (self.lane.address(&far)?, self.lane.address(&arrived)?);
        for first in (0..batch).step_by(plan.sequences) {
            params.first_batch = first as i64;
            self.lane.fill(&exchange, 0)?;
            self.lane.fill(&arrived, 0)?;
            self.launch(&plan, &kernel, Together::Grid, plan.blocks as u32, params)?;
        }
        Ok(())
    }

    fn launch(
        &self,
        plan: &Plan,
        kernel: &Kernel<Params<()>>,
        together: Together,
        blocks: u32,
        params: Params<f64>,
    ) -> Result<()> {
        let size = [plan.threads() as u32, plan.shared as u32];
        // SAFETY: the op's checks prove that the buffers have these sizes; the plan determines those of shared memory
        // and scratch memory.
        unsafe {
            match self.wide() {
                DType::F64 => self.lane.launch_together(kernel, together, blocks, size, &params),
                _ => self.lane.launch_together(kernel, together, blocks, size, &params.narrow()),
            }
        }
    }
}

impl Params<f64> {
    /// Narrows the parameters for kernels with arithmetic in f32.
    fn narrow(self) -> Params<f32> {
        let Params { mix, clip, .. } = self;
        macro_rules! same {
            ($($field:ident)*) => { Params { $($field: self.$field,)* mix: mix as f32, clip: clip as f32 } };
        }
        same!(z gamma w_gate b_gate w_mix b_mix h dh of_z initial_state dlast_state before sizes to dgamma
            last dinitial_state first second dz exchange parts arrived far batch length width first_batch)
    }
}
