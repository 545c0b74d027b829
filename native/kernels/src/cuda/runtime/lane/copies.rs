//! Copies between the host and buffers, and among buffers.

use super::Lane;
use crate::cuda::runtime::buffer::Buffer;
use crate::cuda::runtime::device::Device;
use crate::cuda::runtime::staging::Pinned;
use crate::error::{Error, Kind, Result};
use crate::tensor::{Described, Owned};
use cudarc::driver::sys;

impl Lane {
    /// Queues a copy that fills a buffer from pinned memory, starting at byte `first`. The pinned bytes must not change
    /// until the copy is done.
    pub fn from_pinned(&self, from: &Pinned, first: usize, to: &Buffer) -> Result<()> {
        let (bytes, to) = (to.spec().bytes(), self.address(to)?);
        let from = from.bytes()[first..first + bytes].as_ptr();
        self.device.bind()?;
        // SAFETY: both ranges have these bytes.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream()) };
        self.device.answer(code, "cuMemcpyHtoDAsync")
    }

    /// Queues a copy of a buffer to pinned memory, starting at byte `first`. The pinned bytes must not be read until
    /// the copy is done.
    pub fn to_pinned(&self, from: &Buffer, to: &Pinned, first: usize) -> Result<()> {
        let (bytes, from) = (from.spec().bytes(), self.address(from)?);
        let to = to.bytes()[first..first + bytes].as_ptr().cast_mut();
        self.device.bind()?;
        // SAFETY: both ranges have these bytes.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream()) };
        self.device.answer(code, "cuMemcpyDtoHAsync")
    }

    /// Copies host bytes into a buffer of equal size.
    pub fn upload(&self, from: &[u8], to: &Buffer) -> Result<()> {
        self.upload_all(&[(from, to)])
    }

    /// Copies several slices at once, which is faster than one by one. The host bytes are read before this returns; the
    /// copies into the buffers are only queued.
    pub fn upload_all(&self, copies: &[(&[u8], &Buffer)]) -> Result<()> {
        self.not_captured(copies.iter().map(|(from, _)| from.len()).sum(), "copies from the host")?;
        copies.iter().try_for_each(|(from, to)| same_size(from.len(), to))?;
        self.device.bind()?;
        self.core(|core| core.staging.upload(self, copies))
    }

    /// Copies a buffer to host bytes of equal size, after waiting for all work queued on the lane.
    pub fn download(&self, from: &Buffer, to: &mut [u8]) -> Result<()> {
        self.download_all(&mut [(from, to)])
    }

    /// Copies several buffers at once, after waiting for all work queued on the lane.
    pub fn download_all(&self, copies: &mut [(&Buffer, &mut [u8])]) -> Result<()> {
        self.not_recorded("copies to the host")?;
        copies.iter().try_for_each(|(from, to)| same_size(to.len(), from))?;
        self.device.bind()?;
        self.core(|core| core.staging.download(self, copies))?;
        self.synchronize()
    }

    /// A buffer's contents, once all work queued on the lane is done.
    pub fn downloaded(&self, from: &Buffer) -> Result<Owned> {
        let mut to = Owned::try_any(from.spec())?;
        self.download(from, to.view_mut().bytes())?;
        Ok(to)
    }

    /// A buffer's contents, once the work on it is done. Does not wait for other work on the lane, unless it runs on a
    /// stream of another library or the buffer is the lane's own.
    pub fn read(&self, from: &Buffer) -> Result<Owned> {
        self.not_recorded("copies to the host")?;
        if self.guest || from.is_of_lane() {
            return self.downloaded(from);
        }
        self.device.lane()?.downloaded(from)
    }

    /// Queues a copy of a buffer into another of equal size.
    pub fn copy(&self, from: &Buffer, to: &Buffer) -> Result<()> {
        same_size(from.spec().bytes(), to)?;
        let (source, target, bytes) = (self.address(from)?, self.address(to)?, to.spec().bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: both ranges are whole buffers.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.stream()) };
        self.device.answer(code, "cuMemcpyDtoDAsync")
    }

    /// Queues a copy of a buffer of any device into one of equal size on this lane's, after earlier work of other lanes on
    /// the first.
    pub fn copy_from(&self, from: &Buffer, to: &Buffer) -> Result<()> {
        if from.device() == to.device() {
            return self.copy(from, to);
        }
        same_size(from.spec().bytes(), to)?;
        self.not_recorded("copies between devices")?;
        let (target, bytes) = (self.address(to)?, to.spec().bytes());
        self.note(from).iter().try_for_each(|other| self.wait_for(other))?;
        if bytes == 0 {
            return Ok(());
        }
        self.device.reach(from.device())?;
        self.device.bind()?;
        let contexts = [&self.device, from.device()].map(Device::context);
        // SAFETY: both ranges are whole buffers of these contexts.
        let code =
            unsafe { sys::cuMemcpyPeerAsync(target, contexts[0], from.address(), contexts[1], bytes, self.stream()) };
        self.device.answer(code, "cuMemcpyPeerAsync")
    }

    /// A buffer of any device on this lane's: itself, or a copy that is queued.
    pub fn pulled(&self, from: &Buffer) -> Result<Buffer> {
        if *from.device() == self.device {
            return Ok(from.clone());
        }
        let to = self.temporary(from.spec())?;
        self.copy_from(from, &to)?;
        Ok(to)
    }

    /// Fills a buffer with one bits, which read as NaN in every float type. For tests.
    pub fn poison(&self, buffer: &Buffer) -> Result<()> {
        self.fill(buffer, 0xff)
    }

    /// Fills a buffer with one byte.
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> Result<()> {
        let (address, bytes) = (self.address(buffer)?, buffer.spec().bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range is the whole buffer.
        self.device.answer(unsafe { sys::cuMemsetD8Async(address, byte, bytes, self.stream()) }, "cuMemsetD8Async")
    }
}

fn same_size(bytes: usize, buffer: &Buffer) -> Result<()> {
    if bytes == buffer.spec().bytes() {
        return Ok(());
    }
    Err(Error::new(Kind::Size, "data")
        .expected(format_args!("{} bytes for {}", buffer.spec().bytes(), buffer.spec()))
        .got(format_args!("{bytes} bytes")))
}
