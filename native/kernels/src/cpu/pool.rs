//! Our own rayon pools: one per size, made on first use, apart from anybody else's.

use crate::error::{Error, Kind, Result};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The most threads that can be asked for.
pub const MAX_THREADS: usize = 1024;

/// How many threads are used where none are asked for: one per available core.
pub fn default_threads() -> usize {
    // Asking the system reads files, which takes longer than a short op.
    static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

/// Proves that a number of threads can be had.
pub fn checked(threads: usize) -> Result<usize> {
    if (1..=MAX_THREADS).contains(&threads) {
        return Ok(threads);
    }
    Err(Error::new(Kind::Option, "threads").expected(format_args!("a number from 1 to {MAX_THREADS}")).got(threads))
}

/// Calls `work(i)` for every `i` below `count`, shared among `threads` threads. With one thread, or
/// one piece, the caller does it all.
pub fn for_each(threads: usize, count: usize, work: impl Fn(usize) + Send + Sync) -> Result<()> {
    if threads == 1 || count <= 1 {
        (0..count).for_each(work);
        return Ok(());
    }
    pool(checked(threads)?)?.install(|| (0..count).into_par_iter().for_each(work));
    Ok(())
}

/// Does work that shares itself among the threads of the rayon pool that it finds itself in.
pub fn inside<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T> {
    if threads == 1 {
        return Ok(work());
    }
    Ok(pool(checked(threads)?)?.install(work))
}

/// A slice whose parts are written from several threads, none of them twice.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts of a slice of `T`, and its callers promise that they are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Takes the slice for as long as parts of it are handed out.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// Where the slice starts.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const T {
        self.start
    }

    /// The `len` elements from `start` on. Panics where they leave the slice.
    ///
    /// # Safety
    /// No other part that is alive at the same time may overlap with this one.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part outside its slice");
        // SAFETY: the range is inside the slice, and the caller promises that nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    static POOLS: LazyLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("sidewinder-{i}"))
        .build()
        .map_err(|e| Error::new(Kind::Unavailable, "threads").expected(threads).got(e))?;
    Ok(pools.entry(threads).or_insert(Arc::new(pool)).clone())
}
