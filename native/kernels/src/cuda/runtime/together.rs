//! Kernels whose blocks wait for each other.

use super::device::Device;
use super::kernel::Kernel;
use crate::error::Result;
use cudarc::driver::sys;

/// Which blocks of a launch wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Together {
    /// All blocks of the grid.
    Grid,
    /// Clusters of this many blocks, which can access each other's shared memory. From compute capability 9 on.
    Cluster(u32),
}

impl Together {
    pub(in crate::cuda) fn attribute(self) -> sys::CUlaunchAttribute {
        use sys::CUlaunchAttributeID_enum as Id;
        match self {
            Together::Grid => {
                let mut grid = attribute(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
                grid.value.cooperative = 1;
                grid
            }
            Together::Cluster(blocks) => {
                let mut cluster = attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
                cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
                cluster
            }
        }
    }
}

/// An attribute of a launch, its value all zeros.
pub(in crate::cuda) fn attribute(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    // SAFETY: zeros are a valid value of each field.
    sys::CUlaunchAttribute { id, ..unsafe { std::mem::zeroed() } }
}

/// The configuration of a launch with `threads` threads per block and `shared` bytes of dynamic shared memory.
pub(in crate::cuda) fn config(
    grid: [u32; 3],
    [threads, shared]: [u32; 2],
    stream: sys::CUstream,
    attributes: &mut [sys::CUlaunchAttribute],
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

impl Device {
    /// How many clusters of `blocks` blocks can be resident at once, where `size` is the threads of a block and its
    /// bytes of shared memory. 0 if the device has no clusters, or none of that size.
    pub fn clusters<P>(&self, kernel: &Kernel<P>, blocks: u32, size: [u32; 2]) -> Result<usize> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as LARGE;
        if self.facts().capability.0 < 9 {
            return Ok(0);
        }
        self.bind()?;
        let attributes = &mut [Together::Cluster(blocks).attribute()];
        let config = config([blocks, 1, 1], size, std::ptr::null_mut(), attributes);
        let mut clusters = 0;
        // SAFETY: sets and reads attributes of a loaded kernel.
        unsafe {
            self.answer(sys::cuFuncSetAttribute(kernel.function(), LARGE, 1), "cuFuncSetAttribute")?;
            // The driver may also refuse a size that no device of this kind has room for.
            let code = sys::cuOccupancyMaxActiveClusters(&mut clusters, kernel.function(), &config);
            let there = self.answer(code, "cuOccupancyMaxActiveClusters").is_ok();
            self.check().map(|()| if there { clusters as usize } else { 0 })
        }
    }
}
