//! The building blocks of CPU kernels: [`level`] (what this CPU supports), [`vector`] (one narrow SIMD trait), [`math`]
//! and [`activation`] (functions over it), [`pool`] (threads), [`strips`] (sharing channels among them), [`matrix`] and
//! [`panels`] (products), [`epilogue`] (what follows their sums).

pub mod activation;
pub mod aligned;
pub mod convert;
pub mod elementwise;
pub mod epilogue;
pub mod level;
pub mod math;
pub mod matrix;
pub mod panels;
pub mod pool;
pub(crate) mod rows;
pub mod storage;
pub mod strips;
pub mod sum;
pub mod team;
pub mod vector;

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub use epilogue::{Epilogue, Scaled};
pub use level::{Level, Real, Work};
pub use storage::Storage;
pub use vector::Vector;
pub(crate) use vector::{each_vector, unrolled};

/// How to run on the CPU: the instructions and the number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exec {
    /// The instructions to use.
    pub level: Level,
    /// Number of threads that share the work; at least 1.
    pub threads: usize,
}

impl Default for Exec {
    /// The best level of this CPU, with [`pool::default_threads`] threads.
    fn default() -> Self {
        Exec { level: Level::best(), threads: pool::default_threads() }
    }
}

/// Orders the non-temporal writes of [`Vector::stream`] before everything that this thread does next.
#[inline(always)]
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the base of every x86-64 CPU.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Outputs of at least this many bytes do not stay in the caches.
const LARGE: usize = 16 << 20;

/// Up to this number of threads memory latency is the limit, beyond it bandwidth.
const FEW_THREADS: usize = 8;

/// The kind of stores that write an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writing {
    /// Ordinary stores: the output stays in the caches.
    Plain,
    /// Ordinary stores, with cache lines prefetched long before. Two threads copy 64 MiB in 6.3 ms like this, in 7.1
    /// with non-temporal stores and in 9.1 with plain ones (Cascade Lake).
    Ahead,
    /// Non-temporal stores, past the caches. The old contents need not be read first, which cuts the traffic to two
    /// thirds.
    Past,
}

impl Writing {
    /// The fastest stores for an output of `bytes` bytes.
    pub fn of(bytes: usize, exec: &Exec) -> Writing {
        match exec.threads {
            _ if bytes < LARGE => Writing::Plain,
            ..=FEW_THREADS => Writing::Ahead,
            _ => Writing::Past,
        }
    }
}

/// Elements per cache line.
#[inline(always)]
pub const fn line<T>() -> usize {
    64 / size_of::<T>()
}

/// Prefetches the cache line of an element, to write it soon. Only a hint, as [`prefetch`] is.
#[inline(always)]
pub fn prefetch_to_write<T>(start: *const T, at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and is a no-op on CPUs that do not support it.
    unsafe {
        let line = start.wrapping_add(at);
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, at);
}

/// Prefetches the cache line of an element, to use it soon. Only a hint, but it matters where rows lie far apart, which
/// the hardware does not predict.
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

/// Like [`prefetch`], but into the first-level cache.
#[inline(always)]
pub fn prefetch_near<T>(start: *const T, at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of the base of every x86-64 CPU.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, at);
}
