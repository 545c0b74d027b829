//! Workspace whose memory is kept for later calls. The system's allocator gives large blocks back as they are freed, and
//! each page of a new block costs a page fault: a third of the time of a small layer in 16 bits.

use super::error::{Error, Kind, Result};
use bytemuck::Pod;
use std::collections::TryReserveError;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Words of the smallest block that is kept, 64 KiB. The allocator keeps smaller ones.
pub const LEAST: usize = 1 << 13;

/// Words of all blocks that are kept, 64 MiB.
pub const MOST: usize = 1 << 23;

/// Blocks that are not in use, the oldest first.
#[derive(Default)]
pub struct Spare(Vec<Vec<u64>>);

impl Spare {
    /// The smallest block with room for `count` words, unless it has room for more than twice as many.
    pub fn take(&mut self, count: usize) -> Option<Vec<u64>> {
        let sizes = self.0.iter().map(Vec::capacity).enumerate();
        let fitting = sizes.filter(|(_, size)| (count..=2 * count).contains(size));
        fitting.min_by_key(|&(_, size)| size).map(|(at, _)| self.0.remove(at))
    }

    /// Keeps a block; frees the oldest ones where there are too many words.
    pub fn keep(&mut self, block: Vec<u64>) {
        self.0.push(block);
        let mut kept = 0;
        let over = self.0.iter().rposition(|block| {
            kept += block.capacity();
            kept > MOST
        });
        self.0.drain(..over.map_or(0, |oldest| oldest + 1));
    }
}

static SPARE: Mutex<Spare> = Mutex::new(Spare(Vec::new()));

fn spare() -> MutexGuard<'static, Spare> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block, unless there is no memory for it.
pub type Allocated<T> = std::result::Result<T, TryReserveError>;

/// A block of words, whose memory is kept when it is dropped.
#[derive(Clone)]
pub struct Words(Vec<u64>);

impl Words {
    /// `count` words of any content.
    pub fn any(count: usize) -> Allocated<Words> {
        let mut words = allocated(count)?;
        words.resize(count, 0);
        Ok(Words(words))
    }

    /// `count` times `word`.
    pub fn filled(count: usize, word: u64) -> Allocated<Words> {
        let mut words = allocated(count)?;
        words.clear();
        words.resize(count, word);
        Ok(Words(words))
    }
}

/// Memory for `count` words.
fn allocated(count: usize) -> Allocated<Vec<u64>> {
    let kept = if count < LEAST { None } else { spare().take(count) };
    match kept {
        Some(words) => Ok(words),
        None => {
            let mut words = Vec::new();
            words.try_reserve_exact(count)?;
            in_huge_pages(&words);
            Ok(words)
        }
    }
}

/// Asks the system for huge pages in a new block. To read a large matrix in pages of 4 KiB takes up to 1.5 times as long:
/// the CPU waits for translations of addresses.
#[cfg(target_os = "linux")]
fn in_huge_pages(words: &Vec<u64>) {
    const HUGE: usize = 2 << 20;
    let (start, bytes) = (words.as_ptr().addr(), words.capacity() * size_of::<u64>());
    let inside = start.next_multiple_of(HUGE)..(start + bytes) / HUGE * HUGE;
    if !inside.is_empty() {
        // SAFETY: the advice changes no memory, and all of the range is in the block. Without huge pages it fails, which
        // changes nothing either.
        unsafe { libc::madvise(inside.start as *mut _, inside.len(), libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn in_huge_pages(_: &Vec<u64>) {}

impl Drop for Words {
    fn drop(&mut self) {
        if (LEAST..=MOST).contains(&self.0.capacity()) {
            spare().keep(std::mem::take(&mut self.0));
        }
    }
}

impl Deref for Words {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }
}

/// Values in such a block.
pub struct Scratch<E> {
    words: Words,
    len: usize,
    values: PhantomData<E>,
}

impl<E: Pod> Scratch<E> {
    /// `len` values of any content.
    pub fn any(len: usize) -> Result<Scratch<E>> {
        let bytes = len * size_of::<E>();
        let words = Words::any(bytes.div_ceil(8)).map_err(|_| {
            Error::new(Kind::Memory, "workspace").expected(format_args!("{bytes} bytes of memory")).got("none")
        })?;
        Ok(Scratch { words, len, values: PhantomData })
    }
}

impl<E: Pod> Deref for Scratch<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl<E: Pod> DerefMut for Scratch<E> {
    fn deref_mut(&mut self) -> &mut [E] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}
