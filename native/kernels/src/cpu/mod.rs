//! What CPU kernels are written with: [`level`] (what this CPU can do), [`vector`] (one narrow SIMD
//! trait), [`math`] and [`activation`] (functions over it), [`pool`] (our own threads),
//! [`strips`] (sharing channels among them), [`matrix`] and [`panels`] (products).

pub mod activation;
pub mod convert;
pub mod elementwise;
pub mod level;
pub mod math;
pub mod matrix;
pub mod panels;
pub mod pool;
pub mod storage;
pub mod strips;
pub mod sum;
mod team;
pub mod vector;

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::{Level, Real, Work};
pub use storage::Storage;
pub use vector::Vector;
pub(crate) use vector::{each_vector, unrolled};

/// How to run on the CPU: which instructions and how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exec {
    /// The instructions to use.
    pub level: Level,
    /// How many threads share the work; at least 1.
    pub threads: usize,
}

impl Default for Exec {
    /// The best level of this CPU with as many threads as [`pool::default_threads`] says.
    fn default() -> Self {
        Exec { level: Level::best(), threads: pool::default_threads() }
    }
}

/// Orders what [`Vector::stream`] wrote before whatever this thread does next.
#[inline(always)]
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the base of every x86-64 CPU.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// An output of so many bytes does not stay in the caches.
const LARGE: usize = 16 << 20;

/// So many threads are held up by the latency of the memory, more of them by its bandwidth.
const FEW_THREADS: usize = 8;

/// How an output is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writing {
    /// It stays in the caches.
    Plain,
    /// Its cache lines are asked for long before they are written: two threads copy 64 MiB in 6.3 ms like
    /// this, in 7.1 past the caches and in 9.1 without (Cascade Lake).
    Ahead,
    /// Past the caches: the memory then need not be read first, which makes two thirds of the traffic.
    Past,
}

impl Writing {
    /// The best for an output of so many bytes.
    pub fn of(bytes: usize, exec: &Exec) -> Writing {
        match exec.threads {
            _ if bytes < LARGE => Writing::Plain,
            ..=FEW_THREADS => Writing::Ahead,
            _ => Writing::Past,
        }
    }
}

/// How many elements a cache line holds.
#[inline(always)]
pub const fn line<T>() -> usize {
    64 / size_of::<T>()
}

/// Asks for the cache line of an element of a slice, to write it soon. Only a hint, as [`prefetch`] is.
#[inline(always)]
pub fn prefetch_to_write<T>(start: *const T, at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and is nothing at all on a CPU that does not know it.
    unsafe {
        let line = start.wrapping_add(at);
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, at);
}

/// Asks for the cache line of an element of a slice, to use it soon. Only a hint, but one that
/// matters where rows lie far apart, which the hardware does not foresee.
#[inline(always)]
pub fn prefetch<T>(start: *const T, at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of the base of every x86-64 CPU.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, at);
}

/// The same into the cache of the first level.
#[inline(always)]
pub fn prefetch_near<T>(start: *const T, at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, at);
}
