//! Products of more than one row where warpgroups multiply and the device copies weights without threads (tensor maps).

use super::{COLUMNS, Tensors, common, early, make_ready, pieces, ready_threads, weights};
use crate::cuda::tiles::{SIDE, TEAMS, eights, registers, streamed};
use crate::cuda::{Kernel, Lane, Source, TensorMap, Tiles, params};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;

const BOX: Source<Boxed> = Source::new(
    "blocks_box",
    concat!(
        include_str!("../../../../cuda/include/activation.cu"),
        include_str!("../../../../cuda/include/early.cu"),
        include_str!("../../../../cuda/include/cluster.cu"),
        include_str!("../../../../cuda/include/pipeline.cu"),
        include_str!("../../../../cuda/include/tiles.cu"),
        include_str!("../../../../cuda/include/wgmma.cu"),
        include_str!("../../../../cuda/include/teams.cu"),
        include_str!("../ready.cu"),
        include_str!("../order.cu"),
        include_str!("../box.cu")
    ),
);

/// Upper limit for each team's pieces in shared memory.
const STAGES: usize = 3;

/// Bytes per block of a row of x, with those of its scales.
const X_BYTES: usize = BLOCK + 8;

params! {
    /// The parameters of `box.cu`.
    pub(super) struct Boxed with TensorMap {
        matrix: TensorMap, // that of the weights
        ready: u64 as "const unsigned char*",
        b: u64 as "const float*",
        y: u64 as "STORAGE*",
        rows: i64,
        outputs: i64,
        blocks: i64,
        // Columns of tiles, and tiles of all groups of rows.
        columns: i32,
        tiles: i32,
    }
}

/// The constants that `box.cu` is compiled with: eights of rows of x, and pieces in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Boxes {
    eights: usize,
    stages: usize,
    tiles: Tiles,
}

impl Boxes {
    /// For weights that the device can copy by itself.
    pub(super) fn of(problem: &Problem, lane: &Lane) -> Result<Option<(Boxes, Kernel<Boxed>)>> {
        if problem.rows < 2 || !problem.factors.quantized || !Tiles::possible(lane) {
            return Ok(None);
        }
        let all = [8, 4, 2, 1].into_iter().filter_map(|split| Boxes::with(problem, split, lane)).collect();
        let kernel = |boxes: &Boxes| early(&BOX, &boxes.options(problem, lane), lane);
        Tiles::fastest(all, |boxes| &boxes.tiles, kernel, lane)
    }

    /// Sets the number of stages to what fits. A stage always belongs to the same team.
    fn with(problem: &Problem, split: usize, lane: &Lane) -> Option<Boxes> {
        let eights = eights(problem.rows);
        let (columns, groups) = (problem.outputs.div_ceil(SIDE), problem.rows.div_ceil(8 * eights));
        let boxes = |turns: usize| {
            let stages = TEAMS * turns;
            let shared = shared(problem.factors.weights, 8 * eights, stages);
            let turns = pieces(problem).div_ceil(split);
            Boxes { eights, stages, tiles: Tiles { columns, groups, split, turns, shared } }
        };
        let shares = split <= pieces(problem);
        (1..=STAGES).rev().map(boxes).find(|boxes| shares && boxes.tiles.fit(lane))
    }

    /// Blocks per thread that prepares x. Fewer threads leave registers for multiplications of many rows.
    fn turns(&self) -> usize {
        if self.eights == 4 { 2 } else { 1 }
    }

    fn options(&self, problem: &Problem, lane: &Lane) -> String {
        let Boxes { eights, stages, tiles: Tiles { split, .. } } = *self;
        let (common, streamed, registers) =
            (common(problem), streamed(weights(problem), lane), registers(ready_threads(self.turns())));
        let tiles = format!("-DNT={eights} -DSIDE={SIDE} -DSIDES=1 -DDEEP={TEAMS} -DSPLIT={split} -DSTAGES={stages}");
        format!("{common} -DFLOATS=0 {tiles} {streamed} {registers}")
    }

    pub(super) fn launch(
        &self,
        problem: &Problem,
        kernel: &Kernel<Boxed>,
        tensors: &Tensors,
        lane: &Lane,
    ) -> Result<()> {
        let (blocks, bytes) = (problem.inputs / BLOCK, problem.factors.weights.bytes());
        let (padded, rows) = (blocks.next_multiple_of(COLUMNS), 8 * self.eights * self.tiles.groups);
        let options = format!("-DFLOATS=0 -DTILE=2 -DNT={}", self.eights);
        let ready = make_ready(problem, [rows, padded, padded * X_BYTES], self.turns(), tensors.x, &options, lane)?;
        let (all, part) = ([problem.outputs, blocks * bytes / 2], [SIDE, COLUMNS * bytes / 2]);
        let matrix = lane.device().tensor_map(tensors.w, all, part, false)?;
        let [columns, tiles] = self.tiles.numbers()?;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, blocks].map(|size| size as i64);
        let Tensors { b, y, .. } = *tensors;
        // SAFETY: the op's checks prove that the buffers have these sizes, and scratch memory has the prepared rows.
        unsafe {
            self.tiles.launch(kernel, &Boxed { matrix, ready, b, y, rows, outputs, blocks, columns, tiles }, lane)
        }
    }
}

/// Bytes of shared memory: stages with their barriers, and the partial sums that `box.cu` keeps.
fn shared(weights: Format, rows: usize, stages: usize) -> usize {
    let stage = COLUMNS * (SIDE * weights.bytes() + rows * X_BYTES) + 16;
    let room = if weights == Format::Q8 { 1 } else { TEAMS };
    stages * stage + room * rows * (SIDE + 4) * size_of::<f32>()
}
