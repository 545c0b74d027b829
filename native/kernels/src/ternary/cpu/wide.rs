//! The one trait over which ternary code is written, and the choice of what implements it.

use super::portable::Portable;
use crate::cpu::Level;
use std::sync::atomic::{AtomicU8, Ordering};

/// Cells of a word.
pub const WORD: usize = 64;

/// The planes of 64 cells.
pub type Planes = [u64; 2];

/// A vector of bytes, and what is done with ternary numbers by the same instructions.
///
/// Its methods, and all that calls them, are `#[inline(always)]`, as [`crate::cpu::Work`] tells.
pub trait Wide: Copy {
    /// Bytes of a vector.
    const BYTES: usize;
    /// How many rows of activations meet a row of weights at once.
    const TILE: usize;
    /// Partial sums of products.
    type Sums: Copy;
    /// Partial counts of bits.
    type Counts: Copy;
    /// Partial sums of floats.
    type Floats: Copy;

    /// The first [`Wide::BYTES`] bytes, which are there.
    fn load(from: &[u8]) -> Self;
    /// A byte everywhere.
    fn splat(byte: u8) -> Self;
    /// `self & other`.
    fn and(self, other: Self) -> Self;
    /// `self & !other`.
    fn and_not(self, other: Self) -> Self;
    /// `self | other`.
    fn or(self, other: Self) -> Self;
    /// `self ^ other`.
    fn xor(self, other: Self) -> Self;
    /// Each 16 bits to the right.
    fn right<const N: u32>(self) -> Self;
    /// Each 16 bits to the left by one.
    fn left(self) -> Self;

    /// No sums.
    fn no_sums() -> Self::Sums;
    /// Adds the products of codes of 0 to 2 with eight vectors of activations.
    fn add_products(sums: Self::Sums, codes: &[Self; 8], x: &[i8]) -> Self::Sums;
    /// Their sum.
    fn sum(sums: Self::Sums) -> i32;
    /// Codes apart: vector `b` has those of every eighth cell from `b` on.
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
    /// [`Wide::add_products`] of codes that are not apart yet, where no other row needs them: sums may be kept in what
    /// way is best.
    #[inline(always)]
    fn add_pairs(sums: &mut [Self::Sums; 4], pairs: [Self; 2], x: &[i8]) {
        sums[0] = Self::add_products(sums[0], &Self::codes(pairs), x);
    }
    /// The sum of those.
    #[inline(always)]
    fn sum_of_pairs(sums: [Self::Sums; 4]) -> i32 {
        Self::sum(sums[0])
    }

    /// No counts.
    fn no_counts() -> Self::Counts;
    /// Adds the number of bits that are set.
    fn add_count(counts: Self::Counts, of: Self) -> Self::Counts;
    /// `a - 2 b`, summed.
    fn count(a: Self::Counts, b: Self::Counts) -> i64;

    /// No sums.
    fn no_floats() -> Self::Floats;
    /// Adds of 64 floats those of one plane, and takes those of the other away.
    fn add_floats(sums: Self::Floats, planes: Planes, x: &[f32]) -> Self::Floats;
    /// Their sum.
    fn sum_floats(sums: Self::Floats) -> f32;

    /// The planes of 64 values; both bits of what is none of -1, 0 and 1.
    fn compress(values: &[u8; WORD]) -> Planes;
    /// The values of 64 cells, of which none has both bits.
    fn expand(planes: Planes) -> [u8; WORD];
}

/// Work that can be compiled for any of them.
pub trait Task {
    /// What it gives.
    type Output;
    /// Does it.
    fn run<V: Wide>(self) -> Self::Output;
}

/// What CPUs of one level have or have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extensions {
    /// Nothing beside the level.
    None,
    /// Sums of products of bytes: AVX-512 VNNI, NEON's dot product.
    Dot,
    /// Those, and counts of bits: AVX-512 VPOPCNTDQ.
    DotAndCount,
}

static ALLOWED: AtomicU8 = AtomicU8::new(Extensions::DotAndCount as u8);

/// Uses no more than these, in the whole process. Results are the same; this is there to test and to time them.
pub fn allow(most: Extensions) {
    ALLOWED.store(most as u8, Ordering::Relaxed);
}

/// What this CPU has of those that are allowed.
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
        // SAFETY: the level exists only where its instructions are, and extensions were asked for.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { super::avx512::run(extensions(), task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { super::avx2::run(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Level::Neon => unsafe { super::neon::run(extensions(), task) },
        _ => task.run::<Portable>(),
    }
}
