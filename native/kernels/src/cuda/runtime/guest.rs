//! Work on a stream that another library owns, such as XLA, in memory of that library.
//!
//! Such a stream may be destroyed at any time after the call, so no state may refer to it longer. Memory is allocated
//! and freed in its order within the call, and no buffer records it. The owner may also capture the stream into a
//! graph. Work that needs memory from this crate is refused then, because the graph would run after that memory was
//! freed.

use super::buffer::Buffer;
use super::device::Device;
use super::graph::Relaxed;
use super::lane::Lane;
use crate::cuda::load::driver;
use crate::error::{Error, Kind, Result};
use crate::tensor::Spec;
use cudarc::driver::sys;
use std::ffi::c_void;

impl Device {
    /// The device of another library's stream, which must be in the primary context, as XLA's are.
    ///
    /// # Safety
    /// `stream` is a `CUstream` that is alive.
    pub unsafe fn of_stream(stream: *mut c_void) -> Result<Device> {
        driver::ready()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; writes one handle.
        driver::answer(unsafe { sys::cuStreamGetCtx(stream.cast(), &mut context) }, "cuStreamGetCtx")?;
        if let Some(device) = Device::in_context(context) {
            return device.check().map(|()| device);
        }
        // SAFETY: a live stream has a live context.
        let handle = unsafe { handle_of(context)? };
        let ordinal = (0..driver::count()?).find(|&ordinal| driver::handle(ordinal) == Ok(handle));
        let device = Device::get(ordinal.unwrap_or(usize::MAX))?;
        Device::in_context(context).ok_or_else(|| {
            Error::new(Kind::Unavailable, "stream")
                .expected(format_args!("one in the primary context of {device:?}"))
                .got("one in another context")
        })
    }

    /// A lane that queues its work on this stream.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of this device that outlives the lane.
    pub unsafe fn lane_on(&self, stream: *mut c_void) -> Result<Lane> {
        self.bind()?;
        // SAFETY: the caller's promise.
        let captured = unsafe { Relaxed::if_captured(stream.cast())? };
        Ok(Lane::guest(self.clone(), stream.cast(), captured))
    }
}

/// The device of a live context. Leaves this thread's current context unchanged.
unsafe fn handle_of(mut context: sys::CUcontext) -> Result<sys::CUdevice> {
    let mut handle = 0;
    // SAFETY: the caller's promise; writes one handle each.
    unsafe {
        driver::answer(sys::cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")?;
        let found = driver::answer(sys::cuCtxGetDevice(&mut handle), "cuCtxGetDevice");
        driver::answer(sys::cuCtxPopCurrent_v2(&mut context), "cuCtxPopCurrent")?;
        found.map(|()| handle)
    }
}

impl Lane {
    /// A buffer over memory of the stream's owner, for work of this lane alone.
    ///
    /// # Safety
    /// The bytes of `spec` are valid at `address` for work queued on the stream now.
    pub unsafe fn lent(&self, spec: Spec, address: u64) -> Buffer {
        Buffer::lent(self.device(), self.shared_clock(), spec, address)
    }
}
