//! Events: points in the work of lanes, to wait for and for timing.

use super::device::Device;
use crate::error::Result;
use cudarc::driver::sys;

/// A point in a lane's work.
pub struct Mark(pub(in crate::cuda) Event);

impl Mark {
    /// Milliseconds of device time between two points. Waits for both.
    pub fn milliseconds_since(&self, earlier: &Mark) -> Result<f32> {
        let device = &self.0.device;
        self.0.wait()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive and were recorded.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.0.handle, self.0.handle) };
        device.answer(code, "cuEventElapsedTime")?;
        Ok(milliseconds)
    }
}

pub(in crate::cuda) struct Event {
    device: Device,
    handle: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver locks inside.
unsafe impl Sync for Event {}

impl Event {
    /// An event of a device, which only its lanes record.
    pub(in crate::cuda) fn new(device: &Device, timing: bool) -> Result<Event> {
        use sys::CUevent_flags::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
        let flag = if timing { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        device.answer(unsafe { sys::cuEventCreate(&mut handle, flag as u32) }, "cuEventCreate")?;
        Ok(Event { device: device.clone(), handle })
    }

    pub(in crate::cuda) fn handle(&self) -> sys::CUevent {
        self.handle
    }

    pub(in crate::cuda) fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both handles are alive.
        self.device.answer(unsafe { sys::cuEventRecord(self.handle, stream) }, "cuEventRecord")
    }

    pub(in crate::cuda) fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        self.device.answer(unsafe { sys::cuEventSynchronize(self.handle) }, "cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the handle is alive, and its only owner is being dropped.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
