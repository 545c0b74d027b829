//! The gradient of the scan in chunks. With `l`, `S` and `T` as in [`forward`](super::forward), `G` the cotangent of the
//! state after the chunk, `y'` the output before its gate, `dy'` its cotangent, and `E_ij = exp(l_i - l_j)` for `j <= i`,
//! else 0:
//!
//! ```text
//! u_j  = exp(l_T - l_j) G B_j + sum_i (C_i . B_j) E_ij dy'_i       dx_j = delta_j u_j + D dy'_j
//! Q_ij = (dy'_i . x_j) E_ij delta_j                                dz_j = dy_j y'_j silu'(z_j)
//! dB_j = delta_j exp(l_T - l_j) x_j G + sum_i Q_ij C_i
//! dC_i = exp(l_i) dy'_i S + sum_j Q_ij B_j
//! G   <- exp(l_T) G + sum_i exp(l_i) dy'_i C_i                     (the cotangent of S)
//! ```
//!
//! `dB` and `dC` sum over the heads of a group, so a block processes heads one after the other: `C_i . B_j` is computed
//! once, and `Q` is summed over heads before its two products. `dA = sum_t delta_t e_t` and `ddelta_t = A e_t + x_t .
//! u_t`, where `e_t` is the sum of all contributions through the decay of step `t`, from `S` and earlier steps to step
//! `t`, later ones and `G`:
//!
//! ```text
//! e_t = exp(l_T) (S . G) + sum_{i >= t} V_i + sum_{j < t} W_j + sum_{j < t <= i} (C_i . B_j) Q_ij
//! V_i = exp(l_i) dy'_i . S C_i        W_j = exp(l_T - l_j) delta_j x_j . G B_j
//! ```
//!
//! No two of these sums cancel. `e_t` is also `sum_{i >= t} (dy'_i . y'_i - delta_i x_i . u_i) + ...`, but that is a
//! difference of two sums whose factors were rounded to storage separately, and does not become 0 where the decay of
//! the step does. The last sum is therefore taken over pairs of steps, by prefix sums of rows, from the f32 sums of
//! exact products.
//!
//! The factors of products, `S` and `G` among them, are rounded to the storage type, and sums are in f32. States and
//! their cotangents are computed before, chunk by chunk in f32, by [`Call::states`].

use super::shares::shares;
use super::{CHUNK, Call, MMA, Params, Problem, ROWS, STEP_BYTES, Sequences, optional_rows, rows};
use crate::cuda::{Buffer, Lane, Source, columns, grid_size};
use crate::error::Result;
use crate::op::Named;
use crate::ops::scan::sequences;
use crate::tensor::{DType, Described, Spec};
use std::ops::Range;

const TEXTS: &[&str] = &[
    include_str!("../../../slopes.cu"),
    MMA,
    ROWS,
    sequences::TEXT,
    include_str!("../../gradient/work.cu"),
    include_str!("../../gradient/products.cu"),
    include_str!("../../gradient/results.cu"),
    include_str!("../../gradient/steps.cu"),
];
const GRADIENT: Source<Params> = Source::new("ssd_gradient", include_str!("../../gradient.cu")).after(TEXTS);

/// Warps that share 16 steps of a chunk.
const SPLIT: usize = 4;
const WARPS: usize = SPLIT * CHUNK / 16;

/// A call that the kernels support.
pub struct Gradient<'a> {
    call: Call<'a>,
    outputs: &'a Named<&'a Buffer>,
    layout: Layout,
    parts: Parts,
}

/// How the work is divided for the device.
#[derive(Clone, Copy)]
struct Layout {
    /// Stages in shared memory, each with a head.
    stages: usize,
    /// Chunks that have a block for all heads of a group.
    whole: usize,
    /// Parts of a group in the other chunks, a block for each, and the heads of a part.
    parts: usize,
    some_heads: usize,
}

impl Layout {
    fn new(problem: &Problem, sequences: &Sequences, gated: bool, lane: &Lane) -> Option<Layout> {
        let facts = lane.device().facts();
        let stages =
            [2, 1].into_iter().find(|&stages| shared(problem.state, gated, stages) <= facts.shared as usize)?;
        let (groups, heads) = (problem.groups, problem.heads_per_group());
        let [whole, some_heads] = shares([sequences.chunks(), groups, heads], facts.multiprocessors as usize);
        Some(Layout { stages, whole, parts: heads.div_ceil(some_heads), some_heads })
    }
}

/// Partial sums of gradients, by block. Those of `B` and `C` exist where a group has several parts.
struct Parts {
    a: Buffer,
    d: Option<Buffer>,
    dt_bias: Option<Buffer>,
    groups: Option<[Buffer; 2]>,
    /// The steps of the latter.
    steps: Range<usize>,
}

impl Parts {
    fn new(call: &Call, outputs: &Named<&Buffer>, layout: &Layout) -> Result<Parts> {
        let numbers = |rows: usize, of: usize| call.lane.temporary(Spec::new(DType::F32, &[rows, of])?);
        let runs = call.sequences.chunks();
        let by_run = |name| outputs.find(name).map(|of| numbers(runs, of.spec().shape.elements())).transpose();
        let all = call.problem.batch * call.problem.length;
        let steps = call.sequences.first_step(layout.whole)..all;
        let by_part =
            |name| numbers(layout.parts, outputs.get(name)?.spec().shape.elements() / all.max(1) * steps.len());
        Ok(Parts {
            a: numbers(runs, call.problem.heads)?,
            d: by_run("dD")?,
            dt_bias: by_run("ddt_bias")?,
            groups: if layout.parts > 1 && !steps.is_empty() { Some([by_part("dB")?, by_part("dC")?]) } else { None },
            steps,
        })
    }
}

