//! The driver: whether it is present, what its errors mean, and which devices it sees.

use crate::error::{Error, Kind, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// The newest driver function called here: a driver that exports it exports all others (CUDA 12.0, 2022).
const NEWEST: &[u8] = b"cuTensorMapEncodeTiled\0";

/// Whether CUDA can be used. Checked once; the result holds for the life of the OS process.
pub(in crate::cuda) fn ready() -> Result<()> {
    static VERDICT: OnceLock<Result<()>> = OnceLock::new();
    VERDICT.get_or_init(|| found().and_then(|()| initialised())).clone()
}

fn unavailable(argument: &str) -> Error {
    Error::new(Kind::Unavailable, argument)
}

/// cudarc panics where the library or a function is missing, so both are checked first.
fn found() -> Result<()> {
    let names: Vec<String> = ["cuda", "nvcuda"].iter().flat_map(|n| cudarc::get_lib_name_candidates(n)).collect();
    // SAFETY: loading the driver runs its initialisers, which is what they are for.
    let library = names.iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok());
    let library = library.ok_or_else(|| {
        unavailable("CUDA driver")
            .expected("libcuda.so.1 (nvcuda.dll on Windows)")
            .got("no such library")
            .hint("Install the NVIDIA driver, or use the CPU")
    })?;
    // SAFETY: the symbol is only looked up, never called through this type.
    match unsafe { library.get::<unsafe extern "C" fn()>(NEWEST) } {
        Ok(_) => Ok(()),
        Err(_) => Err(unavailable("CUDA driver")
            .expected("a driver for CUDA 12 or later")
            .got("an older one")
            .hint("Update the NVIDIA driver")),
    }
}

fn initialised() -> Result<()> {
    // SAFETY: the library was found, and cuInit may be called at any time.
    let code = unsafe { sys::cuInit(0) };
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(unavailable("CUDA driver").got(text(code)).hint("See what nvidia-smi says, or use the CPU"))
}

/// The name and the text of a driver error.
pub(in crate::cuda) fn text(code: CUresult) -> String {
    let said = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut said: *const c_char = std::ptr::null();
        // SAFETY: both functions write a pointer to a static C string, or null.
        unsafe {
            ask(code, &mut said);
            (!said.is_null()).then(|| CStr::from_ptr(said).to_string_lossy().into_owned())
        }
    };
    let name = said(sys::cuGetErrorName).unwrap_or_else(|| format!("CUDA error {}", code as u32));
    match said(sys::cuGetErrorString) {
        Some(text) => format!("{name} ({text})"),
        None => name,
    }
}

/// Errors after which the driver answers every further call of this OS process with an error.
pub(in crate::cuda) fn is_fatal(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_UNKNOWN
    )
}

/// Converts the result code of a driver call to a `Result`; `what` names the call.
pub(in crate::cuda) fn answer(code: CUresult, what: &str) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::new(Kind::Memory, what).got(text(code))),
        _ => Err(Error::new(Kind::Cuda, what).got(text(code))),
    }
}

pub(in crate::cuda) fn count() -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: writes one int.
    answer(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
    Ok(count.max(0) as usize)
}

pub(in crate::cuda) fn handle(ordinal: usize) -> Result<sys::CUdevice> {
    let mut handle = 0;
    // SAFETY: writes one handle; the driver refuses ordinals that it does not have.
    answer(unsafe { sys::cuDeviceGet(&mut handle, ordinal as c_int) }, "cuDeviceGet")?;
    Ok(handle)
}

pub(in crate::cuda) fn attribute(device: sys::CUdevice, which: Attribute) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: writes one int.
    answer(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, "cuDeviceGetAttribute")?;
    Ok(value.max(0) as u32)
}

/// Bytes of a device's memory.
pub(in crate::cuda) fn memory(device: sys::CUdevice) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: writes one size.
    answer(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, device) }, "cuDeviceTotalMem")?;
    Ok(bytes)
}

/// Whether a device can read the memory of another.
pub(in crate::cuda) fn reaches(device: sys::CUdevice, other: sys::CUdevice) -> Result<bool> {
    let mut can: c_int = 0;
    // SAFETY: writes one int.
    answer(unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, other) }, "cuDeviceCanAccessPeer")?;
    Ok(can != 0)
}

/// Major and minor version of CUDA that the driver supports.
pub(in crate::cuda) fn version() -> Result<(u32, u32)> {
    let mut version: c_int = 0;
    // SAFETY: writes one int.
    answer(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    Ok((version as u32 / 1000, version as u32 % 1000 / 10))
}

pub(in crate::cuda) fn capability(device: sys::CUdevice) -> Result<(u32, u32)> {
    Ok((
        attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}
