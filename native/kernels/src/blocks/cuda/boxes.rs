//! Products of more than a few rows where teams of warps multiply and the device copies weights by itself.

use super::{COLUMNS, Tensors, common, early, make_ready, matmul, pieces, weights};
use crate::blocks::format::BLOCK;
use crate::cuda::tiles::{REGISTERS, SIDE, TEAMS, eights, streamed};
use crate::cuda::{Kernel, Lane, Source, TensorMap, Tiles};
use crate::error::Result;

const BOX: Source = Source {
    name: "blocks_box",
    text: concat!(
        include_str!("../../cuda/activation.cu"),
        include_str!("../../cuda/early.cu"),
        include_str!("../../cuda/cluster.cu"),
        include_str!("../../cuda/pipeline.cu"),
        include_str!("../../cuda/tiles.cu"),
        include_str!("../../cuda/wgmma.cu"),
        include_str!("../ready.cu"),
        include_str!("../order.cu"),
        include_str!("../box.cu")
    ),
};

/// Pieces in shared memory at most.
const STAGES: usize = 12;

/// The parameters of `box.cu`; the same struct is declared there.
#[repr(C)]
#[derive(Clone, Copy)]
struct Boxed {
    matrix: TensorMap,
    ready: u64,
    b: u64,
    y: u64,
    rows: i64,
    outputs: i64,
    blocks: i64,
    columns: i32,
    tiles: i32,
}

/// What `box.cu` is compiled for: eights of rows of x, and pieces in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Boxes {
    eights: usize,
    stages: usize,
    tiles: Tiles,
}

impl Boxes {
    /// For weights that the device copies by itself.
    pub(super) fn of(problem: &matmul::Problem, lane: &Lane) -> Result<Option<(Boxes, Kernel)>> {
        if problem.rows < 2 || !problem.factors.quantized || !Tiles::possible(lane) {
            return Ok(None);
        }
        let all = [8, 4, 2, 1].into_iter().filter_map(|split| Boxes::with(problem, split, lane)).collect();
        let kernel = |boxes: &Boxes| early(&BOX, &boxes.options(problem, lane), lane);
        Tiles::fastest(all, |boxes| &boxes.tiles, kernel, lane)
    }

    /// With as many stages as have room.
    fn with(problem: &matmul::Problem, split: usize, lane: &Lane) -> Option<Boxes> {
        let eights = eights(problem.rows);
        let (columns, groups) = (problem.outputs.div_ceil(SIDE), problem.rows.div_ceil(8 * eights));
        let boxes = |stages| {
            let shared = shared(problem.factors.weights.bytes(), 8 * eights, stages);
            let turns = pieces(problem).div_ceil(split);
            Boxes { eights, stages, tiles: Tiles { columns, groups, split, turns, shared } }
        };
        let shares = split <= pieces(problem);
        (3..=STAGES).rev().map(boxes).find(|boxes| shares && boxes.tiles.fit(lane))
    }

    fn options(&self, problem: &matmul::Problem, lane: &Lane) -> String {
        let Boxes { eights, stages, tiles: Tiles { split, .. } } = *self;
        let (common, streamed) = (common(problem), streamed(weights(problem), lane));
        format!("{common} -DFLOATS=0 -DNT={eights} -DSPLIT={split} -DSTAGES={stages} {streamed} {REGISTERS}")
    }

    pub(super) fn launch(
        &self,
        problem: &matmul::Problem,
        kernel: &Kernel,
        tensors: &Tensors,
        lane: &Lane,
    ) -> Result<()> {
        let (blocks, bytes) = (problem.inputs / BLOCK, problem.factors.weights.bytes());
        let (padded, rows) = (blocks.next_multiple_of(COLUMNS), 8 * self.eights * self.tiles.groups);
        let options = format!("-DFLOATS=0 -DTILE=2 -DNT={}", self.eights);
        let ready = make_ready(problem, [rows, padded, padded * (BLOCK + 4)], tensors.x, &options, lane)?;
        let (all, part) = ([problem.outputs, blocks * bytes / 2], [SIDE, COLUMNS * bytes / 2]);
        let matrix = lane.device().tensor_map(tensors.w, all, part, false)?;
        let [columns, tiles] = self.tiles.numbers()?;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, blocks].map(|size| size as i64);
        let Tensors { b, y, .. } = *tensors;
        // SAFETY: Boxed is the struct that the kernel declares; the op's checks prove that the buffers have these sizes, and
        // scratch memory has what was made ready.
        unsafe {
            self.tiles.launch(kernel, &Boxed { matrix, ready, b, y, rows, outputs, blocks, columns, tiles }, lane)
        }
    }
}

/// Bytes of shared memory: stages with their barriers, and the sums of all teams.
fn shared(bytes: usize, rows: usize, stages: usize) -> usize {
    let stage = COLUMNS * (SIDE * bytes + rows * (BLOCK + 4)) + 16;
    stages * stage + TEAMS * rows * (SIDE + 4) * size_of::<f32>()
}
