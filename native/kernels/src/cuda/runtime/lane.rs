//! A lane: a stream and the pinned memory that stages copies to and from the device.

mod copies;
mod scratch;

pub(crate) use self::scratch::scratch_size;
use self::scratch::{KEPT_SCRATCH, Scratch};
use super::buffer::{Buffer, Use};
use super::device::Device;
use super::event::{Event, Mark};
use super::graph::{self, Relaxed};
use super::kernel::Kernel;
use super::params::Declared;
use super::staging::Staging;
use super::together::{Together, attribute, config};
use crate::cuda::load::blas::{self, Epilogue, Matrix, Product};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Spec};
use cudarc::driver::sys::{self, CUresult};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An ordered queue of work for one device, used by one thread at a time. Comes from [`Device::lane`] and returns to
/// its stock when dropped.
pub struct Lane {
    device: Device,
    /// `None` only while it is being dropped.
    core: Option<RefCell<Core>>,
    clock: Arc<Clock>,
    tf32: bool,
    states_first: bool,
    recording: Cell<bool>,
    /// Whether the stream belongs to another library.
    guest: bool,
    /// Set while that library captures the stream into a graph, which may run after this lane's memory has been freed.
    captured: Option<Relaxed>,
    /// Whether the last kernel queued is an early one.
    behind_early: Cell<bool>,
}

// SAFETY: streams may be used from any thread, and a lane is used by one thread at a time.
unsafe impl Send for Lane {}

/// The parts of a lane that the device's stock of idle lanes keeps.
pub(in crate::cuda) struct Core {
    clock: Arc<Clock>,
    staging: Staging,
    scratch: Scratch,
    /// Created by the first matrix product.
    blas: Option<blas::Handle>,
    /// The workspace of matrix products.
    workspace: Scratch,
}

/// The progress of a lane: points noted before their work is queued, those whose work is queued for certain, and those
/// known to be done.
pub(in crate::cuda) struct Clock {
    device: Device,
    stream: sys::CUstream,
    noted: AtomicU64,
    queued: AtomicU64,
    done: AtomicU64,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Clock {}
// SAFETY: the driver locks inside.
unsafe impl Sync for Clock {}

impl Clock {
    pub(in crate::cuda) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(in crate::cuda) fn passed(&self, point: u64) -> bool {
        self.done.load(Ordering::Acquire) >= point
    }

    /// A point whose work is queued next, by the thread of the lane.
    fn note(&self) -> u64 {
        self.noted.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Tells that the work of all points is queued. Only the thread of the lane knows: any thread may wait, also between
    /// a note and its work, which such a wait must not count as done.
    fn all_queued(&self) {
        self.queued.fetch_max(self.noted.load(Ordering::Acquire), Ordering::AcqRel);
    }

    /// Waits for all queued work. The device remembers errors.
    pub(in crate::cuda) fn wait(&self) {
        let _ = self.synchronize();
    }

    fn synchronize(&self) -> Result<()> {
        let device = &self.device;
        device.bind()?;
        let queued = self.queued.load(Ordering::Acquire);
        // SAFETY: streams are never destroyed.
        device.answer(unsafe { sys::cuStreamSynchronize(self.stream) }, "cuStreamSynchronize")?;
        self.done.fetch_max(queued, Ordering::AcqRel);
        Ok(())
    }
}

/// A new stream that does not wait for the default stream.
pub(in crate::cuda) fn stream() -> std::result::Result<sys::CUstream, (CUresult, &'static str)> {
    let mut stream = std::ptr::null_mut();
    let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes one handle in the bound context.
    match unsafe { sys::cuStreamCreate(&mut stream, flag) } {
        CUresult::CUDA_SUCCESS => Ok(stream),
        code => Err((code, "cuStreamCreate")),
    }
}

impl Core {
    pub(in crate::cuda) fn new(device: &Device) -> Result<Core> {
        let stream = stream().or_else(|(code, what)| device.answer(code, what).map(|()| std::ptr::null_mut()))?;
        Ok(Core::on(device, stream))
    }

