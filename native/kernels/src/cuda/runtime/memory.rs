//! A device's memory: driver pools of its own, and a cache of freed blocks by size.
//!
//! A driver call takes microseconds, and returning memory to the system far longer. Repeated calls reuse cached blocks
//! and need neither. Memory for the work of one lane comes from a second pool, which keeps what is freed: otherwise the
//! driver returns it whenever somebody waits, and the next call pays for it anew.

use super::device::Device;
use super::lane;
use crate::cuda::load::driver;
use crate::error::Result;
use cudarc::driver::sys::{self, CUdeviceptr};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Upper limit for the bytes of cached blocks.
const KEPT: usize = 4 << 30;

/// The pool of lanes keeps up to this part of the device's bytes, a quarter: gradients of 2^20 steps need 13 GB (`ssd`)
/// to 25 GB (`gated_delta_rule`).
const KEPT_OF_LANES: usize = 4;

pub(in crate::cuda) struct Memory {
    pool: sys::CUmemoryPool,
    of_lanes: sys::CUmemoryPool,
    /// Blocks are allocated and freed in this stream's order; no other work is queued on it.
    order: sys::CUstream,
    spares: Mutex<Spares>,
    /// Other devices that may read the pool.
    readers: Mutex<BTreeSet<usize>>,
}

// SAFETY: pools and streams may be used from any thread.
unsafe impl Send for Memory {}
// SAFETY: the driver locks inside.
unsafe impl Sync for Memory {}

/// Freed blocks by their size.
#[derive(Default)]
struct Spares {
    blocks: HashMap<usize, Vec<CUdeviceptr>>,
    bytes: usize,
}

impl Memory {
    /// The memory of the device whose context is bound.
    pub(in crate::cuda) fn new(ordinal: usize) -> Result<Memory> {
        let order = lane::stream().or_else(|(code, what)| driver::answer(code, what).map(|()| std::ptr::null_mut()))?;
        let all = driver::memory(driver::handle(ordinal)?)?;
        let [pool, of_lanes] = [pool(ordinal, 0)?, pool(ordinal, all / KEPT_OF_LANES)?];
        Ok(Memory { pool, of_lanes, order, spares: Mutex::default(), readers: Mutex::default() })
    }

    fn spares(&self) -> MutexGuard<'_, Spares> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A cached block of exactly `bytes` bytes.
    pub(in crate::cuda) fn spare(&self, bytes: usize) -> Option<CUdeviceptr> {
        let mut spares = self.spares();
        let address = spares.blocks.get_mut(&bytes)?.pop()?;
        spares.bytes -= bytes;
        Some(address)
    }

    /// A new block that every lane may use at once.
    pub(in crate::cuda) fn take(&self, device: &Device, bytes: usize) -> Result<CUdeviceptr> {
        let address = allocate(device, bytes, self.pool, self.order)?;
        self.settle(device)?;
        Ok(address)
    }

