//! The CUDA runtime of the kernels: the driver and NVRTC, found at run time; devices, their memory and their lanes.
//!
//! Building needs no toolkit, and loading needs no GPU. [`devices`] lists the devices, or says why there are none. A
//! [`Device`] gives [`Buffer`]s (memory) and [`Lane`]s (a stream with pinned staging). [`Device::kernel`] compiles a
//! source once and caches it, in memory and on disk.

mod load;
mod runtime;
mod steps;

pub use load::blas::{Epilogue, Matrix};
pub use load::compiler::compiler;
pub use runtime::buffer::Buffer;
pub use runtime::device::{Device, Facts};
pub use runtime::devices::{DeviceInfo, devices};
pub use runtime::event::Mark;
pub use runtime::graph::Graph;
pub use runtime::kernel::{BLOCK_SUM, EARLY, Kernel, PACK, PRELUDE, Source};
pub use runtime::lane::Lane;
pub(crate) use runtime::lane::scratch_size;
pub use runtime::launch::{THREADS, grid_size, launch_each, type_names, types};
pub use runtime::params::{Declared, any, c_type, params};
pub use runtime::staging::Pinned;
pub use runtime::tensor_map::{Swizzle, TensorMap};
pub use runtime::together::Together;
pub use steps::elementwise::{function, map, pack};
pub use steps::gather::gather;
pub use steps::sum::columns;
pub(crate) use steps::tiles::{self, Tiles};
