//! Copies between pageable host memory and the device, staged in pinned memory.
//!
//! The driver copies pageable memory at 12 to 19 GB/s and pinned memory at 50. One core fills pinned memory at about 12
//! GB/s, so several threads do. Each queues its piece as soon as it is filled: the device reads the first pieces while
//! the last are being filled.

use super::buffer::Buffer;
use super::device::Device;
use super::event::Event;
use super::lane::{Clock, Lane};
use crate::cpu::pool;
use crate::error::Result;
use cudarc::driver::sys;
use std::sync::OnceLock;

/// Bytes that are filled and queued together. Queueing takes microseconds, during which other threads cannot queue.
const PIECE: usize = 1 << 20;
/// Upper limit for a lane's pinned memory; longer copies go in rounds.
const MOST: usize = 64 << 20;
/// Lower limit for an allocation of pinned memory.
const LEAST: usize = 1 << 20;
/// More threads than this do not make copies faster.
const THREADS: usize = 4;

/// A lane's pinned memory.
#[derive(Default)]
pub(in crate::cuda) struct Staging {
    pinned: Option<Pinned>,
    /// Bytes that copies in flight may still use.
    used: usize,
}

/// One piece of a copy: `bytes` bytes on the host, in pinned memory, and on the device.
struct Piece {
    host: *mut u8,
    pinned: *mut u8,
    device: sys::CUdeviceptr,
    bytes: usize,
}

// SAFETY: pieces of one copy do not overlap, and each is worked on by one thread.
unsafe impl Sync for Piece {}
// SAFETY: pieces of one copy do not overlap, and each is worked on by one thread.
unsafe impl Send for Piece {}

impl Staging {
    /// All pinned memory is free again; to be called once the lane is idle.
    pub(in crate::cuda) fn drained(&mut self) {
        self.used = 0;
    }

    /// Whether copies may be in flight.
    pub(in crate::cuda) fn is_used(&self) -> bool {
        self.used > 0
    }

    pub(in crate::cuda) fn upload(&mut self, lane: &Lane, copies: &[(&[u8], &Buffer)]) -> Result<()> {
        let mut rest = Vec::with_capacity(copies.len());
        for (from, to) in copies {
            rest.push((from.as_ptr().cast_mut(), lane.address(to)?, from.len()));
        }
        let (device, clock) = (lane.device(), lane.clock());
        while let Some(pieces) = self.round(lane, &mut rest)? {
            each(&pieces, |piece| {
                // SAFETY: the piece lies within the source and within pinned memory reserved for it alone.
                unsafe { piece.host.copy_to_nonoverlapping(piece.pinned, piece.bytes) };
                piece.send(device, clock)
            })?;
        }
        Ok(())
    }