    fn on(device: &Device, stream: sys::CUstream) -> Core {
        let [noted, queued, done] = Default::default();
        let clock = Clock { device: device.clone(), stream, noted, queued, done };
        let (staging, scratch, workspace) = Default::default();
        Core { clock: Arc::new(clock), staging, scratch, blas: None, workspace }
    }
}

impl Core {
    /// Once the lane is idle, returns the memory that is kept only for speed.
    pub(in crate::cuda) fn trim(&mut self, device: &Device) -> Result<()> {
        self.clock.synchronize()?;
        self.staging = Staging::default();
        self.blas = None;
        self.workspace.release(device, &self.clock);
        self.scratch.release(device, &self.clock);
        self.clock.synchronize()
    }
}

impl Core {
    /// Gives up a stream of another library, which may destroy it soon.
    fn leave(mut self, device: &Device) {
        if self.staging.is_used() {
            self.clock.wait();
        }
        self.workspace.release(device, &self.clock);
        self.scratch.release(device, &self.clock);
        device.handles().extend(self.blas);
    }
}

impl Lane {
    pub(in crate::cuda) fn new(device: Device, core: Core) -> Lane {
        Lane {
            device,
            clock: core.clock.clone(),
            core: Some(RefCell::new(core)),
            tf32: false,
            states_first: false,
            recording: Cell::new(false),
            guest: false,
            captured: None,
            behind_early: Cell::new(false),
        }
    }

    /// A lane on another library's stream: see [`Device::lane_on`].
    pub(in crate::cuda) fn guest(device: Device, stream: sys::CUstream, captured: Option<Relaxed>) -> Lane {
        let core = Core::on(&device, stream);
        let mut lane = Lane::new(device, core);
        (lane.guest, lane.captured) = (true, captured);
        lane
    }

    /// Fails where the stream is being captured and `bytes` of memory are needed that its owner did not lend.
    fn not_captured(&self, bytes: usize, what: &str) -> Result<()> {
        match self.captured {
            Some(_) if bytes > 0 => Err(Error::new(Kind::Unavailable, graph::UNFIT)
                .expected("work in memory of its owner alone")
                .got(format_args!("{bytes} bytes of {what}"))),
            _ => Ok(()),
        }
    }

    /// Fails while a graph is recorded, for work that must be done before this returns.
    fn not_recorded(&self, what: &str) -> Result<()> {
        if self.captured.is_none() && !self.recording.get() {
            return Ok(());
        }
        Err(Error::new(Kind::Unavailable, graph::UNFIT).expected("work that the host need not wait for").got(what))
    }

    /// Sets whether matrix products may round f32 factors to TF32, with 10 bits of mantissa.
    pub fn allow_tf32(mut self, allow: bool) -> Lane {
        self.tf32 = allow;
        self
    }

    /// Makes ops over sequences write the states at their ends before all other outputs where they can, and ask as late as
    /// they can for those that they start from: for parts of a sequence on several devices. They need more work for it.
    pub(crate) fn states_first(mut self) -> Lane {
        self.states_first = true;
        self
    }

    /// Whether [`Lane::states_first`] was called.
    pub(crate) fn gives_states_first(&self) -> bool {
        self.states_first
    }

    /// The lane's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(in crate::cuda) fn stream(&self) -> sys::CUstream {
        self.clock.stream
    }

    pub(in crate::cuda) fn recording(&self, on: bool) {
        self.recording.set(on);
    }

    pub(in crate::cuda) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(in crate::cuda) fn shared_clock(&self) -> &Arc<Clock> {
        &self.clock
    }

    /// The buffer's address, for work queued on this lane next. That work will wait for earlier work of other lanes on
    /// the buffer. Fails where the buffer is on another device.
    ///
    /// While the lane records a graph, it does not wait for other lanes. The caller must then keep the buffers alive,
    /// and ensure that no other lane writes to them.
    pub fn address(&self, buffer: &Buffer) -> Result<u64> {
        if *buffer.device() != self.device {
            return Err(Error::new(Kind::Argument, "buffer")
                .expected(format_args!("memory on {:?}", self.device))
                .got(format_args!("memory on {:?}", buffer.device())));
        }
        if self.recording.get() {
            return Ok(buffer.address());
        }
        for other in self.note(buffer) {
            // A captured graph cannot wait for an event from outside it.
            if self.captured.is_some() { other.lane.synchronize()? } else { self.wait_for(&other)? }
        }
        Ok(buffer.address())
    }

