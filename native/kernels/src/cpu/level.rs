//! The one place that detects what the CPU supports.

use super::Exec;
use super::matrix::Gemm;
use super::storage::Storage;
use super::vector::Vector;
use crate::error::{Error, Kind, Result};
use std::sync::OnceLock;

/// An instruction set that kernels are compiled for, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The plain f64 reference, written for clarity and not for speed.
    Reference,
    /// One value at a time.
    Scalar,
    /// 4 floats at a time, on ARM.
    Neon,
    /// 8 floats at a time with fused multiply-add, on x86.
    Avx2,
    /// 16 floats at a time, on x86.
    Avx512,
    /// AVX-512, and products of bytes and of bf16 by AMX.
    Amx,
}

impl Level {
    /// All levels, slowest first, whether this CPU supports them or not.
    pub const ALL: [Level; 6] = [Level::Reference, Level::Scalar, Level::Neon, Level::Avx2, Level::Avx512, Level::Amx];

    /// Execution on the calling thread alone, with the instructions of this level.
    pub fn alone(self) -> &'static Exec {
        match self {
            Level::Reference => &Exec { level: Level::Reference, threads: 1 },
            Level::Scalar => &Exec { level: Level::Scalar, threads: 1 },
            Level::Neon => &Exec { level: Level::Neon, threads: 1 },
            Level::Avx2 => &Exec { level: Level::Avx2, threads: 1 },
            Level::Avx512 => &Exec { level: Level::Avx512, threads: 1 },
            Level::Amx => &Exec { level: Level::Amx, threads: 1 },
        }
    }

    /// The name used in options and tables.
    pub fn name(self) -> &'static str {
        match self {
            Level::Reference => "reference",
            Level::Scalar => "scalar",
            Level::Neon => "neon",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
        }
    }

    /// The level of that name, if this CPU supports it.
    pub fn from_name(name: &str) -> Result<Level> {
        Level::available().iter().copied().find(|level| level.name() == name).ok_or_else(|| {
            let names: Vec<_> = Level::available().iter().map(|level| level.name()).collect();
            Error::new(Kind::Unavailable, "level")
                .expected(format_args!("one of this CPU's levels: {}", names.join(", ")))
                .got(format_args!("`{name}`"))
        })
    }

    /// The levels of this CPU, slowest first.
    pub fn available() -> &'static [Level] {
        static AVAILABLE: OnceLock<Vec<Level>> = OnceLock::new();
        AVAILABLE.get_or_init(|| Level::ALL.into_iter().filter(|level| level.detect()).collect())
    }

    /// The fastest level of this CPU.
    pub fn best() -> Level {
        *Level::available().last().expect("the scalar level is everywhere")
    }

    #[cfg(target_arch = "x86_64")]
    fn detect(self) -> bool {
        match self {
            Level::Reference | Level::Scalar => true,
            Level::Neon => false,
            Level::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Level::Avx512 => {
                Level::Avx2.detect()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Level::Amx => Level::Avx512.detect() && is_x86_feature_detected!("avx512vnni") && super::amx::is_there(),
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn detect(self) -> bool {
        matches!(self, Level::Reference | Level::Scalar | Level::Neon)
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn detect(self) -> bool {
        matches!(self, Level::Reference | Level::Scalar)
    }
}

/// Work on values of type `E` that can be compiled for any vector of them.
///
/// `run` and everything it calls must be `#[inline(always)]`, or it is compiled without the instructions of its level.
/// For the same reason no vector may pass through a closure given to the standard library (`map`, `map_or`, `from_fn`):
/// those are compiled without the instructions.
pub trait Work<E> {
    /// The result of the work.
    type Output;
    /// Does the work with vectors of type `V`.
    fn run<V: Vector<Element = E>>(self) -> Self::Output;
}

/// An accumulation type: f32 or f64.
pub trait Real: Storage<Wide = Self> + PartialOrd + Vector<Element = Self> {
    /// Does `work` with the instructions of `level`.
    fn dispatch<W: Work<Self>>(level: Level, work: W) -> W::Output;
    /// The matrix product for this type and CPU.
    fn gemm() -> Gemm<Self>;
}

impl Real for f32 {
    fn dispatch<W: Work<f32>>(level: Level, work: W) -> W::Output {
        debug_assert!(Level::available().contains(&level));
        match level {
            // SAFETY: this level exists only where `detect` found its instructions.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx if !cfg!(without_avx512) => unsafe { super::x86::avx512(work) },
            // SAFETY: this level exists only where `detect` found its instructions.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { super::x86::avx2(work) },
            #[cfg(target_arch = "aarch64")]
            Level::Neon => work.run::<super::neon::F32x4>(),
            _ => work.run::<f32>(),
        }
    }

    fn gemm() -> Gemm<Self> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}

impl Real for f64 {
    /// One value at a time on every level: f64 is for checking gradients, not for speed.
    fn dispatch<W: Work<f64>>(_level: Level, work: W) -> W::Output {
        work.run::<f64>()
    }

    fn gemm() -> Gemm<Self> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}
