//! Products of a few rows of x, or of floats, along rows of weights.

use super::ready::make_ready;
use super::{FEW, Tensors, common, early};
use crate::cuda::{Facts, Lane, Source, grid_size, params};
use crate::error::Result;
use crate::ops::products::blocks::format::BLOCK;
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{Route, text};

const WALK: Source<Walked> = Source::new(
    "blocks_walk",
    text!(["activation", "early", "copies"], "epilogue", "blocks/ready", "blocks/stage", "blocks/walk"),
);

/// Outputs of a warp.
const OUTPUTS: usize = 4;

/// At most 14 bytes from the aligned address to a piece, and 2 bytes that are read beyond its end.
const AROUND: usize = 14 + 2;

params! {
    /// The parameters of `walk.cu`.
    struct Walked {
        w: u64 as "const unsigned char*",
        x: u64 as "const STORAGE*",
        ready: u64 as "const unsigned char*",
        b: u64 as "const float*",
        y: u64 as "STORAGE*",
        rows: i64,
        outputs: i64,
        blocks: i64,
        columns: i64, // blocks of threads that share the outputs
    }
}

/// The plan of a product of few rows: the constants that `walk.cu` is compiled with, and the number of blocks of
/// threads that share the outputs.
#[derive(Debug)]
pub struct Walk {
    floats: bool,
    fused: bool,
    rows: usize,
    warps: usize,
    stages: usize,
    columns: usize,
    shared: usize,
}

impl Walk {
    pub fn planned(problem: &Problem, facts: &Facts) -> Walk {
        let (rows, floats) = (problem.rows.next_power_of_two().min(FEW), !problem.factors.quantized);
        let groups = problem.rows.div_ceil(rows);
        let busy = facts.multiprocessors as usize;
        let plan = |fused, warps: usize, stages: usize| {
            let shared =
                warps * stages * OUTPUTS * Walk::row(problem) + usize::from(fused) * rows * Walk::ready(problem);
            // Blocks continue with further outputs until all are done.
            let at_once = (facts.shared as usize / shared).clamp(1, 32 / warps);
            let most = (busy * at_once).div_ceil(groups);
            let columns = problem.outputs.div_ceil(OUTPUTS * warps).min(most);
            Walk { floats, fused, rows, warps, stages, columns, shared }
        };
        let plans = [true, false].into_iter().flat_map(|fused| {
            [16, 8, 4].into_iter().flat_map(move |warps| [4, 3, 2].map(|stages| (fused, warps, stages)))
        });
        let mut plans = plans.map(|(fused, warps, stages)| plan(fused, warps, stages));
        // Large blocks prepare x less often, and small ones leave no multiprocessor idle. Many floats per thread do not
        // fit into registers.
        let good = |plan: &Walk| {
            let fits = plan.shared <= facts.shared as usize && (!floats || plan.warps * rows <= 32);
            fits && (plan.warps == 4 || plan.columns * groups * 10 >= busy * 9)
        };
        plans.find(good).expect("a small one")
    }

    /// Bytes of 32 blocks of a row of weights in a warp's stage.
    fn row(problem: &Problem) -> usize {
        (32 * problem.factors.weights.bytes() + AROUND).next_multiple_of(16)
    }

    /// Bytes of 32 blocks of a prepared row of x: of each the bytes, a scale and a start value, or floats.
    fn chunk(problem: &Problem) -> usize {
        32 * if problem.factors.quantized { BLOCK + 8 } else { BLOCK * 4 }
    }

    /// Bytes of a prepared row of x.
    fn ready(problem: &Problem) -> usize {
        problem.inputs.div_ceil(32 * BLOCK) * Walk::chunk(problem)
    }
}

impl Route<Problem, Tensors> for Walk {
    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Walk { floats, fused, rows, warps, stages, columns, shared } = *self;
        let groups = problem.rows.div_ceil(rows);
        let given = format!("-DFLOATS={} -DREADY={}", u32::from(floats), Walk::chunk(problem));
        let options = format!(
            "{} {given} -DROWS={rows} -DFUSED={} -DWARPS={warps} -DSTAGES={stages} -DOUTPUTS={OUTPUTS} \
             -DROW_BYTES={}",
            common(problem),
            u32::from(fused),
            Walk::row(problem)
        );
        let (ready, kernel) = if fused {
            (0, lane.device().kernel(&WALK, &options)?)
        } else {
            let sizes = [groups * rows, problem.inputs / BLOCK, Walk::ready(problem)];
            let ready = make_ready(problem, sizes, 1, tensors.x, &format!("{given} -DORDER=WALKS -DNT=1"), lane)?;
            (ready, early(&WALK, &options, lane)?)
        };
        let Tensors { x, w, b, y } = *tensors;
        let [rows, outputs, blocks, columns] =
            [problem.rows, problem.outputs, problem.inputs / BLOCK, columns].map(|size| size as i64);
        let params = Walked { w, x, ready, b, y, rows, outputs, blocks, columns };
        let grid = [grid_size(self.columns.saturating_mul(groups))?, 1, 1];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe { lane.launch_with(&kernel, grid, 32 * warps as u32, shared as u32, &params) }
    }
}
