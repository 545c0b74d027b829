//! Products of more than one row where warpgroups multiply and the device copies weights without threads (tensor maps).

use super::ready::{make_ready, ready_threads};
use super::{COLUMNS, Tensors, by_device, common, early, matrix, pieces, weights};
use crate::cuda::tiles::TEAMS;
use crate::cuda::{Kernel, Lane, Source, TensorMap, Tiles, params};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{Route, Sizes, Teams, text};

const BOX: Source<Boxed> = Source::new(
    "blocks_box",
    text!(
        ["activation", "early", "cluster", "pipeline", "tiles", "wgmma", "teams"],
        "epilogue",
        "blocks/ready",
        "blocks/order",
        "blocks/box"
    ),
);

/// The most stages.
const STAGES: usize = 3 * TEAMS;

/// Bytes per block of a row of x, with those of its scales.
const X_BYTES: usize = BLOCK + 8;

params! {
    /// The parameters of `box.cu`.
    struct Boxed with TensorMap {
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

/// Teams of warps, and the kernel that they are planned for.
pub struct Boxes(Teams, Kernel<Boxed>);

impl Boxes {
    /// For weights whose rows fit the device's bulk copies.
    pub fn planned(problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<Option<Boxes>> {
        let possible = problem.rows > 1 && problem.factors.quantized && Tiles::possible(lane);
        if !possible || !by_device(problem, tensors, lane) {
            return Ok(None);
        }
        let sizes = Sizes { rows: problem.rows, outputs: problem.outputs, pieces: pieces(problem) };
        let bytes = |teams: &Teams| bytes(problem.factors.weights, teams);
        let teams = |split| Teams::planned(sizes, [1, split], |_| STAGES, bytes, lane);
        let all = [8, 4, 2, 1].into_iter().filter_map(teams);
        let fastest = Teams::fastest(all, |teams| early(&BOX, &options(teams, problem, lane), lane), lane)?;
        Ok(fastest.map(|(teams, kernel)| Boxes(teams, kernel)))
    }
}

/// Bytes of shared memory: of a stage, and of the partial sums that `box.cu` keeps.
fn bytes(weights: Format, teams: &Teams) -> [usize; 2] {
    let room = if weights == Format::Q8 { 1 } else { teams.deep };
    [COLUMNS * (teams.outputs() * weights.bytes() + teams.rows() * X_BYTES), teams.sums(room)]
}

/// Blocks per thread that prepares x. Fewer threads leave registers for multiplications of many rows.
fn turns(teams: &Teams) -> usize {
    if teams.eights == 4 { 2 } else { 1 }
}

fn options(teams: &Teams, problem: &Problem, lane: &Lane) -> String {
    format!("{} -DFLOATS=0 {}", common(problem), teams.options(weights(problem), ready_threads(turns(teams)), lane))
}

impl Route<Problem, Tensors> for Boxes {
    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Boxes(teams, kernel) = self;
        let blocks = problem.inputs / BLOCK;
        let (padded, rows) = (blocks.next_multiple_of(COLUMNS), teams.rows() * teams.tiles.groups);
        let options = format!("-DFLOATS=0 -DTILE=2 -DNT={}", teams.eights);
        let ready = make_ready(problem, [rows, padded, padded * X_BYTES], turns(teams), tensors.x, &options, lane)?;
        let matrix = matrix(problem, teams.outputs(), tensors.w, lane)?;
        let [columns, tiles] = teams.tiles.numbers()?;
        let [rows, outputs, blocks] = [problem.rows, problem.outputs, blocks].map(|size| size as i64);
        let Tensors { b, y, .. } = *tensors;
        let params = Boxed { matrix, ready, b, y, rows, outputs, blocks, columns, tiles };
        // SAFETY: the op's checks prove that the buffers have these sizes, and scratch memory has the prepared rows.
        unsafe { teams.tiles.launch(kernel, &params, lane) }
    }
}
