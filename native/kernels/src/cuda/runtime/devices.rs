//! The devices that the driver sees.

use super::device::Device;
use crate::cuda::load::compiler::compiler;
use crate::cuda::load::driver::{answer, attribute, capability, count, handle, memory, ready, version};
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::ffi::{CStr, c_char};

/// Properties of a device that can be read without creating a context on it.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Its number, as [`Device::get`] takes it.
    pub ordinal: usize,
    /// The vendor's name for it.
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Bytes of free memory. `None` until this process uses the device: a context alone costs memory.
    pub memory_free: Option<usize>,
    /// Major and minor version of CUDA that the driver supports.
    pub driver: (u32, u32),
    /// Major and minor version of NVRTC, or why kernels cannot be compiled.
    pub compiler: Result<(u32, u32)>,
    /// Why the device takes no more work in this process, if it was lost.
    pub lost: Option<Error>,
}

/// The CUDA devices of this machine. Fails with [`Kind::Unavailable`](crate::error::Kind::Unavailable) where there is
/// no driver.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    ready()?;
    (0..count()?).map(info).collect()
}

fn info(ordinal: usize) -> Result<DeviceInfo> {
    let device = handle(ordinal)?;
    let used = Device::in_use(ordinal);
    Ok(DeviceInfo {
        ordinal,
        name: name(device)?,
        capability: capability(device)?,
        multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: memory(device)?,
        memory_free: used.as_ref().and_then(|device| device.memory_free().ok()),
        driver: version()?,
        compiler: compiler(),
        lost: used.and_then(|device| device.check().err()),
    })
}

fn name(device: sys::CUdevice) -> Result<String> {
    let mut name = [0 as c_char; 256];
    // SAFETY: writes a C string of at most 256 bytes.
    answer(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) }, "cuDeviceGetName")?;
    // SAFETY: the driver terminated it with a zero.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}
