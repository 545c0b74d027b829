//! Launches of kernels with `tiles.cu` whose warps multiply in teams. Either each block continues with further tiles,
//! or a cluster of blocks shares the columns of one tile.

use crate::cuda::{Declared, Kernel, Lane, Together, compiler, grid_size};
use crate::error::Result;

/// Outputs of a team of four warps.
pub(crate) const SIDE: usize = 64;
/// Teams in a block.
pub(crate) const TEAMS: usize = 4;
/// Bytes of shared memory for a block of the kernel that prepares the next x, including what the device reserves.
const BESIDE: usize = 1152;

/// A compiler option that limits the registers per thread of such kernels. It leaves registers for a resident block of
/// the kernel that prepares the next x, of `beside` threads with 32 registers each. Both blocks must fit together on
/// each quarter of a multiprocessor.
pub(crate) fn registers(beside: u32) -> String {
    let (own, all) = ((4 * TEAMS as u32 + 1).div_ceil(4) * 32, 65536 / 4 - beside / 4 * 32);
    format!("--maxrregcount={}", all / own / 8 * 8)
}

/// A compiler option for kernels with `tiles.cu`: whether `bytes` bytes of weights exceed the device's cache.
pub(crate) fn streamed(bytes: usize, lane: &Lane) -> String {
    format!("-DSTREAMED={}", usize::from(bytes > lane.device().facts().cache as usize))
}

/// Groups of eight rows in a tile.
pub(crate) fn eights(rows: usize) -> usize {
    rows.div_ceil(8).next_power_of_two().min(4)
}

/// The tiles of a product: columns of tiles, groups of rows, and the number of blocks that share a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    pub columns: usize,
    pub groups: usize,
    pub split: usize,
    /// Estimated time of a block for its share of one tile, in arbitrary units.
    pub turns: usize,
    /// Bytes of shared memory that a block needs.
    pub shared: usize,
}

impl Tiles {
    /// Whether the device has warpgroup multiplications, and the compiler supports everything that their kernels need.
    pub fn possible(lane: &Lane) -> bool {
        let old = compiler().is_ok_and(|version| version < (12, 1));
        lane.device().facts().capability.0 == 9 && !old
    }

    /// The fastest plan whose clusters are all resident at once, with its kernel. Plans with fewer blocks per tile win
    /// ties, because the blocks of a cluster wait for each other.
    pub fn fastest<T, P>(
        mut plans: Vec<T>,
        tiles: impl Fn(&T) -> &Tiles,
        kernel: impl Fn(&T) -> Result<Kernel<P>>,
        lane: &Lane,
    ) -> Result<Option<(T, Kernel<P>)>> {
        plans.sort_by_key(|plan| (tiles(plan).rounds(lane) * tiles(plan).turns, tiles(plan).split));
        for plan in plans {
            let kernel = kernel(&plan)?;
            if tiles(&plan).at_once(&kernel, lane)? {
                return Ok(Some((plan, kernel)));
            }
        }
        Ok(None)
    }

    fn count(&self) -> usize {
        self.columns.saturating_mul(self.groups)
    }

    /// How many tiles a multiprocessor computes one after the other.
    fn rounds(&self, lane: &Lane) -> usize {
        self.count().saturating_mul(self.split).div_ceil(lane.device().facts().multiprocessors as usize)
    }

    /// Whether a block fits on a multiprocessor together with one of the kernel that prepares the next x, and all
    /// clusters are resident at once. A cluster that starts late would double the time.
    pub fn fit(&self, lane: &Lane) -> bool {
        self.shared + BESIDE <= lane.device().facts().shared as usize && (self.split == 1 || self.rounds(lane) <= 1)
    }

    /// Like [`Tiles::fit`] for the number of clusters, as the driver reports it for the compiled kernel.
    fn at_once<P>(&self, kernel: &Kernel<P>, lane: &Lane) -> Result<bool> {
        Ok(self.split == 1 || lane.device().clusters(kernel, self.split as u32, self.size(lane))? >= self.count())
    }

    /// Threads, including a warp that fetches, and bytes of shared memory. The latter exceed half of a
    /// multiprocessor's, so that two blocks never share one: the load would be uneven.
    fn size(&self, lane: &Lane) -> [u32; 2] {
        let half = lane.device().facts().shared / 2 + 1;
        [128 * TEAMS as u32 + 32, half.max(self.shared as u32)]
    }

    /// The kernel's parameters: columns of tiles, and number of tiles.
    pub fn numbers(&self) -> Result<[i32; 2]> {
        Ok([self.columns as i32, grid_size(self.count())? as i32])
    }

    /// Queues the kernel. Each multiprocessor gets a block, even where there are fewer tiles.
    ///
    /// # Safety
    /// As for [`Lane::launch_with`].
    pub unsafe fn launch<P: Declared>(&self, kernel: &Kernel<P::Any>, params: &P, lane: &Lane) -> Result<()> {
        let (split, size) = (self.split as u32, self.size(lane));
        // SAFETY: the caller's promise.
        unsafe {
            if split > 1 {
                let blocks = grid_size(self.count())? * split;
                return lane.launch_together(kernel, Together::Cluster(split), blocks, size, params);
            }
            lane.launch_with(kernel, [lane.device().facts().multiprocessors, 1, 1], size[0], size[1], params)
        }
    }
}