    /// Records that the next work uses the buffer. Returns the uses that this work must wait for.
    fn note(&self, buffer: &Buffer) -> Vec<Use> {
        if self.guest {
            return buffer.keep();
        }
        buffer.note(&self.clock, self.clock.note())
    }

    /// Tells that the work queued so far is this lane's last on the buffer, until it asks for the address again. Work of
    /// other lanes on the buffer then waits for this point only, and not for what this lane does next.
    pub fn finished(&self, buffer: &Buffer) -> Result<()> {
        let end = Event::new(&self.device, false)?;
        end.record(self.stream())?;
        buffer.note_end(&self.clock, end);
        Ok(())
    }

    /// Queues a wait for the end of a use by another lane, which may be one of another device: for all its work so far,
    /// unless it told the end.
    fn wait_for(&self, other: &Use) -> Result<()> {
        let clock = &other.lane;
        let event = match &other.end {
            Some(end) => end.clone(),
            None => {
                let now = Event::new(&clock.device, false)?;
                now.record(clock.stream)?;
                Arc::new(now)
            }
        };
        self.device.bind()?;
        // SAFETY: both handles are alive, and a destroyed event still ends the wait.
        self.device.answer(unsafe { sys::cuStreamWaitEvent(self.stream(), event.handle(), 0) }, "cuStreamWaitEvent")
    }

    /// The address of `bytes` bytes of the lane's own scratch memory, for work queued next. All ops share it: the next
    /// op overwrites the contents.
    pub fn scratch(&self, bytes: usize) -> Result<u64> {
        self.not_captured(bytes, "scratch memory")?;
        self.core(|core| core.scratch.at_least(bytes, &self.device, &self.clock))
    }

    /// Memory for a tensor that only work queued on this lane uses. It is allocated and freed in stream order, so
    /// dropping it does not wait.
    pub fn temporary(&self, spec: Spec) -> Result<Buffer> {
        self.not_captured(spec.bytes(), "scratch memory")?;
        Buffer::of_lane(&self.device, &self.clock, spec)
    }

    /// Queues the matrix product `to = a b`. `types[0]` is the type of the factors. `types[1]`, that of the result, is
    /// either equal to it or its accumulation type. Sums are in f32 (f64 for f64), and factors are not rounded unless
    /// [`Lane::allow_tf32`] permits it. Fails with [`Kind::Unavailable`] where cuBLASLt is not found.
    ///
    /// # Safety
    /// The matrices are valid at their addresses, which come from this lane.
    pub unsafe fn multiply(&self, types: [DType; 2], matrices: [Matrix; 3]) -> Result<()> {
        let [a, _, to] = matrices;
        let elements = to.rows * to.columns;
        if elements == 0 {
            return Ok(());
        }
        if a.rows * a.columns == 0 {
            self.device.bind()?;
            // SAFETY: the range is the whole matrix.
            let code = unsafe { sys::cuMemsetD8Async(to.address, 0, elements * types[1].size(), self.stream()) };
            return self.device.answer(code, "cuMemsetD8Async");
        }
        // SAFETY: the caller's promise.
        unsafe { self.multiply_with(types, matrices, Epilogue::default()) }
    }

    /// Like [`Lane::multiply`], with an epilogue on the sums that cuBLASLt must support. No size may be 0.
    ///
    /// # Safety
    /// As for [`Lane::multiply_then`].
    pub unsafe fn multiply_with(&self, types: [DType; 2], matrices: [Matrix; 3], epilogue: Epilogue) -> Result<()> {
        // SAFETY: the caller's promise.
        match unsafe { self.multiply_then(types, matrices, epilogue)? } {
            true => Ok(()),
            false => Err(Error::new(Kind::Unavailable, "matrix product")
                .expected("sizes and types that cuBLASLt has an algorithm for")
                .got(format_args!("{matrices:?} of {types:?}"))),
        }
    }

