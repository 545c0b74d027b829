//! What CPU kernels are written with: [`level`] (what this CPU can do), [`vector`] (one narrow SIMD
//! trait), [`math`] and [`activation`] (functions over it), [`pool`] (our own threads) and [`strips`] (sharing channels among them).

pub mod activation;
pub mod convert;
pub mod elementwise;
pub mod level;
pub mod math;
pub mod matrix;
pub mod pool;
pub mod storage;
pub mod strips;
pub mod sum;
pub mod vector;

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::{Level, Real, Work};
pub use storage::Storage;
pub use vector::Vector;

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
