//! Tensor maps: descriptions of tensors by which the device copies boxes without using threads (TMA).

use super::device::Device;
use crate::error::Result;
use cudarc::driver::sys;

/// A tensor of two-byte elements in device memory, and the box of it that one copy transfers.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// A placeholder, for kernels that copy in other ways.
    pub const NONE: TensorMap = TensorMap(sys::CUtensorMap { opaque: [0; 16] });

    /// Addresses, and strides in bytes, must be multiples of this.
    pub const UNIT: u64 = 16;
}

/// The order of the units of 16 bytes in boxes with rows of at most 64 or 128 bytes. Where it changes from row to row
/// (a swizzle), neighbouring rows fall into different banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// The order in memory.
    None,
    /// Rows of 64 bytes.
    Bytes64,
    /// Rows of 128 bytes.
    Bytes128,
}

impl Device {
    /// Describes a matrix of contiguous rows, like [`Device::map`]. In boxes with rows of 64 bytes the units can be
    /// `exchanged`.
    pub fn tensor_map(&self, address: u64, all: [usize; 2], part: [usize; 2], exchanged: bool) -> Result<TensorMap> {
        let swizzle = if exchanged { Swizzle::Bytes64 } else { Swizzle::None };
        self.map(address, all, [all[1], 1], part, swizzle)
    }

    /// Describes a tensor of `N` dimensions, 5 at most, by their sizes, and their strides in elements. Elements of the
    /// last dimension are contiguous. A box has `part` elements along each dimension, 256 at most, and its rows are
    /// whole units of 16 bytes; what lies outside of the tensor is filled with zeros. For devices of compute capability
    /// 9 or more.
    pub fn map<const N: usize>(
        &self,
        address: u64,
        sizes: [usize; N],
        strides: [usize; N],
        part: [usize; N],
        swizzle: Swizzle,
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT16;
        use sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
        use sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE;
        use sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        use sys::CUtensorMapSwizzle_enum as Order;
        let (order, row) = match swizzle {
            Swizzle::None => (Order::CU_TENSOR_MAP_SWIZZLE_NONE, 512),
            Swizzle::Bytes64 => (Order::CU_TENSOR_MAP_SWIZZLE_64B, 64),
            Swizzle::Bytes128 => (Order::CU_TENSOR_MAP_SWIZZLE_128B, 128),
        };
        assert!(strides[N - 1] == 1 && part[N - 1] * 2 <= row, "contiguous rows of at most {row} bytes");
        let mut map = TensorMap::NONE;
        // The driver lists dimensions from the innermost one on, without its stride.
        let (sizes, strides) = (from_last(sizes, |n| n as u64), from_last(strides, |n| n as u64 * 2));
        let part = from_last(part, |n| n as u32);
        // SAFETY: writes the map; all arrays have N elements, the strides one less, and the address is not read.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                CU_TENSOR_MAP_DATA_TYPE_UINT16,
                N as u32,
                address as *mut _,
                sizes.as_ptr(),
                strides[1..].as_ptr(),
                part.as_ptr(),
                [1; N].as_ptr(),
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                order,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        self.answer(code, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}

fn from_last<T, const N: usize>(all: [usize; N], each: impl Fn(usize) -> T) -> [T; N] {
    std::array::from_fn(|i| each(all[N - 1 - i]))
}
