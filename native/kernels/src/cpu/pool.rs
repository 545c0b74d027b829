//! The threads of this crate, created on first use and separate from those of other libraries. For each number of
//! threads there is a thread pool for one caller at a time (a crew), and a rayon pool for all concurrent callers.

use super::team::{self, Apart, Crew, Mine};
use crate::error::{Error, Kind, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The largest number of threads that can be requested.
pub const MAX_THREADS: usize = 1024;

/// The default number of threads: one per available core.
pub fn default_threads() -> usize {
    // Cached, because the query reads files, which takes longer than a short op.
    static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

/// Checks that a number of threads is valid.
pub fn checked(threads: usize) -> Result<usize> {
    if (1..=MAX_THREADS).contains(&threads) {
        return Ok(threads);
    }
    Err(Error::new(Kind::Option, "threads").expected(format_args!("a number from 1 to {MAX_THREADS}")).got(threads))
}

/// Calls `work(i)` for every `i` below `count`, shared among `threads` threads. The caller is one of them. So a short
/// op does not wait for other threads to wake, and if all others are busy, the caller does everything.
pub fn for_each(threads: usize, count: usize, work: impl Fn(usize) + Send + Sync) -> Result<()> {
    each(threads, count, &work)
}

/// [`for_each`], compiled once for all kinds of work: its hundreds of copies would be a tenth of the library.
fn each(threads: usize, count: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
    if threads == 1 || count <= 1 {
        (0..count).for_each(work);
        return Ok(());
    }
    let shares = Shares::new(count, checked(threads)?.min(count));
    let job = |own| shares.take(own, work);
    if team::run(shares.len(), &job) || crew(threads)?.run(shares.len(), &job) {
        return Ok(());
    }
    pool(threads)?.in_place_scope(|scope| {
        (1..shares.len()).for_each(|own| scope.spawn(move |_| job(own)));
        job(0);
    });
    Ok(())
}

/// Does work that calls [`for_each`] repeatedly. Its helper threads busy-wait until the work is done: a call then costs
/// 1 us, not the 30 to 100 that waking a thread takes. The work must not use the rayon pool, as [`inside`] does.
pub fn awake<T>(threads: usize, work: impl FnOnce() -> T) -> Result<T> {
    if threads == 1 || team::is_there() {
        return Ok(work());
    }
    let (pool, mine) = (pool(checked(threads)?)?, Mine::new());
    for own in 1..threads {
        let team = mine.team();
        pool.spawn(move || team.serve(own));
    }
    Ok(work())
}

/// An awake thread pays off for work smaller by this factor.
const AWAKE: usize = 32;

/// Number of threads that should share `work`, if from `least` on waking another one pays off.
pub fn worth(threads: usize, work: usize, least: usize) -> usize {
    let least = if team::is_there() { least / AWAKE } else { least };
    if work < least { 1 } else { threads }
}

/// The numbers below `count`, split into contiguous shares, one per thread. A thread that finishes its own share steals
/// from the others.
struct Shares {
    count: usize,
    /// For each share, the next number that no thread has taken.
    next: Vec<Apart<AtomicUsize>>,
}

impl Shares {
    fn new(count: usize, shares: usize) -> Shares {
        Shares { count, next: (0..shares).map(|i| Apart(AtomicUsize::new(i * count / shares))).collect() }
    }

    fn len(&self) -> usize {
        self.next.len()
    }

    /// Calls `work` with the numbers of share `own`, then with those stolen from other shares.
    fn take(&self, own: usize, work: &dyn Fn(usize)) {
        for share in (own..self.len()).chain(0..own) {
            let end = (share + 1) * self.count / self.len();
            let next = &self.next[share].0;
            // Where all are taken, other threads keep the counter in their cache.
            let take = || (next.load(Ordering::Relaxed) < end).then(|| next.fetch_add(1, Ordering::Relaxed));
            std::iter::from_fn(|| take().filter(|&i| i < end)).for_each(work);
        }
    }
}

/// Does work that splits itself over the threads of the rayon pool in which it runs.
pub fn inside<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T> {
    if threads == 1 {
        return Ok(work());
    }
    Ok(pool(checked(threads)?)?.install(work))
}

/// A slice whose disjoint parts are written from several threads.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts of a slice of `T`, and its callers promise that they are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: it only hands out parts of a slice of `T`, and its callers promise that they are disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows the slice for as long as parts of it are handed out.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// The address of the first element.
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
        // SAFETY: the range is inside the slice, and the caller promises that no live part overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    static POOLS: Made<ThreadPool> = LazyLock::new(Mutex::default);
    made(&POOLS, threads, || {
        let builder = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("sidewinder-{i}"));
        builder.build().map(Arc::new)
    })
}

fn crew(threads: usize) -> Result<Arc<Crew>> {
    static CREWS: Made<Crew> = LazyLock::new(Mutex::default);
    made(&CREWS, threads, || Crew::new(threads, default_threads()))
}

/// The pools by their number of threads.
type Made<T> = LazyLock<Mutex<HashMap<usize, Arc<T>>>>;

/// The pool of `threads` threads, created if there is none.
fn made<T, E: std::fmt::Display>(
    all: &Made<T>,
    threads: usize,
    make: impl FnOnce() -> std::result::Result<Arc<T>, E>,
) -> Result<Arc<T>> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(one) = all.get(&threads) {
        return Ok(one.clone());
    }
    let one = make().map_err(|e| Error::new(Kind::Unavailable, "threads").expected(threads).got(e))?;
    Ok(all.entry(threads).or_insert(one).clone())
}
