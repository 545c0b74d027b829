//! Products of one row of x, which blocks of threads prepare themselves, where the device copies weights without using
//! threads.

use super::{COLUMNS, SPLIT, Tensors, by_device, common, early, launch_tiles, matrix, pieces, shares, weights};
use crate::cuda::tiles::streamed;
use crate::cuda::{Lane, Source, TensorMap, grid_size, params};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{BARRIERS, Route, text};

const SOURCE: Source<Params> = Source::new(
    "blocks_matvec",
    text!(["activation", "early", "cluster", "pipeline", "tiles"], "epilogue", "blocks/ready", "blocks/matvec"),
);

/// Outputs of a warp.
const SIDE: usize = 16;
/// The most warps of a block of threads.
const WARPS: usize = 16;
/// The most stages.
const STAGES: usize = 24;

params! {
    /// The parameters of `matvec.cu`.
    struct Params with TensorMap {
        matrix: TensorMap, // that of the weights
        x: u64 as "const STORAGE*",
        b: u64 as "const float*",
        y: u64 as "STORAGE*",
        outputs: i64,
        blocks: i64,
        // Both are the number of tiles, as x has a single row.
        columns: i32,
        tiles: i32,
    }
}

/// The constants that `matvec.cu` is compiled with.
#[derive(Debug)]
pub struct Matvec {
    sides: usize,
    groups: usize,
    split: usize,
    stages: usize,
    /// Offsets in shared memory of the prepared x, and of its end.
    x_at: usize,
    shared: usize,
}

impl Matvec {
    /// `None` where x has more rows, or does not fit into shared memory.
    pub fn planned(problem: &Problem, tensors: &Tensors, lane: &Lane) -> Option<Matvec> {
        let possible = problem.rows == 1 && problem.factors.quantized && problem.inputs > 0;
        if !possible || !by_device(problem, tensors, lane) {
            return None;
        }
        let facts = lane.device().facts();
        let busy = facts.multiprocessors as usize;
        let tiles = |sides| problem.outputs.div_ceil(SIDE * sides);
        // Small or shared tiles leave no multiprocessor idle.
        let sides = if tiles(4) * SPLIT >= busy { 4 } else { 2 };
        let split = shares(tiles(sides), pieces(problem), SPLIT, busy);
        let groups = WARPS / sides;
        let stage = stage(problem, sides);
        let ready = pieces(problem).div_ceil(split) * piece_of_x(words(problem));
        let sums = groups * SIDE * sides * size_of::<f32>();
        let room = (facts.shared as usize).checked_sub(ready + sums)?;
        // A stage always belongs to the same group, so that each group knows the phase of its stages.
        let stages = (room / (stage + BARRIERS)).min(STAGES) / groups * groups;
        let x_at = stages * (stage + BARRIERS) + sums;
        (stages >= 3).then_some(Matvec { sides, groups, split, stages, x_at, shared: x_at + ready })
    }
}

impl Route<Problem, Tensors> for Matvec {
    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Matvec { sides, groups, split, stages, x_at, shared } = *self;
        let (stage, words) = (stage(problem, sides), words(problem));
        let options = format!(
            "{} -DFLOATS=0 -DSIDE={SIDE} -DSIDES={sides} -DGROUPS={groups} -DSPLIT={split} -DSTAGES={stages} \
             -DSTAGE={stage} -DWORDS={words} -DX_PIECE={} -DX_AT={x_at} {}",
            common(problem),
            piece_of_x(words),
            streamed(weights(problem), lane)
        );
        let kernel = early(&SOURCE, &options, lane)?;
        let matrix = matrix(problem, SIDE * sides, tensors.w, lane)?;
        let Tensors { x, b, y, .. } = *tensors;
        let [outputs, blocks] = [problem.outputs, problem.inputs / BLOCK].map(|size| size as i64);
        let tiles = grid_size(problem.outputs.div_ceil(SIDE * sides))?;
        let params = Params { matrix, x, b, y, outputs, blocks, columns: tiles as i32, tiles: tiles as i32 };
        let size = [(32 * sides * groups + 32) as u32, shared as u32];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe { launch_tiles(&kernel, tiles, split, size, &params, lane) }
    }
}

/// Bytes of a stage.
fn stage(problem: &Problem, sides: usize) -> usize {
    SIDE * sides * COLUMNS * problem.factors.weights.bytes()
}

/// Bytes of the words of x that a piece is multiplied with. Each lane of four has those of two steps, of lower and of
/// upper halves.
fn words(problem: &Problem) -> usize {
    let kinds = match problem.factors.weights {
        Format::Q8 => 1,
        Format::Q4 => 2,
    };
    COLUMNS * 4 * 2 * 8 * kinds
}

/// Bytes of x prepared for a piece: these words, scales and start values of blocks, and zeros.
fn piece_of_x(words: usize) -> usize {
    words + COLUMNS * 8 + 16
}