impl<'a> Gradient<'a> {
    /// The call, or `None` where the kernels do not support it.
    pub fn new(
        problem: &'a Problem,
        sequences: Sequences<'a>,
        inputs: &Named<&'a Buffer>,
        outputs: &'a Named<&'a Buffer>,
        lane: &'a Lane,
    ) -> Result<Option<Gradient<'a>>> {
        let gated = inputs.find("z").is_some();
        let Some(layout) = Layout::new(problem, &sequences, gated, lane) else { return Ok(None) };
        let Some(mut call) = Call::new(problem, sequences, inputs, outputs, lane)? else { return Ok(None) };
        let parts = Parts::new(&call, outputs, &layout)?;
        hold(&mut call, &layout, &parts)?;
        Ok(Some(Gradient { call, outputs, layout, parts }))
    }

    /// Queues the gradient.
    pub fn backward(mut self) -> Result<()> {
        let call = &mut self.call;
        call.steps()?;
        for reverse in [false, true] {
            call.starts(reverse)?;
            call.states(reverse, true)?;
        }
        self.launch()?;
        self.sum()
    }

    fn launch(&self) -> Result<()> {
        let (call, Layout { stages, whole, parts, .. }) = (&self.call, self.layout);
        let Problem { groups, state, .. } = *call.problem;
        let threads = 32 * WARPS;
        let options = format!("{} -DTHREADS={threads} -DSPLIT={SPLIT} -DSTAGES={stages}", call.options());
        let kernel = call.lane.device().kernel(&GRADIENT, &options)?;
        let blocks = grid_size((whole + (call.sequences.chunks() - whole) * parts) * groups)?;
        let shared = shared(state, call.params.z != 0, stages) as u32;
        // SAFETY: the op's checks prove the sizes of its tensors, the others are allocated for these chunks and parts;
        // the kernel uses `shared` bytes of shared memory.
        unsafe { call.lane.launch_with(&kernel, [blocks, 1, 1], threads as u32, shared, &call.params) }
    }

    /// Queues the kernels that add up the partial sums.
    fn sum(&self) -> Result<()> {
        let (call, parts) = (&self.call, &self.parts);
        let runs = call.sequences.chunks();
        let sum = |part: &Buffer, rows, name| columns(part, rows, self.outputs.get(name)?, call.lane);
        sum(&parts.a, runs, "dA")?;
        parts.d.iter().try_for_each(|part| sum(part, runs, "dD"))?;
        parts.dt_bias.iter().try_for_each(|part| sum(part, runs, "ddt_bias"))?;
        let Problem { batch, length, groups, state, .. } = *call.problem;
        parts.groups.iter().flatten().zip(["dB", "dC"]).try_for_each(|(part, name)| {
            let all = self.outputs.get(name)?.reshape(&[batch * length, groups, state])?;
            columns(part, self.layout.parts, &all.rows(parts.steps.clone())?, call.lane)
        })
    }
}

/// Allocates the states of each chunk and their cotangents, and sets the addresses of the partial sums.
fn hold(call: &mut Call, layout: &Layout, parts: &Parts) -> Result<()> {
    let Problem { width, state, dtype, .. } = *call.problem;
    let states = Spec::new(dtype, &[call.chunks(), width, state])?;
    (call.params.before, call.params.after) = (call.hold(states)?, call.hold(states)?);
    let (lane, params) = (call.lane, &mut call.params);
    let address = |of: Option<&Buffer>| of.map_or(Ok(0), |buffer| lane.address(buffer));
    params.part_a = address(Some(&parts.a))?;
    params.part_d = address(parts.d.as_ref())?;
    params.part_bias = address(parts.dt_bias.as_ref())?;
    params.part_b = address(parts.groups.as_ref().map(|[b, _]| b))?;
    params.part_c = address(parts.groups.as_ref().map(|[_, c]| c))?;
    (params.whole, params.parts, params.some_heads) =
        (layout.whole as i32, layout.parts as i32, layout.some_heads as i32);
    (params.first_part, params.part_steps) = (parts.steps.start as i64, parts.steps.len() as i64);
    Ok(())
}

/// Bytes of shared memory: `stages` stages of x, dy, z, states and steps, then B, C, weights, the gated dy and partial
/// sums over columns and over steps. States are padded to whole tiles of each warp, and their rows have room for dx and
/// dz.
const fn shared(state: usize, gated: bool, stages: usize) -> usize {
    let padded = state.next_multiple_of(16 * SPLIT);
    let states = rows(if padded < CHUNK { CHUNK } else { padded });
    let stage = 2 * rows(CHUNK) + optional_rows(gated) + 2 * states + STEP_BYTES;
    let parts = 4 * (4 * SPLIT * CHUNK + 2 * CHUNK / 16 * CHUNK + WARPS);
    stages * stage + 2 * states + rows(CHUNK) + optional_rows(gated) + parts
}

// Two stages fit Hopper's shared memory, and one that of Ampere.
const _: () = assert!(shared(128, true, 2) <= 227 << 10 && shared(128, true, 1) <= 163 << 10);
