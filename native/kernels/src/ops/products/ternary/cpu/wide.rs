//! The trait over which ternary code is written, and the choice of its implementation.

use super::portable::Portable;
use crate::cpu::Level;
use std::sync::atomic::{AtomicU8, Ordering};

/// Cells of a word.
pub const WORD: usize = 64;

/// The planes of 64 cells.
pub type Planes = [u64; 2];

/// A vector of bytes, with the operations on ternary numbers of one instruction set.
///
/// Its methods, and everything that calls them, are `#[inline(always)]`; [`crate::cpu::Work`] says why.
pub trait Wide: Copy {
    /// Bytes of a vector.
    const BYTES: usize;
    /// Rows of activations that are multiplied with a row of weights at once.
    const TILE: usize;
    /// Partial sums of products.
    type Sums: Copy;
    /// Partial counts of bits.
    type Counts: Copy;
    /// Partial sums of floats.
    type Floats: Copy;

    /// Loads the first [`Wide::BYTES`] bytes; the slice must have them.
    fn load(from: &[u8]) -> Self;
    /// A vector with `byte` in every lane.
    fn splat(byte: u8) -> Self;
    /// `self & other`.
    fn and(self, other: Self) -> Self;
    /// `self & !other`.
    fn and_not(self, other: Self) -> Self;
    /// `self | other`.
    fn or(self, other: Self) -> Self;
    /// `self ^ other`.
    fn xor(self, other: Self) -> Self;
    /// Shifts each 16-bit lane right by `N`.
    fn right<const N: u32>(self) -> Self;
    /// Shifts each 16-bit lane left by one.
    fn left(self) -> Self;

    /// Zero partial sums.
    fn no_sums() -> Self::Sums;
    /// Adds the products of codes of 0 to 2 with eight vectors of activations.
    fn add_products(sums: Self::Sums, codes: &[Self; 8], x: &[i8]) -> Self::Sums;
    /// The total of partial sums.
    fn sum(sums: Self::Sums) -> i32;
    /// Separates codes: vector `b` gets those of every eighth cell from `b` on.
    #[inline(always)]
    fn codes([even, odd]: [Self; 2]) -> [Self; 8] {
        let two = Self::splat(3);
        [
            even.and(two),
            odd.and(two),
            even.right::<2>().and(two),
            odd.right::<2>().and(two),
            even.right::<4>().and(two),
            odd.right::<4>().and(two),
            even.right::<6>().and(two),
            odd.right::<6>().and(two),
        ]
    }
    /// Like [`Wide::add_products`] for codes that are not separated yet, where no other row of activations needs them
    /// separated. An implementation may divide the products among the four sums in any way.
    #[inline(always)]
    fn add_pairs(sums: &mut [Self::Sums; 4], pairs: [Self; 2], x: &[i8]) {
        sums[0] = Self::add_products(sums[0], &Self::codes(pairs), x);
    }
    /// The total of the sums of [`Wide::add_pairs`].
    #[inline(always)]
    fn sum_of_pairs(sums: [Self::Sums; 4]) -> i32 {
        Self::sum(sums[0])
    }

    /// Zero counts.
    fn no_counts() -> Self::Counts;
    /// Adds the number of set bits.
    fn add_count(counts: Self::Counts, of: Self) -> Self::Counts;
    /// The total of `a - 2 b`.
    fn count(a: Self::Counts, b: Self::Counts) -> i64;

    /// Zero partial sums.
    fn no_floats() -> Self::Floats;
    /// Adds those of 64 floats that plane 0 marks, and subtracts those that plane 1 marks.
    fn add_floats(sums: Self::Floats, planes: Planes, x: &[f32]) -> Self::Floats;
    /// The total of partial sums.
    fn sum_floats(sums: Self::Floats) -> f32;

    /// The planes of 64 values; both bits for a value other than -1, 0 and 1.
    fn compress(values: &[u8; WORD]) -> Planes;
    /// The values of 64 cells. No cell may have both bits.
    fn expand(planes: Planes) -> [u8; WORD];
}

/// Work that can be compiled for any [`Wide`].
pub trait Task {
    /// The result of the work.
    type Output;
    /// Does the work.
    fn run<V: Wide>(self) -> Self::Output;
}

/// Optional instructions of CPUs of one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extensions {
    /// None beyond the level.
    None,
    /// Sums of products of bytes: AVX-512 VNNI, NEON's dot product.
    Dot,
    /// Both `Dot` and counts of bits: AVX-512 VPOPCNTDQ.
    DotAndCount,
}

static ALLOWED: AtomicU8 = AtomicU8::new(Extensions::DotAndCount as u8);

/// Limits the extensions that the whole process uses. Results stay equal; for tests and timings.
pub fn allow(most: Extensions) {
    ALLOWED.store(most as u8, Ordering::Relaxed);
}

/// The extensions that this CPU has and [`allow`] permits.
fn extensions() -> Extensions {
    let allowed = ALLOWED.load(Ordering::Relaxed);
    let has = |one: Extensions, there: bool| there && allowed >= one as u8;
    #[cfg(target_arch = "x86_64")]
    let (dot, count) = (is_x86_feature_detected!("avx512vnni"), is_x86_feature_detected!("avx512vpopcntdq"));
    #[cfg(target_arch = "aarch64")]
    let (dot, count) = (std::arch::is_aarch64_feature_detected!("dotprod"), false);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let (dot, count) = (false, false);
    match (has(Extensions::Dot, dot), has(Extensions::DotAndCount, count)) {
        (true, true) => Extensions::DotAndCount,
        (true, false) => Extensions::Dot,
        _ => Extensions::None,
    }
}

/// Does `task` with the instructions of `level`.
pub fn dispatch<T: Task>(level: Level, task: T) -> T::Output {
    debug_assert!(Level::available().contains(&level));
    let _ = extensions;
    match level {
        // SAFETY: the level exists only where its instructions do, and the extensions were detected.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Amx if !cfg!(without_avx512) => unsafe { super::avx512::run(extensions(), task) },
        // SAFETY: the level exists only where its instructions do.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { super::avx2::run(task) },
        // SAFETY: the level exists only where its instructions do, and the extensions were detected.
        #[cfg(target_arch = "aarch64")]
        Level::Neon => unsafe { super::neon::run(extensions(), task) },
        _ => task.run::<Portable>(),
    }
}
