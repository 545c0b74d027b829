//! Memory on a device, with the type and shape of its contents.

use super::device::Device;
use super::event::Event;
use super::lane::Clock;
use crate::error::{Error, Kind, Result};
use crate::tensor::{Described, Spec};
use cudarc::driver::sys;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor on a device. It can be shared between threads and dropped on any of them. Lanes record their use of it:
/// work of one lane waits for work of another, and memory with work in flight is not freed. Clones and parts share its
/// memory.
#[derive(Clone)]
pub struct Buffer {
    spec: Spec,
    address: sys::CUdeviceptr,
    memory: Arc<Memory>,
}

/// The allocation that buffers share.
struct Memory {
    device: Device,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// The only lane that uses the memory, if it is allocated and freed in that lane's stream order.
    lane: Option<Arc<Clock>>,
    uses: Mutex<Vec<Use>>,
    kept: AtomicBool,
}

/// The memory is in use until `lane` has passed point `until` of its work.
#[derive(Clone)]
pub(in crate::cuda) struct Use {
    pub(in crate::cuda) lane: Arc<Clock>,
    until: u64,
    /// The end of that use, where the lane has told it.
    pub(in crate::cuda) end: Option<Arc<Event>>,
}

impl Buffer {
    /// Memory for a tensor of `spec`, its contents undefined. Fails with [`Kind::Memory`](crate::error::Kind::Memory)
    /// if the device does not have enough.
    pub fn new(device: &Device, spec: Spec) -> Result<Buffer> {
        device.check()?;
        let address = if spec.bytes() == 0 { 0 } else { device.take_memory(spec.bytes())? };
        Ok(Buffer::over(device, None, spec, address))
    }

    /// Like [`Buffer::new`], but allocated and freed in the stream order of `lane`, the only lane that may use it.
    pub(in crate::cuda) fn of_lane(device: &Device, lane: &Arc<Clock>, spec: Spec) -> Result<Buffer> {
        device.check()?;
        let address = if spec.bytes() == 0 { 0 } else { device.take_scratch(spec.bytes(), lane.stream())? };
        Ok(Buffer::over(device, Some(lane.clone()), spec, address))
    }

    /// A buffer over memory at `address` that another library owns, for `lane` alone. Dropping it frees nothing.
    pub(in crate::cuda) fn lent(device: &Device, lane: &Arc<Clock>, spec: Spec, address: sys::CUdeviceptr) -> Buffer {
        Buffer { address, ..Buffer::over(device, Some(lane.clone()), spec, 0) }
    }

    fn over(device: &Device, lane: Option<Arc<Clock>>, spec: Spec, address: sys::CUdeviceptr) -> Buffer {
        let (device, bytes, uses, kept) = (device.clone(), spec.bytes(), Mutex::default(), AtomicBool::default());
        Buffer { spec, address, memory: Arc::new(Memory { device, address, bytes, lane, uses, kept }) }
    }

    /// A range of the first axis, in the same memory.
    pub fn rows(&self, range: Range<usize>) -> Result<Buffer> {
        let (spec, bytes) = self.spec.rows(range)?;
        Ok(Buffer { spec, address: self.address + bytes.start as u64, memory: self.memory.clone() })
    }

    /// The elements under another shape of equal size, in the same memory.
    pub fn reshape(&self, dims: &[usize]) -> Result<Buffer> {
        let spec = Spec::new(self.spec.dtype, dims)?;
        if spec.bytes() != self.spec.bytes() {
            return Err(Error::new(Kind::Shape, "shape").expected(format_args!("that of {}", self.spec)).got(spec));
        }
        Ok(Buffer { spec, address: self.address, memory: self.memory.clone() })
    }

    /// The device that holds the memory.
    pub fn device(&self) -> &Device {
        &self.memory.device
    }

    /// Whether both cover the same memory.
    pub fn same(&self, other: &Buffer) -> bool {
        self.address == other.address && self.spec.bytes() == other.spec.bytes()
    }

    /// Whether only one lane may use it.
    pub(in crate::cuda) fn is_of_lane(&self) -> bool {
        self.memory.lane.is_some()
    }

    pub(in crate::cuda) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Records that `lane` uses the buffer up to its point `until`. Returns the earlier uses by other lanes that are not
    /// known to be over.
    pub(in crate::cuda) fn note(&self, lane: &Arc<Clock>, until: u64) -> Vec<Use> {
        if self.memory.lane.is_some() {
            return Vec::new();
        }
        let mut uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|one| !Arc::ptr_eq(&one.lane, lane) && !one.lane.passed(one.until));
        let others = uses.clone();
        uses.push(Use { lane: lane.clone(), until, end: None });
        others
    }

    /// Records that the use of the buffer by `lane` so far ends with this event.
    pub(in crate::cuda) fn note_end(&self, lane: &Arc<Clock>, end: Event) {
        let mut uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = uses.iter_mut().find(|one| Arc::ptr_eq(&one.lane, lane)) {
            own.end = Some(Arc::new(end));
        }
    }

    /// Never frees the memory, for work whose completion cannot be observed. Returns the earlier uses that are not known
    /// to be over.
    pub(in crate::cuda) fn keep(&self) -> Vec<Use> {
        if self.memory.lane.is_some() {
            return Vec::new();
        }
        if !self.memory.kept.swap(true, Ordering::Relaxed) {
            std::mem::forget(self.memory.clone());
        }
        let uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.iter().filter(|one| !one.lane.passed(one.until)).cloned().collect()
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
            // SAFETY: it was allocated as scratch memory of this lane, the only one that used it.
            return unsafe { self.device.give_scratch(self.address, lane.stream()) };
        }
        let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        for one in uses.iter().filter(|one| !one.lane.passed(one.until)) {
            one.lane.wait();
        }
        // SAFETY: it was allocated from the device with this size, and all recorded uses are over.
        unsafe { self.device.give_memory(self.address, self.bytes) };
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {:?}", self.spec, self.device())
    }
}