    /// Like [`Lane::multiply`], with an epilogue applied to the sums before rounding. Returns whether the product was
    /// queued: cuBLASLt does not support every epilogue for all types, sizes and addresses, and no epilogue where a
    /// size is 0.
    ///
    /// # Safety
    /// The matrices are valid at their addresses, which come from this lane. So is the bias, with as many elements as
    /// `to` has columns.
    pub unsafe fn multiply_then(&self, types: [DType; 2], matrices: [Matrix; 3], epilogue: Epilogue) -> Result<bool> {
        if matrices.iter().any(|matrix| matrix.rows * matrix.columns == 0) {
            return Ok(false);
        }
        self.device.bind()?;
        let queued = self.core(|core| {
            let handle = match &mut core.blas {
                Some(handle) => handle,
                none => {
                    let stocked = self.device.handles().pop();
                    none.insert(stocked.map_or_else(blas::Handle::new, Ok)?)
                }
            };
            let workspace = |bytes| {
                self.not_captured(bytes, "workspace")?;
                core.workspace.at_least(bytes, &self.device, &self.clock)
            };
            let product = Product { types, matrices, epilogue, tf32: self.tf32 };
            // SAFETY: the caller's promise, and no size is 0.
            unsafe { handle.multiply(&product, self.stream().cast(), workspace) }
        });
        self.device.check()?;
        queued
    }

    /// Queues a kernel with one parameter, the struct `params`.
    ///
    /// # Safety
    /// The kernel was compiled for the arithmetic of `P`, and stays within the memory that `params` points to.
    /// Addresses come from [`Lane::address`] of this lane, and each buffer is alive until that call.
    pub unsafe fn launch<P: Declared>(
        &self,
        kernel: &Kernel<P::Any>,
        grid: [u32; 3],
        threads: u32,
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(kernel, grid, threads, 0, params) }
    }

    /// Like [`Lane::launch`], with `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// As for [`Lane::launch`], and the kernel stays within the shared memory.
    pub unsafe fn launch_with<P: Declared>(
        &self,
        kernel: &Kernel<P::Any>,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(kernel, grid, [threads, shared], None, params) }
    }

    /// Queues a kernel of `blocks` blocks that wait for each other (a cooperative launch, or clusters).
    ///
    /// All blocks that wait for each other must be resident at once. If they do not fit, the call fails and nothing
    /// runs.
    ///
    /// # Safety
    /// As for [`Lane::launch_with`].
    pub unsafe fn launch_together<P: Declared>(
        &self,
        kernel: &Kernel<P::Any>,
        together: Together,
        blocks: u32,
        size: [u32; 2],
        params: &P,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(kernel, [blocks, 1, 1], size, Some(together), params) }
    }

    /// Queues a kernel of `grid` blocks of `threads` threads with `shared` bytes of dynamic shared memory.
    unsafe fn launch_as<P: Declared>(
        &self,
        kernel: &Kernel<P::Any>,
        grid: [u32; 3],
        size: [u32; 2],
        together: Option<Together>,
        params: &P,
    ) -> Result<()> {
        use sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as EARLY;
        self.device.bind()?;
        let mut early = attribute(EARLY);
        early.value.programmaticStreamSerializationAllowed = 1;
        let begins_early = kernel.is_early() && self.behind_early.get() && self.device.facts().capability.0 >= 9;
        self.behind_early.set(kernel.is_early());
        let early = begins_early.then_some(early);
        let mut attributes: Vec<_> = early.into_iter().chain(together.map(Together::attribute)).collect();
        let config = config(grid, size, self.stream(), &mut attributes);
        let mut arguments = [(params as *const P).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's promise.
        let code =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.function(), arguments.as_mut_ptr(), std::ptr::null_mut()) };
        self.device.answer(code, "cuLaunchKernelEx")
    }

    /// Waits until all queued work is done. Reports errors of kernels that ran.
    pub fn synchronize(&self) -> Result<()> {
        self.clock.all_queued();
        self.clock.synchronize()?;
        self.core(|core| {
            core.staging.drained();
            Ok(())
        })
    }

    /// Marks this point in the lane's work, for timing.
    pub fn mark(&self) -> Result<Mark> {
        self.device.bind()?;
        let event = Event::new(&self.device, true)?;
        event.record(self.stream())?;
        Ok(Mark(event))
    }

    fn core<T>(&self, work: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        match &self.core {
            Some(core) => work(&mut core.borrow_mut()),
            None => Err(Error::new(Kind::Panic, "lane").got("use after drop")),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(core) = self.core.take() {
            let mut core = core.into_inner();
            if self.guest {
                return core.leave(&self.device);
            }
            if core.scratch.bytes > KEPT_SCRATCH {
                core.scratch.release(&self.device, &self.clock);
            }
            self.clock.all_queued();
            self.device.lanes().push(core);
        }
    }
}
