//! Shared by products with quantized and with ternary weights on CUDA: the choice of a route, and plans for
//! kernels whose warps multiply in teams.

use crate::cuda::tiles::{SIDE, TEAMS, eights, registers, streamed};
use crate::cuda::{Kernel, Lane, Tiles};
use crate::error::Result;
use std::fmt::Debug;

/// A way to compute a product of problem `P` and tensors `T`, planned for them.
pub trait Route<P, T> {
    /// Queues the product.
    fn launch(&self, problem: &P, tensors: &T, lane: &Lane) -> Result<()>;
}

/// Plans a route; `None` if it is not possible, or another one is faster.
pub type Planner<P, T> = fn(&P, &T, &Lane) -> Result<Option<Box<dyn Route<P, T>>>>;

/// Queues the product by the first route that has a plan; the last one always has.
pub fn launch_first<P, T>(routes: &[Planner<P, T>], problem: &P, tensors: &T, lane: &Lane) -> Result<()> {
    for plan in routes {
        if let Some(route) = plan(problem, tensors, lane)? {
            return route.launch(problem, tensors, lane);
        }
    }
    unreachable!("the last route takes every product")
}

/// A plan as a route.
pub fn route<'r, P, T>(plan: Option<impl Route<P, T> + 'r>) -> Result<Option<Box<dyn Route<P, T> + 'r>>> {
    Ok(plan.map(|plan| Box::new(plan) as _))
}

/// The text of a kernel: files of `cuda/include`, then of this folder, by their names without the ending.
macro_rules! text {
    ([$($shared:literal),*], $($own:literal),*) => {
        concat!(
            $(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/include/", $shared, ".cu")),)*
            $(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops/products/", $own, ".cu")),)*
        )
    };
}
pub(super) use text;

/// The name of an enumeration's variant in CUDA sources.
pub fn constant(variant: impl Debug) -> String {
    format!("{variant:?}").to_uppercase()
}

/// Compiler options that define each of these variants as its number.
pub fn constants(variants: &[impl Debug]) -> String {
    let defined = variants.iter().enumerate().map(|(number, variant)| format!("-D{}={number}", constant(variant)));
    defined.collect::<Vec<_>>().join(" ")
}

/// The constants that a kernel with `teams.cu` is compiled with: eights of rows of x, teams of warps side by side and
/// in turn, and stages in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Teams {
    pub eights: usize,
    pub sides: usize,
    pub deep: usize,
    pub stages: usize,
    pub tiles: Tiles,
}

/// Sizes from which [`Teams`] are planned.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub rows: usize,
    pub outputs: usize,
    /// Pieces of columns.
    pub pieces: usize,
}

impl Teams {
    /// Teams, `sides` of them side by side, where `split` blocks share a tile. They get the most stages that fit, up to
    /// `most` for a block's number of pieces. `bytes` gives the shared memory of a stage, and of everything else.
    pub fn planned(
        sizes: Sizes,
        [sides, split]: [usize; 2],
        most: impl Fn(usize) -> usize,
        bytes: impl Fn(&Teams) -> [usize; 2],
        lane: &Lane,
    ) -> Option<Teams> {
        let (eights, deep) = (eights(sizes.rows), TEAMS / sides);
        let (columns, groups) = (sizes.outputs.div_ceil(SIDE * sides), sizes.rows.div_ceil(8 * eights));
        let pieces = sizes.pieces.div_ceil(split);
        let teams = |turns: usize| {
            let tiles = Tiles { columns, groups, split, turns: sides * pieces, shared: 0 };
            let mut teams = Teams { eights, sides, deep, stages: turns * deep, tiles };
            let [stage, rest] = bytes(&teams);
            teams.tiles.shared = teams.stages * (stage + BARRIERS) + rest;
            teams
        };
        // A stage always belongs to the same teams, so stages are a multiple of the teams that take turns.
        let fits = |teams: &Teams| teams.tiles.fit(lane) && teams.stages >= pieces.min(2);
        (1..=most(pieces).div_ceil(deep)).rev().map(teams).find(fits).filter(|_| split <= sizes.pieces)
    }

    /// The fastest of these teams, with its kernel.
    pub fn fastest<P>(
        all: impl Iterator<Item = Teams>,
        kernel: impl Fn(&Teams) -> Result<Kernel<P>>,
        lane: &Lane,
    ) -> Result<Option<(Teams, Kernel<P>)>> {
        Tiles::fastest(all.collect(), |teams| &teams.tiles, kernel, lane)
    }

    /// Outputs of a block.
    pub fn outputs(&self) -> usize {
        SIDE * self.sides
    }

    /// Rows of x of a block.
    pub fn rows(&self) -> usize {
        8 * self.eights
    }

    /// Bytes of `count` partial sums, whose rows are padded as in `teams.cu`.
    pub fn sums(&self, count: usize) -> usize {
        count * self.rows() * (self.outputs() + 4) * size_of::<f32>()
    }

    /// Compiler options, for `weights` bytes of all weights, and `beside` threads of a block that prepares the next x.
    pub fn options(&self, weights: usize, beside: u32, lane: &Lane) -> String {
        let Teams { eights, sides, deep, stages, tiles: Tiles { split, shared, .. } } = *self;
        format!(
            "-DNT={eights} -DSIDE={SIDE} -DSIDES={sides} -DDEEP={deep} -DSPLIT={split} -DSTAGES={stages} \
             -DSHARED={shared} {} {}",
            registers(beside),
            streamed(weights, lane)
        )
    }
}

/// Bytes of the barriers of a stage.
pub const BARRIERS: usize = 16;
