//! A device: one context, one memory pool, a stock of idle lanes, its loaded kernels.

use super::buffer::Buffer;
use super::kernel::{self, Kernel, Source};
use super::lane::{self, Lane};
use super::memory::Memory;
use super::tables::Tables;
use crate::cuda::load::blas;
use crate::cuda::load::driver;
use crate::error::{Error, Kind, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

/// A CUDA device in use. Clones are cheap and refer to the same device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    ordinal: usize,
    context: sys::CUcontext,
    memory: Memory,
    facts: Facts,
    lost: OnceLock<Error>,
    live: AtomicUsize,
    lanes: Mutex<Vec<lane::Core>>,
    /// cuBLASLt handles of dropped lanes, for reuse.
    handles: Mutex<Vec<blas::Handle>>,
    kernels: kernel::Loaded,
    tables: Tables,
}

// SAFETY: contexts may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: the driver locks inside.
unsafe impl Sync for Inner {}

/// The properties on which launch plans depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block can use.
    pub shared: u32,
    /// Bytes of the cache shared by all multiprocessors (L2).
    pub cache: u32,
}

static IN_USE: LazyLock<Mutex<HashMap<usize, Device>>> = LazyLock::new(Mutex::default);

impl Device {
    /// The device with this ordinal. The first call retains its primary context for good.
    ///
    /// Fails with [`Kind::Unavailable`] without a driver or such a device, and with [`Kind::DeviceLost`] if the device
    /// has failed before.
    pub fn get(ordinal: usize) -> Result<Device> {
        driver::ready()?;
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = in_use.get(&ordinal) {
            device.check()?;
            return Ok(device.clone());
        }
        let device = Device(Arc::new(Inner::new(ordinal)?));
        in_use.insert(ordinal, device.clone());
        Ok(device)
    }