    pub(in crate::cuda) fn download(&mut self, lane: &Lane, copies: &mut [(&Buffer, &mut [u8])]) -> Result<()> {
        let mut rest = Vec::with_capacity(copies.len());
        for (from, to) in copies {
            rest.push((to.as_mut_ptr(), lane.address(from)?, to.len()));
        }
        while let Some(pieces) = self.round(lane, &mut rest)? {
            let arrivals = pieces.iter().map(|piece| Arrival::queue(lane, piece)).collect::<Result<Vec<_>>>()?;
            each(&arrivals, |arrival| {
                arrival.event.wait()?;
                let piece = arrival.piece;
                // SAFETY: the bytes have arrived; the piece lies within its destination.
                unsafe { piece.pinned.copy_to_nonoverlapping(piece.host, piece.bytes) };
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Takes from `rest` what fits into pinned memory, cut into pieces; `None` once `rest` is empty.
    fn round(&mut self, lane: &Lane, rest: &mut Vec<(*mut u8, sys::CUdeviceptr, usize)>) -> Result<Option<Vec<Piece>>> {
        let bytes: usize = rest.iter().map(|(_, _, bytes)| bytes.next_multiple_of(ALIGN)).sum();
        if bytes == 0 {
            return Ok(None);
        }
        let (start, mut room) = self.reserve(lane, bytes)?;
        let (mut pieces, mut at) = (Vec::with_capacity(room / PIECE + rest.len()), start);
        while let Some((host, device, left)) = rest.last_mut() {
            let bytes = PIECE.min(*left).min(room);
            if bytes > 0 {
                pieces.push(Piece { host: *host, pinned: at, device: *device, bytes });
                let taken = bytes.next_multiple_of(ALIGN).min(room);
                // SAFETY: stays within the source or destination, and within the reserved bytes.
                (*host, at) = unsafe { (host.add(bytes), at.add(taken)) };
                (*device, *left, room) = (*device + bytes as u64, *left - bytes, room - taken);
            }
            match *left {
                0 => rest.pop(),
                _ if room == 0 => break,
                _ => continue,
            };
        }
        Ok(Some(pieces))
    }

    /// Reserves up to `bytes` bytes of pinned memory that no copy in flight uses; returns their actual number too.
    fn reserve(&mut self, lane: &Lane, bytes: usize) -> Result<(*mut u8, usize)> {
        let held = self.pinned.as_ref().map_or(0, |pinned| pinned.bytes);
        if bytes > held - self.used {
            lane.device().bind()?;
            // SAFETY: streams are never destroyed.
            lane.device().answer(unsafe { sys::cuStreamSynchronize(lane.stream()) }, "cuStreamSynchronize")?;
            self.used = 0;
            if bytes > held && held < MOST {
                self.pinned = None;
                self.pinned = Some(Pinned::new(lane.device(), bytes.next_power_of_two().clamp(LEAST, MOST))?);
            }
        }
        let Some(pinned) = &self.pinned else { unreachable!("room was made above") };
        let room = bytes.min(pinned.bytes - self.used);
        // SAFETY: `used` is within the allocation.
        let start = unsafe { pinned.start.add(self.used) };
        self.used += room;
        Ok((start, room))
    }
}

/// Alignment of pieces: whole cache lines.
const ALIGN: usize = 256;

/// Calls `work` on every item, on up to THREADS threads where there are enough items.
fn each<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Send + Sync) -> Result<()> {
    let threads = if items.len() < 3 { 1 } else { pool::default_threads().min(THREADS) };
    let failure = OnceLock::new();
    pool::for_each(threads, items.len(), |i| {
        if let Err(error) = work(&items[i]) {
            let _ = failure.set(error);
        }
    })?;
    failure.into_inner().map_or(Ok(()), Err)
}

impl Piece {
    fn send(&self, device: &Device, lane: &Clock) -> Result<()> {
        device.bind()?;
        // SAFETY: both ranges are as long as the piece; pinned memory stays untouched until the lane is drained.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(self.device, self.pinned.cast(), self.bytes, lane.stream()) };
        device.answer(code, "cuMemcpyHtoDAsync")
    }
}

/// A piece in flight from the device.
struct Arrival<'a> {
    piece: &'a Piece,
    event: Event,
}

impl<'a> Arrival<'a> {
    fn queue(lane: &Lane, piece: &'a Piece) -> Result<Arrival<'a>> {
        lane.device().bind()?;
        // SAFETY: both ranges are as long as the piece; pinned memory is read after the event only.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(piece.pinned.cast(), piece.device, piece.bytes, lane.stream()) };
        lane.device().answer(code, "cuMemcpyDtoHAsync")?;
        let event = Event::new(lane.device(), false)?;
        event.record(lane.stream())?;
        Ok(Arrival { piece, event })
    }
}

/// Pinned host memory, which the device accesses directly.
pub struct Pinned {
    device: Device,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` bytes with undefined contents.
    pub fn new(device: &Device, bytes: usize) -> Result<Pinned> {
        device.bind()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: writes one pointer; flag 1 makes the memory pinned for every context.
        device.answer(unsafe { sys::cuMemHostAlloc(&mut start, bytes, 1) }, "cuMemHostAlloc")?;
        Ok(Pinned { device: device.clone(), start: start.cast(), bytes })
    }

    /// The bytes. They must not be read while a copy to them is in flight.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the whole allocation; every bit pattern is a valid byte.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The bytes to write. No copy from them may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the whole allocation, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it came from cuMemHostAlloc, and its lane was drained before.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}
