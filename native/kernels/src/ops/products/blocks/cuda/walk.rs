//! Products of a few rows of x, or of floats, along rows of weights.

use super::ready::make_ready;
use super::{FEW, Tensors, early, format_options};
use crate::cuda::{EARLY, Facts, Lane, Source, function, grid_size, params, types};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{Route, text};

/// The text of walks along rows of weights, after [`EARLY`]: the function `walk`. Kernels that fuse it with other work
/// are compiled with [`WalkLayout::options`].
pub const WALK: &str = text!(["copies"], "blocks/ready", "blocks/stage", "blocks/walk");
const FEW_ROWS: Source<Walked> =
    Source::new("blocks_walk", text!(["activation"], "epilogue", "blocks/few")).after(&[EARLY, WALK]);

/// Outputs of a warp.
const OUTPUTS: usize = 4;

/// At most 14 bytes from the aligned address to a piece, and 2 bytes that are read beyond its end.
const AROUND: usize = 14 + 2;

params! {
    /// The parameters of `few.cu`.
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

/// The constants of a walk.
#[derive(Clone, Copy, Debug)]
pub struct WalkLayout {
    /// The format of the weights.
    pub format: Format,
    /// Whether x is multiplied as floats, else quantized to Q8_0 first.
    pub floats: bool,
    /// Rows of x.
    pub rows: usize,
    /// Rows of weights that a warp has at a time.
    pub outputs: usize,
    /// Warps of a block of threads.
    pub warps: usize,
    /// Pieces of weights that a warp has in shared memory: one that is multiplied, the others in flight.
    pub stages: usize,
}

impl WalkLayout {
    /// Chunks of 32 blocks, through which a walk along rows of `inputs` values goes.
    pub fn chunks(inputs: usize) -> usize {
        inputs.div_ceil(32 * BLOCK)
    }

    /// Bytes of shared memory of all stages and of the prepared rows of x, each of `inputs` values.
    pub fn shared(&self, inputs: usize) -> usize {
        self.weights() + self.ready(inputs)
    }

    /// Bytes of all stages.
    fn weights(&self) -> usize {
        self.warps * self.stages * self.outputs * self.row()
    }

    /// Bytes of the prepared rows of x.
    fn ready(&self, inputs: usize) -> usize {
        self.rows * WalkLayout::chunks(inputs) * self.chunk()
    }

    /// The compiler options.
    pub fn options(&self) -> String {
        let WalkLayout { rows, outputs, warps, stages, .. } = self;
        format!(
            "{} {} -DROWS={rows} -DOUTPUTS={outputs} -DWARPS={warps} -DSTAGES={stages} -DROW_BYTES={}",
            format_options(self.format),
            self.of_x(),
            self.row()
        )
    }

    /// The compiler options of prepared rows of x.
    fn of_x(&self) -> String {
        format!("-DFLOATS={} -DREADY={}", u32::from(self.floats), self.chunk())
    }

    /// Bytes of 32 blocks of a row of weights in a warp's stage.
    fn row(&self) -> usize {
        (32 * self.format.bytes() + AROUND).next_multiple_of(16)
    }

    /// Bytes of 32 blocks of a prepared row of x: of each the bytes, a scale and a start value, or floats.
    fn chunk(&self) -> usize {
        32 * if self.floats { BLOCK * 4 } else { BLOCK + 8 }
    }
}

/// The plan of a product of few rows: the constants of its walk, whether it prepares x itself, and the number of blocks
/// of threads that share the outputs.
#[derive(Debug)]
pub struct Walk {
    layout: WalkLayout,
    fused: bool,
    columns: usize,
    shared: usize,
}

impl Walk {
    pub fn planned(problem: &Problem, facts: &Facts) -> Walk {
        let (rows, floats) = (problem.rows.next_power_of_two().min(FEW), !problem.factors.quantized);
        let groups = problem.rows.div_ceil(rows);
        let busy = facts.multiprocessors as usize;
        let plan = |fused, warps: usize, stages: usize| {
            let layout = WalkLayout { format: problem.factors.weights, floats, rows, outputs: OUTPUTS, warps, stages };
            let shared = layout.weights() + usize::from(fused) * layout.ready(problem.inputs);
            // Blocks continue with further outputs until all are done.
            let at_once = (facts.shared as usize / shared).clamp(1, 32 / warps);
            let most = (busy * at_once).div_ceil(groups);
            let columns = problem.outputs.div_ceil(OUTPUTS * warps).min(most);
            Walk { layout, fused, columns, shared }
        };
        let plans = [true, false].into_iter().flat_map(|fused| {
            [16, 8, 4].into_iter().flat_map(move |warps| [4, 3, 2].map(|stages| (fused, warps, stages)))
        });
        let mut plans = plans.map(|(fused, warps, stages)| plan(fused, warps, stages));
        // Large blocks prepare x less often, and small ones leave no multiprocessor idle. Many floats per thread do not
        // fit into registers.
        let good = |plan: &Walk| {
            let warps = plan.layout.warps;
            let fits = plan.shared <= facts.shared as usize && (!floats || warps * rows <= 32);
            fits && (warps == 4 || plan.columns * groups * 10 >= busy * 9)
        };
        plans.find(good).expect("a small one")
    }
}

impl Route<Problem, Tensors> for Walk {
    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Walk { layout, fused, columns, shared } = *self;
        let groups = problem.rows.div_ceil(layout.rows);
        let function = function(problem.activation);
        let types = types(problem.x.dtype);
        let options = format!("{types} {} -DFN={function} -DFUSED={}", layout.options(), u32::from(fused));
        let (ready, kernel) = if fused {
            (0, lane.device().kernel(&FEW_ROWS, &options)?)
        } else {
            let sizes = [groups * layout.rows, problem.inputs / BLOCK, layout.ready(problem.inputs) / layout.rows];
            let of_x = format!("{} -DORDER=WALKS -DNT=1", layout.of_x());
            (make_ready(problem, sizes, 1, tensors.x, &of_x, lane)?, early(&FEW_ROWS, &options, lane)?)
        };
        let Tensors { x, w, b, y } = *tensors;
        let [rows, outputs, blocks, columns] =
            [problem.rows, problem.outputs, problem.inputs / BLOCK, columns].map(|size| size as i64);
        let params = Walked { w, x, ready, b, y, rows, outputs, blocks, columns };
        let grid = [grid_size(self.columns.saturating_mul(groups))?, 1, 1];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe { lane.launch_with(&kernel, grid, 32 * layout.warps as u32, shared as u32, &params) }
    }
}
