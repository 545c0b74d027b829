//! Products of more than one row with warpgroup multiplications, where the device copies weights without using threads
//! (tensor maps).

use super::ready::{make_ready, ready_threads};
use super::{COLUMNS, Tensors, Tiled, by_device, common, early, matrix, pieces, weights};
use crate::cuda::tiles::TEAMS;
use crate::cuda::{Kernel, Lane, Source, Tiles};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{Route, Sizes, Teams, text};

const BOX: Source<Tiled> = Source::new(
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

/// Teams of warps, and the kernel that they are planned for.
pub struct Boxes(Teams, Kernel<Tiled>);

impl Boxes {
    /// `None` unless the rows of the weights fit the device's bulk copies.
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
        let (padded, rows) = ((problem.inputs / BLOCK).next_multiple_of(COLUMNS), teams.rows() * teams.tiles.groups);
        let options = format!("-DFLOATS=0 -DORDER=TEAMS -DNT={}", teams.eights);
        let ready = make_ready(problem, [rows, padded, padded * X_BYTES], turns(teams), tensors.x, &options, lane)?;
        let matrix = matrix(problem, teams.outputs(), tensors.w, lane)?;
        let params = Tiled::new(problem, tensors, (matrix, ready), teams.tiles.numbers()?);
        // SAFETY: the op's checks prove that the buffers have these sizes, and scratch memory has the prepared rows.
        unsafe { teams.tiles.launch(kernel, &params, lane) }
    }
}
