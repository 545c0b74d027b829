//! How kernels with `tiles.cu` are launched whose warps multiply in teams: blocks of threads that go on with other tiles, or
//! neighbours, clusters, that share the columns of one.

use super::{Kernel, Lane, Together, compiler, grid_size};
use crate::error::Result;

/// Outputs of a team of four warps.
pub(crate) const SIDE: usize = 64;
/// Teams of a block of threads.
pub(crate) const TEAMS: usize = 4;
/// Bytes of shared memory that such a block needs, with what the device keeps to itself.
const BESIDE: usize = 1152;

/// An option of such kernels: registers of a thread, so few that a block of the kernel which makes the next x ready, so many
/// threads of 32 registers, has room beside one of theirs on each quarter of a multiprocessor.
pub(crate) fn registers(beside: u32) -> String {
    let (own, all) = ((4 * TEAMS as u32 + 1).div_ceil(4) * 32, 65536 / 4 - beside / 4 * 32);
    format!("--maxrregcount={}", all / own / 8 * 8)
}

/// An option of kernels with `tiles.cu`: whether so many bytes of weights are more than the device's cache holds.
pub(crate) fn streamed(bytes: usize, lane: &Lane) -> String {
    format!("-DSTREAMED={}", usize::from(bytes > lane.device().facts().cache as usize))
}

/// Eights of rows that a tile has.
pub(crate) fn eights(rows: usize) -> usize {
    rows.div_ceil(8).next_power_of_two().min(4)
}

/// The tiles of a product, each of so many outputs and rows, and how many neighbours share one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    pub columns: usize,
    pub groups: usize,
    pub split: usize,
    /// How long a block of threads takes for its share of one.
    pub turns: usize,
    /// Bytes of shared memory that a block of threads needs.
    pub shared: usize,
}

impl Tiles {
    /// Whether the device has teams that multiply as one, and the compiler knows all that their kernels need.
    pub fn possible(lane: &Lane) -> bool {
        let old = compiler().is_ok_and(|version| version < (12, 1));
        lane.device().facts().capability.0 == 9 && !old
    }

    /// The fastest of such plans, whose clusters run all at once, and its kernel. Of equally fast ones the first is best, but
    /// neighbours wait for each other.
    pub fn fastest<T>(
        mut plans: Vec<T>,
        tiles: impl Fn(&T) -> &Tiles,
        kernel: impl Fn(&T) -> Result<Kernel>,
        lane: &Lane,
    ) -> Result<Option<(T, Kernel)>> {
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

    /// How many a multiprocessor has one after the other.
    fn rounds(&self, lane: &Lane) -> usize {
        self.count().saturating_mul(self.split).div_ceil(lane.device().facts().multiprocessors as usize)
    }

    /// Whether a block has room on a multiprocessor, beside one of the kernel that makes the next x ready, and all clusters run at
    /// once: what begins behind others would take as long again.
    pub fn fit(&self, lane: &Lane) -> bool {
        self.shared + BESIDE <= lane.device().facts().shared as usize && (self.split == 1 || self.rounds(lane) <= 1)
    }

    /// The same for a kernel that is compiled for them.
    fn at_once(&self, kernel: &Kernel, lane: &Lane) -> Result<bool> {
        Ok(self.split == 1 || lane.device().clusters(kernel, self.split as u32, self.size(lane))? >= self.count())
    }

    /// Threads, with a warp that fetches, and shared memory, so much that no two blocks have room on a multiprocessor: they would
    /// be spread unevenly.
    fn size(&self, lane: &Lane) -> [u32; 2] {
        let half = lane.device().facts().shared / 2 + 1;
        [128 * TEAMS as u32 + 32, half.max(self.shared as u32)]
    }

    /// What kernels know of them: columns of tiles, and their number.
    pub fn numbers(&self) -> Result<[i32; 2]> {
        Ok([self.columns as i32, grid_size(self.count())? as i32])
    }

    /// Queues the kernel. Each multiprocessor gets a block, also where there are fewer tiles.
    ///
    /// # Safety
    /// As for [`Lane::launch_with`].
    pub unsafe fn launch<P: Copy>(&self, kernel: &Kernel, params: &P, lane: &Lane) -> Result<()> {
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