    /// A new block for later work in `stream`.
    pub(in crate::cuda) fn take_in_order(
        &self,
        device: &Device,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Result<CUdeviceptr> {
        allocate(device, bytes, self.of_lanes, stream)
    }

    /// Caches a block for reuse, or frees it where enough are cached.
    ///
    /// # Safety
    /// The block came from `take(bytes)`, and no lane uses it any more.
    pub(in crate::cuda) unsafe fn give(&self, device: &Device, address: CUdeviceptr, bytes: usize) {
        let mut spares = self.spares();
        if spares.bytes + bytes <= KEPT {
            spares.bytes += bytes;
            spares.blocks.entry(bytes).or_default().push(address);
            return;
        }
        // SAFETY: the caller's promise.
        let _ = device.answer(unsafe { sys::cuMemFreeAsync(address, self.order) }, "cuMemFreeAsync");
    }

    /// Lets another device, which can reach this one, use the memory of buffers.
    pub(in crate::cuda) fn open_to(&self, device: &Device, reader: usize) -> Result<()> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if readers.contains(&reader) {
            return Ok(());
        }
        let access = sys::CUmemAccessDesc {
            location: at(reader),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: reads one description; the pool lives as long as the process.
        device.answer(unsafe { sys::cuMemPoolSetAccess(self.pool, &access, 1) }, "cuMemPoolSetAccess")?;
        readers.insert(reader);
        Ok(())
    }

    /// Bytes that the pools hold, in use or not.
    pub(in crate::cuda) fn held(&self, device: &Device) -> Result<usize> {
        let held = |pool| bytes_of(device, pool, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        Ok(held(self.pool)? + held(self.of_lanes)?)
    }

    /// The most bytes of the pool of lanes that were in use at once since the last call.
    pub(in crate::cuda) fn peak_of_lanes(&self, device: &Device) -> Result<usize> {
        let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        let peak = bytes_of(device, self.of_lanes, which)?;
        let mut again = 0u64;
        // SAFETY: reads one u64; this attribute can be set to 0 only, which begins anew.
        let code = unsafe { sys::cuMemPoolSetAttribute(self.of_lanes, which, (&raw mut again).cast()) };
        device.answer(code, "cuMemPoolSetAttribute").map(|()| peak)
    }

    /// Returns all cached blocks to the system.
    pub(in crate::cuda) fn trim(&self, device: &Device) -> Result<()> {
        let spares = std::mem::take(&mut *self.spares());
        for address in spares.blocks.into_values().flatten() {
            // SAFETY: a cached block is not in use.
            device.answer(unsafe { sys::cuMemFreeAsync(address, self.order) }, "cuMemFreeAsync")?;
        }
        self.settle(device)?;
        [self.pool, self.of_lanes].into_iter().try_for_each(|pool| {
            // SAFETY: the pools live as long as the process.
            device.answer(unsafe { sys::cuMemPoolTrimTo(pool, 0) }, "cuMemPoolTrimTo")
        })
    }

    /// Waits until allocations and frees so far are visible to all streams. Never waits for kernels.
    fn settle(&self, device: &Device) -> Result<()> {
        // SAFETY: the stream lives as long as the process.
        device.answer(unsafe { sys::cuStreamSynchronize(self.order) }, "cuStreamSynchronize")
    }
}

/// Takes memory from a pool, for work that follows in `stream`.
fn allocate(device: &Device, bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream) -> Result<CUdeviceptr> {
    let mut address = 0;
    // SAFETY: writes one address; pools and streams live as long as the process.
    let code = unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream) };
    device.answer(code, "cuMemAllocFromPoolAsync")?;
    Ok(address)
}

fn at(ordinal: usize) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 }
}

/// A number of bytes that a pool tells.
fn bytes_of(device: &Device, pool: sys::CUmemoryPool, which: sys::CUmemPool_attribute) -> Result<usize> {
    let mut bytes = 0u64;
    // SAFETY: writes one u64, as attributes of bytes ask.
    let code = unsafe { sys::cuMemPoolGetAttribute(pool, which, (&raw mut bytes).cast()) };
    device.answer(code, "cuMemPoolGetAttribute").map(|()| bytes as usize)
}

/// A pool of its own, so that settings of other libraries do not change what it keeps: up to `kept` bytes when somebody
/// waits.
fn pool(ordinal: usize, kept: usize) -> Result<sys::CUmemoryPool> {
    // SAFETY: a plain C struct, for which zeros are the defaults.
    let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = at(ordinal);
    let mut pool = std::ptr::null_mut();
    // SAFETY: reads the struct and writes one handle.
    driver::answer(unsafe { sys::cuMemPoolCreate(&mut pool, &props) }, "cuMemPoolCreate")?;
    let (which, mut kept) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, kept as u64);
    // SAFETY: reads one u64, as this attribute asks.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut kept).cast()) };
    driver::answer(code, "cuMemPoolSetAttribute")?;
    Ok(pool)
}
