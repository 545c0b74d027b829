//! CUDA graphs: work that is recorded once and replayed with one call, which saves a driver call per kernel.

use super::device::Device;
use super::lane::Lane;
use crate::cuda::load::driver;
use crate::error::{Kind, Result};
use cudarc::driver::sys;

/// Recorded work of a lane. All memory and kernels that it uses must outlive it.
pub struct Graph {
    device: Device,
    graph: sys::CUgraphExec,
}

// SAFETY: a graph may be used from any thread, by one at a time, as its owner ensures.
unsafe impl Send for Graph {}

impl Lane {
    /// Records what `work` queues on this lane without running it. The kernels and memory that it needs must exist
    /// already, so the same work must have run before.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let device = self.device();
        self.recording(true);
        let recorded = self.captured(work);
        self.recording(false);
        let recorded = recorded?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: reads what was recorded; writes one handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut graph, recorded.0, 0) };
        device.answer(made, "cuGraphInstantiate")?;
        Ok(Graph { device: device.clone(), graph })
    }

    /// Captures what `work` queues on this lane's stream, without running it.
    fn captured(&self, work: impl FnOnce() -> Result<()>) -> Result<Recorded> {
        let device = self.device();
        device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream belongs to this lane alone.
        device.answer(unsafe { sys::cuStreamBeginCapture_v2(self.stream(), mode) }, "cuStreamBeginCapture")?;
        let worked = work();
        let mut recorded = Recorded(std::ptr::null_mut());
        // SAFETY: writes one handle; ends the recording in any case.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream(), &mut recorded.0) };
        worked.and(device.answer(ended, "cuStreamEndCapture"))?;
        Ok(recorded)
    }

    /// Queues recorded work.
    ///
    /// # Safety
    /// The work was recorded by this lane, and everything it uses is still alive.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        self.device().bind()?;
        // SAFETY: the caller's promise.
        self.device().answer(unsafe { sys::cuGraphLaunch(graph.graph, self.stream()) }, "cuGraphLaunch")
    }
}

/// A captured graph that is not instantiated yet.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it came from the end of a capture.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

impl Device {
    /// Whether a CUDA graph of another library can hold `work`, which it can if the work needs no memory but what that
    /// library lends. The trial compiles and loads the kernels of `work`, and does not run them.
    pub fn fits_graph(&self, work: impl FnOnce(Lane) -> Result<()>) -> Result<bool> {
        let own = self.lane()?;
        // SAFETY: the stream outlives the capture.
        let trial = own.captured(|| work(unsafe { self.lane_on(own.stream().cast())? }));
        match trial {
            Ok(_) => Ok(true),
            Err(error) if error.kind == Kind::Unavailable && *error.argument == *UNFIT => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The argument of the error for work that another library's graph cannot hold.
pub(in crate::cuda) const UNFIT: &str = "CUDA graph";

/// While this value lives, its thread may compile, load and copy although one of its streams is being captured.
pub(in crate::cuda) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    /// Relaxes the capture mode of this thread if `stream` is being captured.
    ///
    /// # Safety
    /// The stream is alive.
    pub(in crate::cuda) unsafe fn if_captured(stream: sys::CUstream) -> Result<Option<Relaxed>> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's promise; writes one value.
        driver::answer(unsafe { sys::cuStreamIsCapturing(stream, &mut status) }, "cuStreamIsCapturing")?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(None);
        }
        let mut relaxed = Relaxed(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        relaxed.exchange()?;
        Ok(Some(relaxed))
    }

    fn exchange(&mut self) -> Result<()> {
        // SAFETY: changes a setting of this thread and writes the previous value.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
        driver::answer(code, "cuThreadExchangeStreamCaptureMode")
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let _ = self.exchange();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it came from cuGraphInstantiate; the driver waits for running work.
            unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}
