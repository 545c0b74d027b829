//! The operations of integer products: bytes in vectors, and sums of four adjacent products.

use super::product::block_bytes;
use crate::cpu::unrolled;
use half::f16;

/// Bytes of one or two blocks in a vector, and sums of four products each, for one instruction set.
///
/// Every method takes one or a few instructions, and is sound only on a CPU that supports them. `weights` are the bytes
/// that `q8` or `q4` made of a block; they may exceed the integers of the block by `OFFSETS`.
pub trait Lanes: Copy {
    /// A vector of `LANES` words: four bytes each, or a sum of four products each.
    type Words: Copy;
    /// A vector of `LANES` floats.
    type Floats: Copy;
    /// The type for single blocks, with the same offsets, for sums over lanes.
    type Row: Eight;
    /// Blocks per vector.
    const BLOCKS: usize;
    /// Sums, or floats, per vector.
    const LANES: usize = 8 * Self::BLOCKS;
    /// How much the bytes of weights in Q8_0 and in Q4_0 exceed their integers.
    const OFFSETS: [i32; 2];

    /// The weights of blocks in Q8_0; the second is read only by vectors of two blocks.
    ///
    /// # Safety
    /// Each pointer that is read points to a whole block.
    unsafe fn q8(blocks: [*const u8; 2]) -> Self::Words;
    /// The weights of blocks in Q4_0; the second is read only by vectors of two blocks.
    ///
    /// # Safety
    /// Each pointer that is read points to a whole block.
    unsafe fn q4(blocks: [*const u8; 2]) -> Self::Words;
    /// Loads `LANES` words from memory.
    ///
    /// # Safety
    /// `LANES` words are readable at `from`.
    unsafe fn words(from: *const u8) -> Self::Words;
    /// Loads `LANES` floats from memory.
    ///
    /// # Safety
    /// `LANES` floats are readable at `from`.
    unsafe fn floats(from: *const f32) -> Self::Floats;
    /// Writes `LANES` floats.
    ///
    /// # Safety
    /// `LANES` floats are writable at `to`.
    unsafe fn write(floats: Self::Floats, to: *mut f32);
    /// The first `LANES` half-precision numbers, widened.
    fn widen(halves: &[f16; 16]) -> Self::Floats;
    /// Broadcasts a word to all lanes.
    fn spread(word: i32) -> Self::Words;
    /// Broadcasts a float to all lanes.
    fn spread_float(value: f32) -> Self::Floats;
    /// Adds to each sum the products of four weights of Q8_0 with four bytes from -127 to 127.
    fn dot8(sums: Self::Words, weights: Self::Words, x: Self::Words) -> Self::Words;
    /// Adds to each sum the products of four weights of Q4_0 with four bytes from -127 to 127.
    fn dot4(sums: Self::Words, weights: Self::Words, x: Self::Words) -> Self::Words;
    /// The sums as floats.
    fn to_floats(sums: Self::Words) -> Self::Floats;
    /// The product of each lane.
    fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b + c`, rounded once.
    fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Transposes eight rows of eight words, separately in each half of the vectors.
    fn transposed(rows: [Self::Words; 8]) -> [Self::Words; 8];
}

/// Vectors of eight lanes, which one block fills.
pub trait Eight: Lanes {
    /// The scales of eight contiguous blocks.
    ///
    /// # Safety
    /// Eight blocks are readable at `blocks`.
    #[inline(always)]
    unsafe fn scales<const Q4: bool>(blocks: *const u8) -> Self::Floats {
        let mut halves = [f16::ZERO; 16];
        // SAFETY: the caller's promise.
        unrolled!(at < 8, { halves[at] = unsafe { blocks.add(at * block_bytes(Q4)).cast::<f16>().read_unaligned() } });
        Self::widen(&halves)
    }
    /// A word in the first lane, zeros in the others.
    fn first(word: i32) -> Self::Words;
    /// The first 16 weights of two blocks of Q4_0, one block in each half, then their second 16.
    ///
    /// # Safety
    /// Both pointers point to whole blocks.
    unsafe fn q4_halves(blocks: [*const u8; 2]) -> [Self::Words; 2];
    /// The argument of `picked` that selects a lane for each half of a vector.
    fn pick(halves: [usize; 2]) -> Self::Words;
    /// Broadcasts within each half the lane that `pick` selects.
    fn picked(floats: Self::Floats, pick: Self::Words) -> Self::Floats;
    /// The sum of each lane.
    fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The sum of all lanes.
    fn total(floats: Self::Floats) -> f32;
}

/// Transposes eight words by eight, separately in each half where there are two. `low32` and its siblings interleave
/// words, or pairs of words, of the lower or upper half of each 128 bits. `first` and `second` join the first or the
/// second 128 bits of each 256.
macro_rules! transpose {
    ($rows:ident, $low32:expr, $high32:expr, $low64:expr, $high64:expr, $first:expr, $second:expr) => {{
        let [a, b, c, d, e, f, g, h] = $rows;
        let (ab, cd, ef, gh) = ($low32(a, b), $low32(c, d), $low32(e, f), $low32(g, h));
        let (ab_high, cd_high, ef_high, gh_high) = ($high32(a, b), $high32(c, d), $high32(e, f), $high32(g, h));
        let (w0, w0_high) = ($low64(ab, cd), $low64(ef, gh));
        let (w1, w1_high) = ($high64(ab, cd), $high64(ef, gh));
        let (w2, w2_high) = ($low64(ab_high, cd_high), $low64(ef_high, gh_high));
        let (w3, w3_high) = ($high64(ab_high, cd_high), $high64(ef_high, gh_high));
        [
            $first(w0, w0_high),
            $first(w1, w1_high),
            $first(w2, w2_high),
            $first(w3, w3_high),
            $second(w0, w0_high),
            $second(w1, w1_high),
            $second(w2, w2_high),
            $second(w3, w3_high),
        ]
    }};
}
pub(super) use transpose;
