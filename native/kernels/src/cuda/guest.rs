//! Work on a stream that another library owns, such as XLA, in memory of its own.
//!
//! Such a stream may end at any time after the call. So nothing of ours keeps it: memory is taken and given back in its
//! order within the call, and no buffer notes it. Its owner may also capture it into a graph; work that needs memory of
//! ours is refused then, for the graph would run after that was given back.

use super::buffer::Buffer;
use super::device::Device;
use super::driver;
use super::graph::Relaxed;
use super::lane::Lane;
use crate::error::{Error, Kind, Result};
use crate::tensor::Spec;
use cudarc::driver::sys;
use std::ffi::c_void;

impl Device {
    /// The device of a stream of another library, which must be in its primary context, as XLA's are.
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
        // SAFETY: the context of a stream that is alive is alive.
        let handle = unsafe { handle_of(context)? };
        let ordinal = (0..driver::count()?).find(|&ordinal| driver::handle(ordinal) == Ok(handle));
        let device = Device::get(ordinal.unwrap_or(usize::MAX))?;
        Device::in_context(context).ok_or_else(|| {
            Error::new(Kind::Unavailable, "stream")
                .expected(format_args!("one in the primary context of {device:?}"))
                .got("one in another context")
        })
    }

    /// A lane whose work goes to this stream.
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

/// The device of a context that is alive. What is current on this thread is again afterwards.
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
    /// A tensor in memory of the owner of this lane's stream, for the work of this lane alone.
    ///
    /// # Safety
    /// At `address` there are the bytes of the spec, for work that is queued on the stream now.
    pub unsafe fn lent(&self, spec: Spec, address: u64) -> Buffer {
        Buffer::lent(self.device(), self.shared_clock(), spec, address)
    }
}