    pub(in crate::cuda) fn in_use(ordinal: usize) -> Option<Device> {
        IN_USE.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).cloned()
    }

    /// The device of this context, if it is in use.
    pub(in crate::cuda) fn in_context(context: sys::CUcontext) -> Option<Device> {
        let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.values().find(|device| device.0.context == context).cloned()
    }

    /// Its number among the devices of the machine.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// The properties on which launch plans depend.
    pub fn facts(&self) -> Facts {
        self.0.facts
    }

    /// Fails with the remembered [`Kind::DeviceLost`] once the device has failed for good.
    pub fn check(&self) -> Result<()> {
        self.0.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// A lane for the caller alone, new or from the stock of idle lanes. Dropping it returns it to the stock.
    pub fn lane(&self) -> Result<Lane> {
        self.bind()?;
        let stocked = self.lanes().pop();
        let core = match stocked {
            Some(core) => core,
            None => lane::Core::new(self)?,
        };
        Ok(Lane::new(self.clone(), core))
    }

    pub(in crate::cuda) fn lanes(&self) -> std::sync::MutexGuard<'_, Vec<lane::Core>> {
        self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::cuda) fn handles(&self) -> std::sync::MutexGuard<'_, Vec<blas::Handle>> {
        self.0.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel of `source` under these compiler options, compiled and loaded on first use. Concurrent calls for the
    /// same kernel wait for that.
    pub fn kernel<P>(&self, source: &Source<P>, options: &str) -> Result<Kernel<P>> {
        self.0.kernels.get(self, source, options)
    }

    /// Constant values that kernels of every lane can read. They are uploaded once, and kept until many other tables
    /// have been requested or the device is trimmed.
    pub fn table(&self, values: &[f64]) -> Result<Arc<Buffer>> {
        self.0.tables.get(self, values)
    }

    /// Bytes of all [`Buffer`]s alive on this device.
    pub fn live_bytes(&self) -> usize {
        self.0.live.load(Ordering::Relaxed)
    }

    /// Bytes of free device memory, across all processes.
    pub fn memory_free(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes about the bound context.
        self.answer(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok(free)
    }

    /// Bytes that this process holds on the device: those of buffers, and freed blocks kept for reuse.
    pub fn kept_bytes(&self) -> Result<usize> {
        self.bind()?;
        self.0.memory.held(self)
    }

    /// The most bytes of scratch memory that all lanes used at once, beside inputs and outputs, since the last call of
    /// this.
    pub fn peak_scratch_bytes(&self) -> Result<usize> {
        self.bind()?;
        self.0.memory.peak_of_lanes(self)
    }

    /// Frees memory that is cached for later calls, on the device and on the host.
    pub fn trim(&self) -> Result<()> {
        self.bind()?;
        self.0.tables.clear();
        // Lanes in use keep theirs.
        for core in self.lanes().iter_mut() {
            core.trim(self)?;
        }
        self.0.memory.trim(self)
    }

    pub(in crate::cuda) fn context(&self) -> sys::CUcontext {
        self.0.context
    }

    /// Lets both devices use each other's memory directly, where the machine allows it; else copies go through the host.
    pub(in crate::cuda) fn reach(&self, other: &Device) -> Result<()> {
        for (device, reader) in [(self, other), (other, self)] {
            if driver::reaches(driver::handle(reader.0.ordinal)?, driver::handle(device.0.ordinal)?)? {
                device.0.memory.open_to(device, reader.0.ordinal)?;
            }
        }
        Ok(())
    }

    /// Makes this device's context current on the calling thread. Fails if the device is lost.
    pub(in crate::cuda) fn bind(&self) -> Result<()> {
        self.check()?;
        // SAFETY: the primary context is never released.
        self.answer(unsafe { sys::cuCtxSetCurrent(self.0.context) }, "cuCtxSetCurrent")
    }

    /// Converts the result code of a driver call to a `Result`, and marks the device as lost on a fatal code.
    pub(in crate::cuda) fn answer(&self, code: CUresult, what: &str) -> Result<()> {
        if driver::is_fatal(code) {
            self.lose(&format!("{} in {what}", driver::text(code)));
            return self.check();
        }
        driver::answer(code, what)
    }

    /// Marks the device as lost: every later call fails at once. Public for tests only.
    #[doc(hidden)]
    pub fn lose(&self, why: &str) {
        let error = Error::new(Kind::DeviceLost, format!("CUDA device {}", self.0.ordinal))
            .got(why)
            .hint("The device takes no more work in this OS process; the CPU does. Restart it to use the device again");
        // The first error is the cause; those after it are consequences.
        let _ = self.0.lost.set(error);
    }

    /// Memory that every lane may use at once: a cached block of that size if there is one.
    pub(in crate::cuda) fn take_memory(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        let address = match self.0.memory.spare(bytes) {
            Some(address) => address,
            None => self.retried(bytes, || self.0.memory.take(self, bytes))?,
        };
        self.0.live.fetch_add(bytes, Ordering::Relaxed);
        Ok(address)
    }

    /// Gives memory back, from any thread. The memory of a lost device is not freed.
    ///
    /// # Safety
    /// The memory came from `take_memory(bytes)`, and no lane uses it any more.
    pub(in crate::cuda) unsafe fn give_memory(&self, address: sys::CUdeviceptr, bytes: usize) {
        self.0.live.fetch_sub(bytes, Ordering::Relaxed);
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            unsafe { self.0.memory.give(self, address, bytes) };
        }
    }

    /// Memory for one lane's own work, allocated in stream order.
    pub(in crate::cuda) fn take_scratch(&self, bytes: usize, lane: sys::CUstream) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        self.retried(bytes, || self.0.memory.take_in_order(self, bytes, lane))
    }

    /// Frees memory in the lane's stream order.
    ///
    /// # Safety
    /// The memory came from `take_scratch` for the same lane, and no other lane uses it.
    pub(in crate::cuda) unsafe fn give_scratch(&self, address: sys::CUdeviceptr, lane: sys::CUstream) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = self.answer(unsafe { sys::cuMemFreeAsync(address, lane) }, "cuMemFreeAsync");
        }
    }

    /// Takes memory. If the device has none left, memory kept for reuse is released first and the call repeated.
    fn retried(&self, bytes: usize, take: impl Fn() -> Result<sys::CUdeviceptr>) -> Result<sys::CUdeviceptr> {
        let no_memory = |error: &Error| error.kind == Kind::Memory;
        let taken = match take() {
            Err(error) if no_memory(&error) => self.trim().and_then(|()| take()),
            other => other,
        };
        taken.map_err(|error| match no_memory(&error) {
            true => {
                error.expected(format_args!("{bytes} bytes on {self:?}")).hint("Free some buffers or split the batch")
            }
            false => error,
        })
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.0.ordinal)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CUDA device {}", self.0.ordinal)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.0.ordinal == other.0.ordinal
    }
}

impl Inner {
    fn new(ordinal: usize) -> Result<Inner> {
        let count = driver::count()?;
        if ordinal >= count {
            return Err(Error::new(Kind::Unavailable, "CUDA device")
                .expected(format_args!("a number below {count}"))
                .got(ordinal));
        }
        let device = driver::handle(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle, which is kept for good.
        driver::answer(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, "cuDevicePrimaryCtxRetain")?;
        // SAFETY: the context was just retained.
        driver::answer(unsafe { sys::cuCtxSetCurrent(context) }, "cuCtxSetCurrent")?;
        Ok(Inner {
            ordinal,
            context,
            memory: Memory::new(ordinal)?,
            facts: Facts {
                capability: driver::capability(device)?,
                multiprocessors: driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                shared: driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                cache: driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            },
            lost: OnceLock::new(),
            live: AtomicUsize::new(0),
            lanes: Mutex::default(),
            handles: Mutex::default(),
            kernels: kernel::Loaded::default(),
            tables: Tables::default(),
        })
    }
}
