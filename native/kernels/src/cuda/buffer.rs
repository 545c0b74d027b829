//! Memory on a device, with the type and shape of what lies in it.

use super::device::Device;
use super::lane::Clock;
use crate::error::{Error, Kind, Result};
use crate::tensor::{Described, Spec};
use cudarc::driver::sys;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor on a device. Can be shared between threads and dropped on any of them: lanes note what
/// they do with it, so one lane's work waits for another's, and memory is not given back under work
/// in flight. Clones and parts share its memory.
#[derive(Clone)]
pub struct Buffer {
    spec: Spec,
    address: sys::CUdeviceptr,
    memory: Arc<Memory>,
}

/// What buffers lie in.
struct Memory {
    device: Device,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// The one lane that uses it, if it is taken and given back in that lane's order.
    lane: Option<Arc<Clock>>,
    uses: Mutex<Vec<Use>>,
    kept: AtomicBool,
}

/// Up to which point of a lane's work memory is in use.
struct Use {
    lane: Arc<Clock>,
    until: u64,
}

impl Buffer {
    /// Memory for a tensor of that spec, its contents undefined. Fails with
    /// [`Kind::Memory`](crate::error::Kind::Memory) where the device has not enough.
    pub fn new(device: &Device, spec: Spec) -> Result<Buffer> {
        device.check()?;
        let address = if spec.bytes() == 0 { 0 } else { device.take_memory(spec.bytes())? };
        Ok(Buffer::over(device, None, spec, address))
    }

    /// The same, taken and given back in the order of a lane, which alone may use it.
    pub(super) fn of_lane(device: &Device, lane: &Arc<Clock>, spec: Spec) -> Result<Buffer> {
        device.check()?;
        let address = if spec.bytes() == 0 { 0 } else { device.take_scratch(spec.bytes(), lane.stream())? };
        Ok(Buffer::over(device, Some(lane.clone()), spec, address))
    }

    /// The same in memory that is somebody else's.
    pub(super) fn lent(device: &Device, lane: &Arc<Clock>, spec: Spec, address: sys::CUdeviceptr) -> Buffer {
        Buffer { address, ..Buffer::over(device, Some(lane.clone()), spec, 0) }
    }

    fn over(device: &Device, lane: Option<Arc<Clock>>, spec: Spec, address: sys::CUdeviceptr) -> Buffer {
        let (device, bytes, uses, kept) = (device.clone(), spec.bytes(), Mutex::default(), AtomicBool::default());
        Buffer { spec, address, memory: Arc::new(Memory { device, address, bytes, lane, uses, kept }) }
    }

    /// A part of the first axis, in the same memory.
    pub fn rows(&self, range: Range<usize>) -> Result<Buffer> {
        let (spec, bytes) = self.spec.rows(range)?;
        Ok(Buffer { spec, address: self.address + bytes.start as u64, memory: self.memory.clone() })
    }

    /// The same elements in order under another shape of equal size, in the same memory.
    pub fn reshape(&self, dims: &[usize]) -> Result<Buffer> {
        let spec = Spec::new(self.spec.dtype, dims)?;
        if spec.bytes() != self.spec.bytes() {
            return Err(Error::new(Kind::Shape, "shape").expected(format_args!("that of {}", self.spec)).got(spec));
        }
        Ok(Buffer { spec, address: self.address, memory: self.memory.clone() })
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.memory.device
    }

    /// Whether both are the same memory.
    pub fn same(&self, other: &Buffer) -> bool {
        self.address == other.address && self.spec.bytes() == other.spec.bytes()
    }

    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Notes that `lane` uses the buffer up to its point `until`, and returns the lanes whose
    /// earlier work on it is not known to be done.
    pub(super) fn note(&self, lane: &Arc<Clock>, until: u64) -> Vec<Arc<Clock>> {
        if self.memory.lane.is_some() {
            return Vec::new();
        }
        let mut uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|one| !Arc::ptr_eq(&one.lane, lane) && !one.lane.passed(one.until));
        let others = uses.iter().map(|one| one.lane.clone()).collect();
        uses.push(Use { lane: lane.clone(), until });
        others
    }

    /// Keeps the memory for good, for work of which nothing tells when it is done, and returns the lanes whose earlier
    /// work on it is not known to be done.
    pub(super) fn keep(&self) -> Vec<Arc<Clock>> {
        if self.memory.lane.is_some() {
            return Vec::new();
        }
        if !self.memory.kept.swap(true, Ordering::Relaxed) {
            std::mem::forget(self.memory.clone());
        }
        let uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.iter().filter(|one| !one.lane.passed(one.until)).map(|one| one.lane.clone()).collect()
    }
}

impl Described for Buffer {
    fn spec(&self) -> Spec {
        self.spec
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        if let Some(lane) = &self.lane {
            // SAFETY: it came from there for this lane, which alone used it.
            return unsafe { self.device.give_scratch(self.address, lane.stream()) };
        }
        let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        for one in uses.iter().filter(|one| !one.lane.passed(one.until)) {
            one.lane.wait(&self.device);
        }
        // SAFETY: it came from there with this size, and all noted uses are over.
        unsafe { self.device.give_memory(self.address, self.bytes) };
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {:?}", self.spec, self.device())
    }
}
