//! What CUDA kernels are run with: the driver and NVRTC, found at run time; devices, their memory
//! and their lanes.
//!
//! Nothing here needs a toolkit to build or a GPU to load. [`devices`] says what is there, or why
//! nothing is. A [`Device`] gives [`Buffer`]s (memory) and [`Lane`]s (a stream with pinned staging);
//! [`Device::kernel`] compiles a source once and keeps it, in memory and on disk.

mod buffer;
mod cache;
mod compiler;
mod device;
mod driver;
mod event;
mod kernel;
mod lane;
mod memory;
mod run;
mod staging;

pub use buffer::Buffer;
pub use compiler::compiler;
pub use device::{Device, Facts};
pub use driver::{DeviceInfo, devices};
pub use event::Mark;
pub use kernel::{Kernel, Source};
pub use lane::Lane;
pub use run::run_host;

/// The element types, rounding and functions that every kernel source begins with.
pub const PRELUDE: &str = include_str!("prelude.cu");
