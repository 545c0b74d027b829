//! Memory on a device, with the type and shape of what lies in it.

use super::device::Device;
use super::lane::Clock;
use crate::error::Result;
use crate::tensor::{Described, Spec};
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor on a device. Can be shared between threads and dropped on any of them: lanes note what
/// they do with it, so one lane's work waits for another's, and memory is not given back under work
/// in flight.
pub struct Buffer {
    spec: Spec,
    device: Device,
    address: sys::CUdeviceptr,
    uses: Mutex<Vec<Use>>,
}

/// Up to which point of a lane's work a buffer is in use.
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
        Ok(Buffer { spec, device: device.clone(), address, uses: Mutex::default() })
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Notes that `lane` uses the buffer up to its point `until`, and returns the lanes whose
    /// earlier work on it is not known to be done.
    pub(super) fn note(&self, lane: &Arc<Clock>, until: u64) -> Vec<Arc<Clock>> {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|one| !Arc::ptr_eq(&one.lane, lane) && !one.lane.passed(one.until));
        let others = uses.iter().map(|one| one.lane.clone()).collect();
        uses.push(Use { lane: lane.clone(), until });
        others
    }
}

impl Described for Buffer {
    fn spec(&self) -> Spec {
        self.spec
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        for one in uses.iter().filter(|one| !one.lane.passed(one.until)) {
            one.lane.wait(&self.device);
        }
        // SAFETY: it came from there with this size, and all noted uses are over.
        unsafe { self.device.give_memory(self.address, self.spec.bytes()) };
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {:?}", self.spec, self.device)
    }
}
