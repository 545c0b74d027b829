//! Work that is recorded once and queued again by one call, which spares a call into the driver for each kernel.

use super::device::Device;
use super::lane::Lane;
use crate::error::Result;
use cudarc::driver::sys;

/// Recorded work of a lane. What it uses must be kept alive as long.
pub struct Graph {
    device: Device,
    graph: sys::CUgraphExec,
}

// SAFETY: a graph may be used from any thread, by one at a time, as its owner sees to.
unsafe impl Send for Graph {}

impl Lane {
    /// Records what `work` queues on this lane; it does not run yet. What it needs for that, such as kernels and memory,
    /// must be there: it has been done before.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let device = self.device();
        device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this lane's, which nobody else uses.
        device.answer(unsafe { sys::cuStreamBeginCapture_v2(self.stream(), mode) }, "cuStreamBeginCapture")?;
        self.recording(true);
        let worked = work();
        self.recording(false);
        let mut recorded = std::ptr::null_mut();
        // SAFETY: writes one handle; ends the recording in any case.
        let ended =
            device.answer(unsafe { sys::cuStreamEndCapture(self.stream(), &mut recorded) }, "cuStreamEndCapture");
        worked.and(ended)?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: reads what was recorded, which is not needed afterwards; writes one handle.
        let made = unsafe {
            let code = sys::cuGraphInstantiateWithFlags(&mut graph, recorded, 0);
            sys::cuGraphDestroy(recorded);
            code
        };
        device.answer(made, "cuGraphInstantiate")?;
        Ok(Graph { device: device.clone(), graph })
    }

    /// Queues recorded work.
    ///
    /// # Safety
    /// It was recorded by this lane, and all that it uses is still there.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        self.device().answer(unsafe { sys::cuGraphLaunch(graph.graph, self.stream()) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it came from cuGraphInstantiate; the driver waits for what is running.
            unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}
