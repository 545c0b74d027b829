//! Products on tensor cores, warp by warp.

use super::prepare::{Order, prepare};
use super::products::{common, whole};
use super::{CHUNK, FEW, Params};
use crate::cuda::tiles::eights;
use crate::cuda::{Kernel, Lane, Source, Together, grid_size};
use crate::error::Result;
use crate::ops::products::cuda::{Route, text};
use crate::ops::products::ternary::problem::{Form, Product};

const TILE: Source<Params> = Source::new(
    "ternary_tile",
    text!(["activation", "early", "copies", "cluster"], "epilogue", "ternary/ends", "ternary/tile"),
);

/// Warps of a block.
const WARPS: usize = 8;

/// Rows of weights of a warp.
const SIDE: usize = 32;

/// The constants that `tile.cu` is compiled with: warps side by side, groups of 8 rows of activations, groups of such
/// warps, blocks of a cluster, and stages. Stages are the chunks in flight and the current one.
#[derive(Clone, Copy)]
pub struct Tile {
    sides: usize,
    rows: usize,
    groups: usize,
    cluster: usize,
    stages: usize,
}

impl Tile {
    /// A tile for many rows of bytes, where tensor cores multiply them.
    pub fn planned(problem: &Product, params: &Params, lane: &Lane) -> Option<Tile> {
        let facts = lane.device().facts();
        let rows = eights(problem.rows);
        // The y size of a grid is limited to 65535.
        let few = problem.rows <= FEW || problem.rows.div_ceil(8 * rows) > 65535;
        if problem.form != Form::I8 || facts.capability.0 < 8 || few || !whole(problem, params) {
            return None;
        }
        let sides = if problem.outs >= 4 * SIDE * facts.multiprocessors as usize { 4 } else { 2 };
        let of = |sides| Tile { sides, rows, groups: WARPS / sides, cluster: 1, stages: 0 }.staged(problem, lane);
        of(sides).or_else(|| of(4))
    }

    /// Sets the largest number of stages that fits: 2 to 5, and no more than a group's chunks plus one.
    fn staged(self, problem: &Product, lane: &Lane) -> Option<Tile> {
        let turns = problem.n.div_ceil(CHUNK).div_ceil(self.groups * self.cluster);
        let fits = |tile: &Tile| tile.shared() <= lane.device().facts().shared as usize;
        (2..=(turns + 1).clamp(2, 5)).rev().map(|stages| Tile { stages, ..self }).find(fits)
    }

    /// A tile for clusters whose blocks share the columns, and so read less of x each, if no block gets more work than
    /// without.
    fn clustered(self, problem: &Product, lane: &Lane) -> Result<Option<(Tile, Kernel<Params>)>> {
        let all = lane.device().facts().multiprocessors as usize;
        let alone = self.sides_of(problem.outs).div_ceil(all) * self.sides;
        if self.count(problem.rows) > self.rows {
            return Ok(None);
        }
        for (sides, cluster) in [(8, 8), (8, 4), (4, 2)] {
            let tile = Tile { sides, groups: WARPS / sides, cluster, ..self };
            let blocks = tile.sides_of(problem.outs);
            let empty = problem.n.div_ceil(CHUNK) <= cluster / 2;
            let Some(tile) = tile.staged(problem, lane).filter(|_| !empty && (cluster < 8 || 8 * blocks <= all)) else {
                continue;
            };
            let kernel = tile.kernel(problem, lane)?;
            let at_once = lane.device().clusters(&kernel, cluster as u32, tile.size())?;
            let together = blocks.div_ceil(at_once.max(1)) * sides / cluster;
            if at_once > 0 && together <= alone - usize::from(cluster == 8) {
                return Ok(Some((tile, kernel)));
            }
        }
        Ok(None)
    }

    fn shared(&self) -> usize {
        self.groups * self.stages * 8 * self.rows * CHUNK
    }

    /// Threads and bytes of shared memory of a block.
    fn size(&self) -> [u32; 2] {
        [32 * WARPS as u32, self.shared() as u32]
    }

    /// Rows of activations in units of 8, padded to whole tiles.
    fn count(&self, rows: usize) -> usize {
        rows.next_multiple_of(8 * self.rows) / 8
    }

    /// Blocks, or clusters, that cover all rows of weights.
    fn sides_of(&self, outs: usize) -> usize {
        outs.div_ceil(SIDE * self.sides)
    }

    fn kernel(&self, problem: &Product, lane: &Lane) -> Result<Kernel<Params>> {
        let Tile { sides, rows, groups, cluster, stages } = *self;
        let options = format!(
            "{} -DSIDE={SIDE} -DSIDES={sides} -DNT={rows} -DGROUPS={groups} -DCLUSTER={cluster} -DSTAGES={stages} \
             -DSHARED={} -DCHUNK={CHUNK}",
            common(problem),
            self.shared()
        );
        // SAFETY: the kernel waits before it accesses anything but weights, which it only reads.
        Ok(unsafe { lane.device().kernel(&TILE, &options)?.early() })
    }
}

impl Route<Product, Params> for Tile {
    fn launch(&self, problem: &Product, params: &Params, lane: &Lane) -> Result<()> {
        let params = &prepare(problem, Order::Tiles(self.count(problem.rows)), params, lane)?;
        if let Some((tile, kernel)) = self.clustered(problem, lane)? {
            let (cluster, blocks) = (tile.cluster, grid_size(tile.cluster * tile.sides_of(problem.outs))?);
            // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
            return unsafe {
                lane.launch_together(&kernel, Together::Cluster(cluster as u32), blocks, tile.size(), params)
            };
        }
        let (kernel, [threads, shared]) = (self.kernel(problem, lane)?, self.size());
        let grid = [grid_size(self.sides_of(problem.outs))?, (self.count(problem.rows) / self.rows) as u32, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
        unsafe { lane.launch_with(&kernel, grid, threads, shared, params) }
    }
}
