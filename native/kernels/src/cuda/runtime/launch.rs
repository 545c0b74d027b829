//! Helpers of launches: names of types, and grids.

use super::kernel::Kernel;
use super::lane::Lane;
use super::params::Declared;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;

/// The names in CUDA of an element type and of its accumulation type.
pub fn type_names(dtype: DType) -> (&'static str, &'static str) {
    match dtype {
        DType::F64 => ("double", "double"),
        DType::F32 => ("float", "float"),
        DType::Bf16 => ("bf16", "float"),
        DType::F16 => ("f16", "float"),
        DType::U8 => ("unsigned char", "float"),
        DType::I8 => ("signed char", "float"),
        DType::I16 => ("short", "float"),
        DType::I32 => ("int", "float"),
        DType::I64 => ("i64", "float"),
    }
}

/// [`type_names`] as compiler options.
pub fn types(dtype: DType) -> String {
    let (storage, real) = type_names(dtype);
    format!("-DSTORAGE={storage} -DREAL={real}")
}

/// Threads in a block of a kernel whose threads are independent.
pub const THREADS: u32 = 128;

/// Queues a kernel of at least `count` independent threads; the kernel must skip the excess.
///
/// # Safety
/// As for [`Lane::launch`].
pub unsafe fn launch_each<P: Declared>(lane: &Lane, kernel: &Kernel<P::Any>, count: usize, params: &P) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let blocks = grid_size(count.div_ceil(THREADS as usize))?;
    // SAFETY: the caller's promise.
    unsafe { lane.launch(kernel, [blocks, 1, 1], THREADS, params) }
}

/// The x size of a grid. Only tensors larger than any device memory exceed the limit.
pub fn grid_size(count: usize) -> Result<u32> {
    let fits = u32::try_from(count).ok().filter(|&count| count < 1 << 31);
    fits.ok_or_else(|| Error::new(Kind::Size, "launch").expected("fewer than 2^31 blocks").got(count))
}
