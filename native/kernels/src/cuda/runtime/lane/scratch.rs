//! Scratch memory of a lane, which its ops use in turn.

use super::Clock;
use crate::cuda::runtime::device::Device;
use crate::error::Result;
use cudarc::driver::sys;

/// Memory that is allocated and freed in the order of one lane's stream.
#[derive(Default)]
pub(super) struct Scratch {
    address: sys::CUdeviceptr,
    pub(super) bytes: usize,
}

/// Bytes of scratch memory that a lane keeps when it returns to the stock.
pub(super) const KEPT_SCRATCH: usize = 64 << 20;

/// The size of the scratch memory for `bytes` bytes: up to a 32nd more, so that slightly larger requests later fit too.
pub(crate) fn scratch_size(bytes: usize) -> usize {
    bytes.next_multiple_of((bytes.next_power_of_two() / 64).max(256))
}

impl Scratch {
    pub(super) fn new(device: &Device, lane: &Clock, bytes: usize) -> Result<Scratch> {
        let bytes = scratch_size(bytes);
        Ok(Scratch { address: device.take_scratch(bytes, lane.stream)?, bytes })
    }

    /// The address of at least `bytes` bytes. If the memory has to grow, its contents are lost.
    pub(super) fn at_least(&mut self, bytes: usize, device: &Device, lane: &Clock) -> Result<u64> {
        if self.bytes < bytes {
            self.release(device, lane);
            *self = Scratch::new(device, lane, bytes)?;
        }
        Ok(self.address)
    }

    pub(super) fn release(&mut self, device: &Device, lane: &Clock) {
        let Scratch { address, .. } = std::mem::take(self);
        if address != 0 {
            // SAFETY: it came from `take_scratch` for this lane, and only this lane's work uses it.
            unsafe { device.give_scratch(address, lane.stream) };
        }
    }
}
