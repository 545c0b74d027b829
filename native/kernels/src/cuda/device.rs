//! A device: one context, one memory pool, a stock of lanes, the kernels it has loaded.

use super::blas;
use super::buffer::Buffer;
use super::driver;
use super::kernel::{self, Kernel, Source};
use super::lane::{self, Lane};
use super::memory::Memory;
use super::tables::Tables;
use crate::error::{Error, Kind, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

/// A CUDA device in use. Clones are cheap and mean the same device.
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
    /// Those of lanes that are no more.
    handles: Mutex<Vec<blas::Handle>>,
    kernels: kernel::Loaded,
    tables: Tables,
}

// SAFETY: contexts may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver locks inside.
unsafe impl Sync for Inner {}

/// What launches are planned by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    /// How many multiprocessors there are.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block can have.
    pub shared: u32,
    /// Bytes of the cache that all multiprocessors share.
    pub cache: u32,
}

static IN_USE: LazyLock<Mutex<HashMap<usize, Device>>> = LazyLock::new(Mutex::default);

impl Device {
    /// The device of that number; the first call takes its primary context and keeps it.
    ///
    /// Fails with [`Kind::Unavailable`] where there is no driver or no such device, and with
    /// [`Kind::DeviceLost`] where it has failed before.
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

    pub(super) fn in_use(ordinal: usize) -> Option<Device> {
        IN_USE.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).cloned()
    }

    /// The device that works in this context, if it is in use.
    pub(super) fn in_context(context: sys::CUcontext) -> Option<Device> {
        let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.values().find(|device| device.0.context == context).cloned()
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What launches are planned by.
    pub fn facts(&self) -> Facts {
        self.0.facts
    }

    /// Fails with the remembered [`Kind::DeviceLost`] once the device has failed for good.
    pub fn check(&self) -> Result<()> {
        self.0.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// A lane that nobody else uses, new or from the stock; it goes back when dropped.
    pub fn lane(&self) -> Result<Lane> {
        self.bind()?;
        let stocked = self.lanes().pop();
        let core = match stocked {
            Some(core) => core,
            None => lane::Core::new(self)?,
        };
        Ok(Lane::new(self.clone(), core))
    }

    pub(super) fn lanes(&self) -> std::sync::MutexGuard<'_, Vec<lane::Core>> {
        self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn handles(&self) -> std::sync::MutexGuard<'_, Vec<blas::Handle>> {
        self.0.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel of `source` under these compiler options, compiled and loaded on first use.
    /// Calls that come while it compiles wait for it.
    pub fn kernel(&self, source: &Source, options: &str) -> Result<Kernel> {
        self.0.kernels.get(self, source, options)
    }

    /// Values where kernels of every lane can read them, for those that are asked for again and again: they are
    /// uploaded once, and kept until many others were asked for or the device is trimmed.
    pub fn table(&self, values: &[f64]) -> Result<Arc<Buffer>> {
        self.0.tables.get(self, values)
    }

    /// Bytes of all [`Buffer`]s alive on this device.
    pub fn live_bytes(&self) -> usize {
        self.0.live.load(Ordering::Relaxed)
    }

    /// Bytes of memory that nobody on the machine uses.
    pub fn memory_free(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes about the bound context.
        self.answer(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok(free)
    }

    /// Bytes that this process holds on the device: those of buffers, and freed ones that are kept.
    pub fn kept_bytes(&self) -> Result<usize> {
        self.bind()?;
        self.0.memory.held(self)
    }

    /// Gives memory that is kept for later calls back to the system, on the device and on the host.
    pub fn trim(&self) -> Result<()> {
        self.bind()?;
        self.0.tables.clear();
        // Lanes in use keep theirs.
        for core in self.lanes().iter_mut() {
            core.trim(self)?;
        }
        self.0.memory.trim(self)
    }

    /// Makes this device's context the calling thread's, after a look at whether it is lost.
    pub(super) fn bind(&self) -> Result<()> {
        self.check()?;
        // SAFETY: the primary context is never released.
        self.answer(unsafe { sys::cuCtxSetCurrent(self.0.context) }, "cuCtxSetCurrent")
    }

    /// Turns the answer of a driver call into ours, and remembers the device as lost if it is.
    pub(super) fn answer(&self, code: CUresult, what: &str) -> Result<()> {
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
        // The first reason is the true one; the errors after it are its echoes.
        let _ = self.0.lost.set(error);
    }

    /// Memory that every lane may use at once; used before, if there is some of that size.
    pub(super) fn take_memory(&self, bytes: usize) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        let address = match self.0.memory.spare(bytes) {
            Some(address) => address,
            None => self.retried(bytes, || self.0.memory.take(self, bytes))?,
        };
        self.0.live.fetch_add(bytes, Ordering::Relaxed);
        Ok(address)
    }

    /// Gives memory back. On any thread; what a lost device had is lost with it.
    ///
    /// # Safety
    /// The memory came from `take_memory(bytes)`, and no lane uses it any more.
    pub(super) unsafe fn give_memory(&self, address: sys::CUdeviceptr, bytes: usize) {
        self.0.live.fetch_sub(bytes, Ordering::Relaxed);
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            unsafe { self.0.memory.give(self, address, bytes) };
        }
    }

    /// Memory for a lane's own work, in its order.
    pub(super) fn take_scratch(&self, bytes: usize, lane: sys::CUstream) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        self.retried(bytes, || self.0.memory.take_in_order(self, bytes, lane))
    }

    /// Gives it back in the lane's order.
    ///
    /// # Safety
    /// The memory came from `take_scratch` for the same lane, and nobody else uses it.
    pub(super) unsafe fn give_scratch(&self, address: sys::CUdeviceptr, lane: sys::CUstream) {
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = self.answer(unsafe { sys::cuMemFreeAsync(address, lane) }, "cuMemFreeAsync");
        }
    }

    /// Where there is no memory left, what is only kept is given up first.
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
