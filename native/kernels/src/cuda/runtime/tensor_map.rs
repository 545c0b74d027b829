//! Tensor maps: descriptions of matrices by which the device copies boxes without using threads (TMA).

use super::device::Device;
use crate::error::Result;
use cudarc::driver::sys;

/// A matrix of two-byte elements in device memory, and the box of it that one copy transfers.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// A placeholder, for kernels that copy in other ways.
    pub const NONE: TensorMap = TensorMap(sys::CUtensorMap { opaque: [0; 16] });

    /// Addresses and row sizes in bytes must be multiples of this.
    pub const UNIT: u64 = 16;
}

impl Device {
    /// Describes a matrix of contiguous rows. A box has at most 256 rows and 256 elements per row, and its rows are
    /// whole units of 16 bytes. In boxes with rows of 64 bytes the units can be `exchanged` (swizzled), so that
    /// neighbouring rows fall into different banks. For devices of compute capability 9 or more.
    pub fn tensor_map(
        &self,
        address: u64,
        [rows, elements]: [usize; 2],
        part: [usize; 2],
        exchanged: bool,
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT16;
        use sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
        use sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE;
        use sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        use sys::CUtensorMapSwizzle_enum as Swizzle;
        let mut map = TensorMap::NONE;
        let (sizes, strides) = ([elements as u64, rows as u64], [elements as u64 * 2]);
        assert!(!exchanged || part[1] * 2 == 64, "rows of 64 bytes");
        let none = Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE;
        let swizzle = if exchanged { Swizzle::CU_TENSOR_MAP_SWIZZLE_64B } else { none };
        let part = [part[1] as u32, part[0] as u32];
        // SAFETY: writes the map; all arrays have two elements, the strides one, and the address is not read.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                CU_TENSOR_MAP_DATA_TYPE_UINT16,
                2,
                address as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                [1, 1].as_ptr(),
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        self.answer(code, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}
