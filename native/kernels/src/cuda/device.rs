//! A device: one context, one memory pool, a stock of lanes, the kernels it has loaded.

use super::driver;
use super::kernel::{self, Kernel, Source};
use super::lane::{self, Lane};
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
    pool: sys::CUmemoryPool,
    /// Memory is taken and given back in this stream's order; it never carries anything else.
    memory: sys::CUstream,
    facts: Facts,
    lost: OnceLock<Error>,
    live: AtomicUsize,
    lanes: Mutex<Vec<lane::Core>>,
    kernels: kernel::Loaded,
}

// SAFETY: contexts, pools and streams may be used from any thread.
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
}

static IN_USE: LazyLock<Mutex<HashMap<usize, Device>>> = LazyLock::new(Mutex::default);

/// Freed memory that is kept for the next call rather than given back to the system.
const KEPT: u64 = 4 << 30;

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

    /// The kernel of `source` under these compiler options, compiled and loaded on first use.
    /// Calls that come while it compiles wait for it.
    pub fn kernel(&self, source: &Source, options: &str) -> Result<Kernel> {
        self.0.kernels.get(self, source, options)
    }

    /// Bytes of all [`Buffer`](super::Buffer)s alive on this device.
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
        let mut bytes = 0u64;
        let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: writes one u64, as this attribute asks.
        let code = unsafe { sys::cuMemPoolGetAttribute(self.0.pool, which, (&raw mut bytes).cast()) };
        self.answer(code, "cuMemPoolGetAttribute")?;
        Ok(bytes as usize)
    }

    /// Gives memory that is kept for later calls back to the system.
    pub fn trim(&self) -> Result<()> {
        self.bind()?;
        // Memory is free to go once the streams that gave it back have come that far.
        // SAFETY: the stream and the pool live as long as the process.
        self.answer(unsafe { sys::cuStreamSynchronize(self.0.memory) }, "cuStreamSynchronize")?;
        // SAFETY: as above.
        self.answer(unsafe { sys::cuMemPoolTrimTo(self.0.pool, 0) }, "cuMemPoolTrimTo")
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

    /// Takes memory: in the order of `stream`, or at once and for every lane.
    pub(super) fn take_memory(&self, bytes: usize, stream: Option<sys::CUstream>) -> Result<sys::CUdeviceptr> {
        self.bind()?;
        let address = self.try_memory(bytes, stream).or_else(|error| match error.kind {
            Kind::Memory => self.trim().and_then(|()| self.try_memory(bytes, stream)),
            _ => Err(error),
        });
        let address = address.map_err(|error| match error.kind {
            Kind::Memory => error
                .expected(format_args!("{bytes} bytes on CUDA device {}", self.0.ordinal))
                .hint("Free some buffers or split the batch"),
            _ => error,
        })?;
        self.0.live.fetch_add(bytes, Ordering::Relaxed);
        Ok(address)
    }

    fn try_memory(&self, bytes: usize, stream: Option<sys::CUstream>) -> Result<sys::CUdeviceptr> {
        let mut address = 0;
        let order = stream.unwrap_or(self.0.memory);
        // SAFETY: writes one address; the pool and the streams live as long as the process.
        let code = unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, self.0.pool, order) };
        self.answer(code, "cuMemAllocFromPoolAsync")?;
        if stream.is_none() {
            // SAFETY: as above. Cheap: this stream has no work but taking and giving back.
            self.answer(unsafe { sys::cuStreamSynchronize(order) }, "cuStreamSynchronize")?;
        }
        Ok(address)
    }

    /// Gives memory back, in the order of `stream` or at once. On any thread; what a lost device
    /// had is lost with it.
    ///
    /// # Safety
    /// The memory came from `take_memory(bytes, stream)`, and no other lane uses it any more.
    pub(super) unsafe fn give_memory(&self, address: sys::CUdeviceptr, bytes: usize, stream: Option<sys::CUstream>) {
        self.0.live.fetch_sub(bytes, Ordering::Relaxed);
        if self.bind().is_ok() {
            let order = stream.unwrap_or(self.0.memory);
            // SAFETY: the caller's promise.
            let _ = self.answer(unsafe { sys::cuMemFreeAsync(address, order) }, "cuMemFreeAsync");
        }
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
            pool: pool(ordinal)?,
            memory: lane::stream().map_err(|(code, what)| driver::answer(code, what).unwrap_err())?,
            facts: Facts {
                capability: driver::capability(device)?,
                multiprocessors: driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            },
            lost: OnceLock::new(),
            live: AtomicUsize::new(0),
            lanes: Mutex::default(),
            kernels: kernel::Loaded::default(),
        })
    }
}

/// A pool of our own, so that nobody else's settings change how it keeps memory.
fn pool(ordinal: usize) -> Result<sys::CUmemoryPool> {
    // SAFETY: a plain C struct, for which zeros are defaults.
    let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    props.location.id = ordinal as i32;
    let (mut pool, mut kept) = (std::ptr::null_mut(), KEPT);
    let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: writes one handle, then reads one u64 as this attribute asks.
    unsafe {
        driver::answer(sys::cuMemPoolCreate(&mut pool, &props), "cuMemPoolCreate")?;
        driver::answer(sys::cuMemPoolSetAttribute(pool, which, (&raw mut kept).cast()), "cuMemPoolSetAttribute")?;
    }
    Ok(pool)
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.ordinal())
    }
}
