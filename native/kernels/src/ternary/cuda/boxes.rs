//! Products whose planes the device copies by itself.

use super::{CHUNK, FEW, Order, Params, prepare};
use crate::cuda::{Buffer, Kernel, Lane, Source, TensorMap, Together, function, grid_size, types};
use crate::error::Result;
use crate::op::Named;
use crate::ternary::products::{Form, Problem as Product};

const BOX: Source = Source {
    name: "ternary_box",
    text: concat!(
        include_str!("../../cuda/activation.cu"),
        include_str!("../../cuda/early.cu"),
        include_str!("../../cuda/cluster.cu"),
        include_str!("../../cuda/pipeline.cu"),
        include_str!("../../cuda/tiles.cu"),
        include_str!("../../cuda/wgmma.cu"),
        include_str!("../ends.cu"),
        include_str!("../box.cu")
    ),
};

/// The parameters of `box.cu`; the same struct is declared there.
#[repr(C)]
#[derive(Clone, Copy)]
struct Boxed {
    planes: [TensorMap; 2],
    of: Params,
    columns: i32,
    tiles: i32,
}

/// What `box.cu` is compiled for: eights of rows of activations, teams of warps side by side and behind one another, blocks of a
/// cluster, chunks in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Boxes {
    eights: usize,
    sides: usize,
    deep: usize,
    split: usize,
    stages: usize,
}

impl Boxes {
    /// Outputs of a team of four warps, and teams.
    const SIDE: usize = 64;
    const TEAMS: usize = 4;

    /// For many rows of bytes, where the device copies planes by itself and teams multiply, and sums of 64 times as much fit.
    pub(super) fn of(problem: &Product, lane: &Lane) -> Result<Option<(Boxes, Kernel)>> {
        let Product { rows, n, outs, .. } = *problem;
        let fits = n * outs > 0 && outs.max(problem.bytes()) < 1 << 31 && n <= 1 << 18;
        let multiplies = lane.device().facts().capability.0 == 9;
        if problem.form != Form::I8 || rows <= FEW || !fits || !multiplies {
            return Ok(None);
        }
        let eights = rows.div_ceil(8).next_power_of_two().min(4);
        let all = [4, 2, 1].into_iter().flat_map(|sides| [8, 4, 2, 1].map(|split| (sides, split)));
        let mut all: Vec<_> =
            all.filter_map(|(sides, split)| Boxes::with(problem, [eights, sides, split], lane)).collect();
        // Large ones, which come first, read less of x.
        all.sort_by_key(|boxes| boxes.turns(problem, lane));
        for boxes in all {
            let kernel = boxes.kernel(problem, lane)?;
            if boxes.at_once(problem, &kernel, lane)? {
                return Ok(Some((boxes, kernel)));
            }
        }
        Ok(None)
    }

    /// With as many stages as there are chunks and as have room; a stage is always of the same teams.
    fn with(problem: &Product, [eights, sides, split]: [usize; 3], lane: &Lane) -> Option<Boxes> {
        let facts = lane.device().facts();
        let (turns, deep) = (problem.n.div_ceil(CHUNK).div_ceil(split), Boxes::TEAMS / sides);
        let boxes = |turns: usize| Boxes { eights, sides, deep, split, stages: turns * deep };
        let fits = |boxes: &Boxes| boxes.needed() <= facts.shared as usize;
        let boxes = (1..=turns.min(8).div_ceil(deep)).rev().map(boxes).find(fits)?;
        let spread = split == 1 || boxes.tiles(problem) * split <= facts.multiprocessors as usize;
        let busy = split <= problem.n.div_ceil(CHUNK) && boxes.stages >= turns.min(2);
        (spread && busy).then_some(boxes)
    }

    /// How long it takes, as a team's chunks are counted.
    fn turns(&self, problem: &Product, lane: &Lane) -> usize {
        let rounds = (self.tiles(problem) * self.split).div_ceil(lane.device().facts().multiprocessors as usize);
        rounds * self.sides * problem.n.div_ceil(CHUNK).div_ceil(self.split)
    }

    /// Whether all clusters run at once: what begins behind them would take as long again.
    fn at_once(&self, problem: &Product, kernel: &Kernel, lane: &Lane) -> Result<bool> {
        let size = self.size(lane);
        Ok(self.split == 1 || lane.device().clusters(kernel, self.split as u32, size)? >= self.tiles(problem))
    }

    /// Bytes of shared memory: stages, sums, and barriers.
    fn needed(&self) -> usize {
        let (outputs, rows) = (Boxes::SIDE * self.sides, 8 * self.eights);
        let stage = 2 * outputs * (CHUNK / 8) + rows * CHUNK;
        self.stages * (stage + 16) + rows * (outputs + 4) * 4
    }

    /// Threads and shared memory of a block, of which no two have room on a multiprocessor: they would be spread unevenly.
    fn size(&self, lane: &Lane) -> [u32; 2] {
        let half = lane.device().facts().shared / 2 + 1;
        [(128 * Boxes::TEAMS + 32) as u32, half.max(self.needed() as u32)]
    }

    fn columns(&self, problem: &Product) -> usize {
        problem.outs.div_ceil(Boxes::SIDE * self.sides)
    }

    fn tiles(&self, problem: &Product) -> usize {
        self.columns(problem).saturating_mul(problem.rows.div_ceil(8 * self.eights))
    }

    fn kernel(&self, problem: &Product, lane: &Lane) -> Result<Kernel> {
        let Boxes { eights, sides, deep, split, stages } = *self;
        let options = format!(
            "{} -DFORM={} -DNT={eights} -DSIDES={sides} -DDEEP={deep} -DSPLIT={split} -DSTAGES={stages} -DCHUNK={CHUNK} -DFN={}",
            types(problem.dtype),
            problem.form as usize,
            function(problem.options.activation)
        );
        // SAFETY: it waits before it reads anything but weights, writes none, and begins early only where nobody still writes any.
        Ok(unsafe { lane.device().kernel(&BOX, &options)?.early() })
    }

    pub(super) fn run(
        &self,
        problem: &Product,
        kernel: &Kernel,
        params: &mut Params,
        outputs: &Named<&Buffer>,
        lane: &Lane,
    ) -> Result<()> {
        prepare(problem, Order::Matrices(self.eights), params, outputs, lane)?;
        let (all, part) = ([problem.outs, problem.bytes() / 2], [Boxes::SIDE * self.sides, CHUNK / 16]);
        let map = |plane| lane.device().tensor_map(plane, all, part, true);
        let planes = [map(params.planes[0])?, map(params.planes[1])?];
        let (columns, tiles) = (self.columns(problem) as i32, grid_size(self.tiles(problem))?);
        let params = Boxed { planes, of: *params, columns, tiles: tiles as i32 };
        let (split, size) = (self.split as u32, self.size(lane));
        // SAFETY: Boxed is the struct that the kernel declares; the op's checks prove that all sizes fit the buffers, and
        // scratch memory has what was prepared.
        unsafe {
            if split > 1 {
                return lane.launch_together(kernel, Together::Cluster(split), tiles * split, size, &params);
            }
            let grid = [tiles.min(lane.device().facts().multiprocessors), 1, 1];
            lane.launch_with(kernel, grid, size[0], size[1], &params)
        }
    }
}
