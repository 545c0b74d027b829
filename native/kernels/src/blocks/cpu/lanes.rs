//! What integer products are written with: bytes in vectors, and sums of four neighbours' products.

use super::product::block_bytes;
use crate::cpu::unrolled;
use half::f16;

/// Bytes of one or two blocks in a vector, and sums of four products each, for a set of instructions.
///
/// Every method is an instruction or a few, and sound only on a CPU that has them. `weights` are bytes as a method
/// here has made them of a block, which may be larger than the integers that they stand for by `OFFSETS`.
pub trait Lanes: Copy {
    /// Bytes, or sums of four products each.
    type Words: Copy;
    /// As many floats.
    type Floats: Copy;
    /// Vectors of one block with the same offsets, for what is summed over lanes.
    type Row: Eight;
    /// Blocks that a vector holds.
    const BLOCKS: usize;
    /// Sums and floats of a vector.
    const LANES: usize = 8 * Self::BLOCKS;
    /// By how much bytes of weights in Q8_0 and in Q4_0 are larger.
    const OFFSETS: [i32; 2];

    /// Weights of blocks of Q8_0, of which the second is read only by vectors of two.
    ///
    /// # Safety
    /// Whole blocks lie there.
    unsafe fn q8(blocks: [*const u8; 2]) -> Self::Words;
    /// The same of Q4_0.
    ///
    /// # Safety
    /// Whole blocks lie there.
    unsafe fn q4(blocks: [*const u8; 2]) -> Self::Words;
    /// The same words again.
    ///
    /// # Safety
    /// So many lie there.
    unsafe fn words(from: *const u8) -> Self::Words;
    /// The same floats again.
    ///
    /// # Safety
    /// So many lie there.
    unsafe fn floats(from: *const f32) -> Self::Floats;
    /// Writes floats.
    ///
    /// # Safety
    /// There is room for so many.
    unsafe fn write(floats: Self::Floats, to: *mut f32);
    /// As many floats of half precision, widened.
    fn widen(halves: &[f16; 16]) -> Self::Floats;
    /// The same word in each lane.
    fn spread(word: i32) -> Self::Words;
    /// The same float in each lane.
    fn spread_float(value: f32) -> Self::Floats;
    /// Adds to each sum the products of four weights of Q8_0 with four bytes from -127 to 127.
    fn dot8(sums: Self::Words, weights: Self::Words, x: Self::Words) -> Self::Words;
    /// The same with weights of Q4_0.
    fn dot4(sums: Self::Words, weights: Self::Words, x: Self::Words) -> Self::Words;
    /// The sums as floats.
    fn to_floats(sums: Self::Words) -> Self::Floats;
    /// The product.
    fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b + c`, rounded once.
    fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Of vectors whose eight words in each half are a row: those whose lanes are the rows.
    fn transposed(rows: [Self::Words; 8]) -> [Self::Words; 8];
}

/// Eight lanes, which a block fills.
pub trait Eight: Lanes {
    /// The scales of eight blocks.
    ///
    /// # Safety
    /// They lie there.
    #[inline(always)]
    unsafe fn scales<const Q4: bool>(blocks: *const u8) -> Self::Floats {
        let mut halves = [f16::ZERO; 16];
        // SAFETY: the caller's promise.
        unrolled!(at < 8, { halves[at] = unsafe { blocks.add(at * block_bytes(Q4)).cast::<f16>().read_unaligned() } });
        Self::widen(&halves)
    }
    /// A word in the first lane, zeros in the others.
    fn first(word: i32) -> Self::Words;
    /// The first, and the second, 16 weights of two blocks of Q4_0, a block in each half.
    ///
    /// # Safety
    /// Whole blocks lie there.
    unsafe fn q4_halves(blocks: [*const u8; 2]) -> [Self::Words; 2];
    /// What `picked` takes for the lane that each half of a vector is to have.
    fn pick(halves: [usize; 2]) -> Self::Words;
    /// What one lane has, in each of a half.
    fn picked(floats: Self::Floats, pick: Self::Words) -> Self::Floats;
    /// The sum of two.
    fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The sum of all lanes.
    fn total(floats: Self::Floats) -> f32;
}

/// Transposes eight words by eight, in each half where there are two: `low32` and the others interleave words and pairs
/// of words of the lower or upper halves of each 128 bits, `first` and `second` join the first or the second 128 bits
/// of each 256.
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
