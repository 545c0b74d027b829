//! Products with planes that the device copies without threads (tensor maps).

use super::{CHUNK, FEW, Order, Params, THREADS, prepare};
use crate::cuda::tiles::{SIDE, TEAMS, eights, registers, streamed};
use crate::cuda::{Buffer, Kernel, Lane, Source, TensorMap, Tiles, function, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::ternary::problem::{Form, Product};

const BOX: Source<Boxed> = Source::new(
    "ternary_box",
    concat!(
        include_str!("../../../../cuda/include/activation.cu"),
        include_str!("../../../../cuda/include/early.cu"),
        include_str!("../../../../cuda/include/cluster.cu"),
        include_str!("../../../../cuda/include/pipeline.cu"),
        include_str!("../../../../cuda/include/tiles.cu"),
        include_str!("../../../../cuda/include/wgmma.cu"),
        include_str!("../../../../cuda/include/teams.cu"),
        include_str!("../ends.cu"),
        include_str!("../box.cu")
    ),
);

params! {
    /// The parameters of `box.cu`.
    pub(super) struct Boxed with TensorMap, Params {
        planes: [TensorMap; 2],
        of: Params,
        // Columns of tiles, and tiles of all groups of rows.
        columns: i32,
        tiles: i32,
    }
}

/// The constants that `box.cu` is compiled with: eights of rows of activations, teams of warps side by side and in
/// turn, stages in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Boxes {
    eights: usize,
    sides: usize,
    deep: usize,
    stages: usize,
    tiles: Tiles,
}

impl Boxes {
    /// For many rows of bytes, where the device has tensor maps and warpgroup multiplications, and sums 64 times as
    /// large fit into i32.
    pub(super) fn of(problem: &Product, lane: &Lane) -> Result<Option<(Boxes, Kernel<Boxed>)>> {
        let Product { rows, n, outs, .. } = *problem;
        let fits = n * outs > 0 && outs.max(problem.bytes()) < 1 << 31 && n <= 1 << 18;
        if problem.form != Form::I8 || rows <= FEW || !fits || !Tiles::possible(lane) {
            return Ok(None);
        }
        let all = [4, 2, 1].into_iter().flat_map(|sides| [8, 4, 2, 1].map(|split| (sides, split)));
        // Large tiles come first, as they read less of x.
        let all = all.filter_map(|(sides, split)| Boxes::with(problem, sides, split, lane)).collect();
        Tiles::fastest(all, |boxes| &boxes.tiles, |boxes| boxes.kernel(problem, lane), lane)
    }

    /// Sets the number of stages, up to the number of chunks and what fits. It is a multiple of the teams that take
    /// turns, so a stage always belongs to the same teams.
    fn with(problem: &Product, sides: usize, split: usize, lane: &Lane) -> Option<Boxes> {
        let eights = eights(problem.rows);
        let (chunks, deep) = (chunks(problem, split), TEAMS / sides);
        let columns = problem.outs.div_ceil(SIDE * sides);
        let groups = problem.rows.div_ceil(8 * eights);
        let boxes = |turn: usize| {
            let stages = turn * deep;
            let shared = shared(8 * eights, SIDE * sides, deep, stages);
            let tiles = Tiles { columns, groups, split, turns: sides * chunks, shared };
            Boxes { eights, sides, deep, stages, tiles }
        };
        let busy = |boxes: &Boxes| boxes.tiles.fit(lane) && boxes.stages >= chunks.min(2);
        let shares = split <= problem.n.div_ceil(CHUNK);
        (1..=chunks.min(8).div_ceil(deep)).rev().map(boxes).find(|boxes| shares && busy(boxes))
    }

    fn kernel(&self, problem: &Product, lane: &Lane) -> Result<Kernel<Boxed>> {
        let Boxes { eights, sides, deep, stages, tiles: Tiles { split, .. } } = *self;
        let options = format!(
            "{} -DFORM={} -DNT={eights} -DSIDES={sides} -DDEEP={deep} -DSPLIT={split} -DSTAGES={stages} -DCHUNK={CHUNK} \
             -DSIDE={SIDE} -DFN={} {} {}",
            types(problem.dtype),
            problem.form as usize,
            function(problem.options.activation),
            registers(THREADS),
            streamed(2 * problem.outs * problem.bytes(), lane)
        );
        // SAFETY: the kernel waits before it accesses anything but weights. It writes no weights, and begins early only
        // behind kernels that write none.
        Ok(unsafe { lane.device().kernel(&BOX, &options)?.early() })
    }

    pub(super) fn run(
        &self,
        problem: &Product,
        kernel: &Kernel<Boxed>,
        params: &mut Params,
        outputs: &Named<&Buffer>,
        lane: &Lane,
    ) -> Result<()> {
        prepare(problem, Order::Matrices(self.eights), params, outputs, lane)?;
        let (all, part) = ([problem.outs, problem.bytes() / 2], [SIDE * self.sides, CHUNK / 16]);
        let map = |plane| lane.device().tensor_map(plane, all, part, true);
        let planes = [map(params.planes[0])?, map(params.planes[1])?];
        let [columns, tiles] = self.tiles.numbers()?;
        // SAFETY: the op's checks prove that all sizes fit the buffers, and `prepare` has filled the scratch memory.
        unsafe { self.tiles.launch(kernel, &Boxed { planes, of: *params, columns, tiles }, lane) }
    }
}

/// Chunks of columns for each of `split` blocks.
fn chunks(problem: &Product, split: usize) -> usize {
    problem.n.div_ceil(CHUNK).div_ceil(split)
}

/// Bytes of shared memory: stages and their barriers, a partial sum for every two teams, and two numbers per output.
fn shared(rows: usize, outputs: usize, deep: usize, stages: usize) -> usize {
    let stage = 2 * outputs * (CHUNK / 8) + rows * CHUNK + 16;
    stages * stage + deep.div_ceil(2) * rows * (outputs + 4) * 4 + outputs * 8
}
