//! Ternary code in plain Rust, with eight bytes in a 64-bit word.

use super::wide::{Planes, WORD, Wide};

/// Eight bytes.
#[derive(Clone, Copy)]
pub struct Portable(u64);

/// A word with `byte` in each of its eight bytes.
#[inline(always)]
fn bytes(byte: u8) -> u64 {
    u64::from(byte) * 0x0101_0101_0101_0101
}

/// Gathers the lowest bits of eight bytes, in which no other bits are set.
#[inline(always)]
fn gather(bits: u64) -> u64 {
    bits.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// The planes of eight values, and a mask of the sentinels.
#[inline(always)]
fn planes_of(values: u64) -> [u64; 3] {
    let ones = bytes(1);
    let (low, sign) = (values & ones, values >> 7 & ones);
    // A negative value must have all bits set, any other none but the lowest.
    let odd = (values ^ (sign * 0xff)) & bytes(0xfe);
    // An invalid byte has a bit in 1 to 7: fold them into the lowest.
    let folded = (odd >> 1 | odd >> 2 | odd >> 3 | odd >> 4 | odd >> 5 | odd >> 6 | odd >> 7) & ones;
    let none = folded | sign & !low;
    [low & !sign, sign, none].map(gather)
}

/// The planes of 64 values: see [`Wide::compress`].
#[inline(always)]
pub fn compress(values: &[u8; WORD]) -> Planes {
    let mut planes = [0; 2];
    for (i, eight) in values.chunks_exact(8).enumerate() {
        let [p0, p1, none] = planes_of(u64::from_le_bytes(eight.try_into().expect("eight")));
        planes[0] |= (p0 | none) << (8 * i);
        planes[1] |= (p1 | none) << (8 * i);
    }
    planes
}

/// Spreads eight bits into the lowest bits of eight bytes.
#[inline(always)]
fn spread(bits: u64) -> u64 {
    // Each byte gets all bits and keeps its own, which the addition carries into the highest bit.
    let own = (bits * bytes(1)) & 0x8040_2010_0804_0201;
    (((own + 0x007f_7f7f_7f7f_7f7f) | own) >> 7) & bytes(1)
}

/// The values of 64 cells: see [`Wide::expand`].
#[inline(always)]
pub fn expand(planes: Planes) -> [u8; WORD] {
    let mut values = [0; WORD];
    for (i, eight) in values.chunks_exact_mut(8).enumerate() {
        let [p0, p1] = [0, 1].map(|plane: usize| spread(planes[plane] >> (8 * i) & 0xff));
        eight.copy_from_slice(&(p0 | (p1 * 0xff)).to_le_bytes());
    }
    values
}

/// Adds or subtracts floats as their bits say, in eight partial sums.
#[inline(always)]
pub fn add_floats(mut sums: [f32; 8], planes: Planes, x: &[f32]) -> [f32; 8] {
    for (i, eight) in x[..WORD].chunks_exact(8).enumerate() {
        for (j, (sum, &value)) in sums.iter_mut().zip(eight).enumerate() {
            let bit = |plane: u64| plane >> (8 * i + j) & 1 == 1;
            let kept = |yes: bool| if yes { value } else { 0.0 };
            *sum = *sum + kept(bit(planes[0])) - kept(bit(planes[1]));
        }
    }
    sums
}

impl Wide for Portable {
    const BYTES: usize = 8;
    const TILE: usize = 4;
    type Sums = i32;
    type Counts = i64;
    type Floats = [f32; 8];

    #[inline(always)]
    fn load(from: &[u8]) -> Self {
        Portable(u64::from_le_bytes(from[..8].try_into().expect("eight")))
    }
    #[inline(always)]
    fn splat(byte: u8) -> Self {
        Portable(bytes(byte))
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Portable(self.0 & other.0)
    }
    #[inline(always)]
    fn and_not(self, other: Self) -> Self {
        Portable(self.0 & !other.0)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Portable(self.0 | other.0)
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Portable(self.0 ^ other.0)
    }
    #[inline(always)]
    fn right<const N: u32>(self) -> Self {
        // Callers use only the low bits of each byte.
        Portable(self.0 >> N)
    }
    #[inline(always)]
    fn left(self) -> Self {
        Portable(self.0 << 1)
    }

    #[inline(always)]
    fn no_sums() -> i32 {
        0
    }
    #[inline(always)]
    fn add_products(mut sums: i32, codes: &[Self; 8], x: &[i8]) -> i32 {
        for (codes, x) in codes.iter().zip(x.chunks_exact(8)) {
            for (code, &x) in codes.0.to_le_bytes().into_iter().zip(x) {
                sums = sums.wrapping_add(i32::from(code) * i32::from(x));
            }
        }
        sums
    }
    #[inline(always)]
    fn sum(sums: i32) -> i32 {
        sums
    }

    #[inline(always)]
    fn no_counts() -> i64 {
        0
    }
    #[inline(always)]
    fn add_count(counts: i64, of: Self) -> i64 {
        counts + i64::from(of.0.count_ones())
    }
    #[inline(always)]
    fn count(a: i64, b: i64) -> i64 {
        a - 2 * b
    }

    #[inline(always)]
    fn no_floats() -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    fn add_floats(sums: [f32; 8], planes: Planes, x: &[f32]) -> [f32; 8] {
        add_floats(sums, planes, x)
    }
    #[inline(always)]
    fn sum_floats(sums: [f32; 8]) -> f32 {
        sums.iter().sum()
    }

    #[inline(always)]
    fn compress(values: &[u8; WORD]) -> Planes {
        compress(values)
    }
    #[inline(always)]
    fn expand(planes: Planes) -> [u8; WORD] {
        expand(planes)
    }
}
