//! The CUDA runtime of the kernels: the driver and NVRTC, found at run time; devices, their memory and their lanes.
//!
//! Building needs no toolkit, and loading needs no GPU. [`devices`] lists the devices, or says why there are none. A
//! [`Device`] gives [`Buffer`]s (memory) and [`Lane`]s (a stream with pinned staging). [`Device::kernel`] compiles a
//! source once and caches it, in memory and on disk.

mod blas;
mod buffer;
mod cache;
mod compiler;
mod device;
mod driver;
mod elementwise;
mod event;
mod find;
mod gather;
mod graph;
mod guest;
mod kernel;
mod lane;
mod memory;
mod run;
mod staging;
mod sum;
mod tables;
mod tensor_map;
pub(crate) mod tiles;
mod together;

use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
pub use blas::{Epilogue, Matrix};
pub use buffer::Buffer;
pub use compiler::compiler;
pub use device::{Device, Facts};
pub use driver::{DeviceInfo, devices};
pub use elementwise::{function, map, pack};
pub use event::Mark;
pub use gather::gather;
pub use graph::Graph;
pub use kernel::{Kernel, Source};
pub use lane::Lane;
pub use run::run_host;
pub use staging::Pinned;
pub use sum::columns;
pub use tensor_map::TensorMap;
pub(crate) use tiles::Tiles;
pub use together::Together;

/// The element types, rounding and functions that precede every kernel source.
pub const PRELUDE: &str = include_str!("prelude.cu");

/// The kernels' names for an element type and for the type of its arithmetic.
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
pub unsafe fn launch_each<P: Copy>(lane: &Lane, kernel: &Kernel, count: usize, params: &P) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let blocks = grid_size(count.div_ceil(THREADS as usize))?;
    // SAFETY: the caller's promise.
    unsafe { lane.launch(kernel, [blocks, 1, 1], THREADS, params) }
}

/// The x size of a grid. Only tensors larger than any memory exceed the limit.
pub fn grid_size(count: usize) -> Result<u32> {
    let fits = u32::try_from(count).ok().filter(|&count| count < 1 << 31);
    fits.ok_or_else(|| Error::new(Kind::Size, "launch").expected("fewer than 2^31 blocks").got(count))
}
