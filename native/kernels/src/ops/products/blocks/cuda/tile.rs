//! Products on tensor cores, warp by warp.

use super::ready::make_ready;
use super::{COLUMNS, FEW, SPLIT, Tensors, Tiled, common, early, launch_tiles, matrix, pieces, shares, weights};
use crate::cuda::tiles::{eights, streamed};
use crate::cuda::{Facts, Lane, Source, TensorMap, grid_size};
use crate::error::Result;
use crate::ops::products::blocks::format::BLOCK;
use crate::ops::products::blocks::problem::Problem;
use crate::ops::products::cuda::{Route, text};

const TILE: Source<Tiled> = Source::new(
    "blocks_tile",
    text!(
        ["activation", "early", "cluster", "pipeline", "tiles"],
        "epilogue",
        "blocks/ready",
        "blocks/order",
        "blocks/tile"
    ),
);

/// Outputs of warps that share columns.
const SIDE: usize = 32;

/// Threads that fetch weights where there are no bulk copies.
const PRODUCERS: usize = 128;

/// The most stages.
const STAGES: usize = 24;

/// Bytes of shared memory that a tile declares statically, rounded up.
const DECLARED: usize = 512;

/// The plan of a product on tensor cores: the constants that `tile.cu` is compiled with.
#[derive(Debug)]
pub struct Tile {
    eights: usize,
    sides: usize,
    split: usize,
    stages: usize,
    piece: u64,
    shared: usize,
}

impl Tile {
    /// `None` where a walk is faster, or is the only possibility.
    pub fn planned(problem: &Problem, w: u64, facts: &Facts) -> Option<Tile> {
        let piece = piece(problem, w, facts);
        // For few rows a walk is no slower if threads must fetch the weights.
        let few = problem.rows <= FEW && piece != 0 || problem.rows == 1;
        if few || !problem.factors.quantized || facts.capability.0 < 8 || problem.inputs == 0 {
            return None;
        }
        let eights = eights(problem.rows);
        let busy = facts.multiprocessors as usize;
        let most = if facts.capability.0 < 9 { 1 } else { SPLIT };
        let tiles = |sides| problem.outputs.div_ceil(SIDE * sides) * problem.rows.div_ceil(8 * eights);
        // Large tiles read x less often; small or shared ones leave no multiprocessor idle.
        let good = |&sides: &usize| sides == 1 || tiles(sides) * most >= busy;
        [2, 1].into_iter().filter(good).find_map(|sides| {
            let split = shares(tiles(sides), pieces(problem), most, busy);
            let rows = 8 * eights;
            let stage = COLUMNS * (SIDE * sides * problem.factors.weights.bytes() + rows * (BLOCK + 4));
            let sums = 4 * rows * (SIDE * sides + 4) * size_of::<f32>();
            let stages = ((facts.shared as usize - DECLARED).checked_sub(sums)? / stage).min(STAGES);
            let shared = stages * stage + sums;
            (stages >= 3).then_some(Tile { eights, sides, split, stages, piece, shared })
        })
    }
}

/// The largest piece that divides rows of weights; 0 where bulk copies fetch them.
pub fn piece(problem: &Problem, w: u64, facts: &Facts) -> u64 {
    let bytes = (problem.inputs / BLOCK * problem.factors.weights.bytes()) as u64;
    let piece = 1 << (w | bytes | TensorMap::UNIT).trailing_zeros();
    let by_itself = facts.capability.0 >= 9 && bytes > 0 && bytes.max(problem.outputs as u64) < 1 << 31;
    if piece == TensorMap::UNIT && by_itself { 0 } else { piece }
}

impl Route<Problem, Tensors> for Tile {
    fn launch(&self, problem: &Problem, tensors: &Tensors, lane: &Lane) -> Result<()> {
        let Tile { eights, sides, split, stages, piece, shared } = *self;
        let many = problem.rows.div_ceil(8 * eights);
        let padded = (problem.inputs / BLOCK).next_multiple_of(COLUMNS);
        let sizes = [many * 8 * eights, padded, padded * (BLOCK + 4)];
        let ready = make_ready(problem, sizes, 1, tensors.x, &format!("-DFLOATS=0 -DORDER=TILES -DNT={eights}"), lane)?;
        let matrix = match piece {
            0 => matrix(problem, SIDE * sides, tensors.w, lane)?,
            _ => TensorMap::NONE,
        };
        let producers = if piece == 0 { 32 } else { PRODUCERS };
        let options = format!(
            "{} -DFLOATS=0 -DNT={eights} -DSIDE={SIDE} -DSIDES={sides} -DSPLIT={split} -DSTAGES={stages} \
             -DSHARED={shared} -DPIECE={piece} -DPRODUCERS={producers} {}",
            common(problem),
            streamed(if piece == 0 { weights(problem) } else { 0 }, lane)
        );
        let kernel = early(&TILE, &options, lane)?;
        let columns = problem.outputs.div_ceil(SIDE * sides);
        let tiles = grid_size(columns.saturating_mul(many))?;
        let params = Tiled::new(problem, tensors, (matrix, ready), [columns as i32, tiles as i32]);
        let size = [(32 * 4 * sides + producers) as u32, shared as u32];
        // SAFETY: the op's checks prove the sizes of the buffers.
        unsafe { launch_tiles(&kernel, tiles, split, size, &params, lane) }
    }
}
