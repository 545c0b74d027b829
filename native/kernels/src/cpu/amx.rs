//! AMX, the matrix unit of some x86 cores: eight tiles of up to 16 rows of 64 bytes, and products of tiles.
//!
//! A product `C += A B` takes `A` by rows, and `B` in the VNNI layout, in which the values that one 32-bit lane
//! multiplies are adjacent: row `j` of `B` holds, for each of its columns, four bytes or two bf16 numbers of the inner
//! dimension from `4 j` or `2 j` on. A product of whole tiles takes 16 cycles for any width of `A`; loading a tile
//! takes 8.
//!
//! The intrinsics are not stable yet, so each method is one instruction in assembly. No compiler keeps anything in
//! tiles by itself, so they are not named as clobbered.
//!
//! Numbers in bf16 are summed in f32, rounded to nearest; subnormal ones count as 0.

use super::Vector;
use super::aligned::Aligned;
use super::pool::{self, Shared};
use super::vector::transpose;
use super::x86::F32x16;
use crate::error::Result;
use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _mm512_castsi512_ps, _mm512_maskz_loadu_epi8};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a whole tile, and 32-bit lanes of a row.
pub const SIDE: usize = 16;

/// Bytes of a whole row.
pub const ROW: usize = 64;

/// Bytes of a whole tile.
pub const TILE: usize = SIDE * ROW;

/// Whether the CPU has AMX for bytes and for bf16, and the system lets this process use it.
pub fn is_there() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    let all = BF16 | TILE | INT8;
    __cpuid_count(7, 0).edx & all == all && is_permitted()
}

/// Requests permission for the tile state, which the system then saves for each thread. It holds for the whole process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call has no pointers. A kernel without this request returns an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The tile configuration, in the layout of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The rows of a tile and the bytes of each.
pub type Shape = [usize; 2];

/// The shape of a whole tile.
pub const WHOLE: Shape = [SIDE, ROW];

/// The tile registers of this thread, configured by [`Tiles::new`] and released on drop.
pub struct Tiles {
    of_this_thread: PhantomData<*mut ()>,
}

impl Tiles {
    /// Gives each tile a shape and fills it with zeros.
    ///
    /// # Safety
    /// The CPU must be of the level [`Amx`](super::Level::Amx). A thread must not have two values of this type.
    pub unsafe fn new(shapes: [Shape; 8]) -> Tiles {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (at, [rows, bytes]) in shapes.into_iter().enumerate() {
            assert!(rows <= SIDE && bytes <= ROW, "the shape of a tile");
            (config.rows[at], config.row_bytes[at]) = (rows as u8, bytes as u16);
        }
        // SAFETY: the caller's promise; the shapes are legal.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly)) };
        Tiles { of_this_thread: PhantomData }
    }

    /// Fills a tile with zeros.
    #[inline(always)]
    pub fn zero<const T: usize>(&self) {
        // SAFETY: the tiles are configured as long as `self` lives.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) };
    }

    /// Loads a tile whose rows are `stride` bytes apart.
    ///
    /// # Safety
    /// All rows of the tile's shape must be readable.
    #[inline(always)]
    pub unsafe fn load<const T: usize>(&self, from: *const u8, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tileloadd tmm{t}, [{from} + {stride}]", t = const T, from = in(reg) from, stride = in(reg) stride,
                options(nostack, preserves_flags, readonly));
        }
    }

    /// Writes a tile to rows that are `stride` bytes apart.
    ///
    /// # Safety
    /// All rows of the tile's shape must be writable.
    #[inline(always)]
    pub unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tilestored [{to} + {stride}], tmm{t}", t = const T, to = in(reg) to, stride = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }

    /// Adds to tile `C` of 32-bit integers the product of tiles `A` and `B` of signed bytes. Sums wrap around.
    ///
    /// # Safety
    /// `C` must have the rows of `A` and the columns of `B`, and `B` a row for every four bytes of a row of `A`.
    #[inline(always)]
    pub unsafe fn add_bytes<const C: usize, const A: usize, const B: usize>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }

    /// Adds to tile `C` of f32 the product of tiles `A` and `B` of bf16.
    ///
    /// # Safety
    /// `C` must have the rows of `A` and the columns of `B`, and `B` a row for every two numbers of a row of `A`.
    #[inline(always)]
    pub unsafe fn add_bf16<const C: usize, const A: usize, const B: usize>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, preserves_flags, nomem));
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles are configured. Released tiles need not be saved on context switches.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Where the tiles of a factor lie in memory; both strides are in bytes.
#[derive(Clone, Copy)]
pub struct Source {
    /// The first tile.
    pub start: *const u8,
    /// Stride between the rows of a tile.
    pub row: usize,
    /// Stride between tiles along the inner dimension.
    pub step: usize,
}

impl Source {
    /// Packed tiles, one after the other.
    pub fn packed(tiles: &[u8]) -> Source {
        Source { start: tiles.as_ptr(), row: ROW, step: TILE }
    }

    #[inline(always)]
    fn at(&self, step: usize) -> *const u8 {
        self.start.wrapping_add(step * self.step)
    }
}

/// A register block of up to two by two tiles of sums of products in bf16, in which each loaded tile serves two
/// products.
pub struct Block {
    /// The left factors: two tiles of rows.
    pub left: [Source; 2],
    /// The right factors: two tiles of columns.
    pub right: [Source; 2],
    /// Whether the second left tile and the second right tile are used.
    pub two: [bool; 2],
    /// The tiles of sums, in row-major order.
    pub sums: [[*mut f32; 2]; 2],
    /// Row stride of a tile of sums, in numbers.
    pub stride: usize,
}

impl Block {
    /// Configures the tiles for a block whose left tiles have these numbers of rows: 0 to 3 are sums, 4 and 5 left
    /// factors, 6 and 7 right factors.
    ///
    /// # Safety
    /// As for [`Tiles::new`].
    #[inline(always)]
    pub unsafe fn tiles(rows: [usize; 2]) -> Tiles {
        let [first, second]: [Shape; 2] = [[rows[0].max(1), ROW], [rows[1].max(1), ROW]];
        // SAFETY: the caller's promise.
        unsafe { Tiles::new([first, first, second, second, first, second, WHOLE, WHOLE]) }
    }

    /// Accumulates the products of these steps of the inner dimension; the sums start from 0 if `fresh`.
    ///
    /// # Safety
    /// `tiles` must be from [`Block::tiles`] with the rows of this block, and all tiles that it names must be valid
    /// memory.
    #[inline(always)]
    pub unsafe fn add(&self, tiles: &Tiles, steps: Range<usize>, fresh: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.two {
                [true, true] => self.add_of::<2, 2>(tiles, steps, fresh),
                [true, false] => self.add_of::<2, 1>(tiles, steps, fresh),
                [false, true] => self.add_of::<1, 2>(tiles, steps, fresh),
                [false, false] => self.add_of::<1, 1>(tiles, steps, fresh),
            }
        }
    }

    #[inline(always)]
    unsafe fn add_of<const A: usize, const B: usize>(&self, tiles: &Tiles, steps: Range<usize>, fresh: bool) {
        let stride = self.stride * size_of::<f32>();
        macro_rules! each_sum {
            ($method:ident $(, $stride:ident)?) => {
                each_sum!(@ $method 0 0 0 $($stride)?);
                each_sum!(@ $method 1 0 1 $($stride)?);
                each_sum!(@ $method 2 1 0 $($stride)?);
                each_sum!(@ $method 3 1 1 $($stride)?);
            };
            (@ zero $tile:literal $a:literal $b:literal) => {
                if $a < A && $b < B {
                    tiles.zero::<$tile>();
                }
            };
            (@ $method:ident $tile:literal $a:literal $b:literal $stride:ident) => {
                if $a < A && $b < B {
                    tiles.$method::<$tile>(self.sums[$a][$b].cast(), $stride);
                }
            };
        }
        // SAFETY: the caller's promise.
        unsafe {
            if fresh {
                each_sum!(zero);
            } else {
                each_sum!(load, stride);
            }
            for step in steps {
                tiles.load::<4>(self.left[0].at(step), self.left[0].row);
                tiles.load::<6>(self.right[0].at(step), self.right[0].row);
                tiles.add_bf16::<0, 4, 6>();
                if B == 2 {
                    tiles.load::<7>(self.right[1].at(step), self.right[1].row);
                    tiles.add_bf16::<1, 4, 7>();
                }
                if A == 2 {
                    tiles.load::<5>(self.left[1].at(step), self.left[1].row);
                    tiles.add_bf16::<2, 5, 6>();
                }
                if A == 2 && B == 2 {
                    tiles.add_bf16::<3, 5, 7>();
                }
            }
            each_sum!(store, stride);
        }
    }
}

/// The lines of a factor along the inner dimension: rows of a left factor, columns of a right one.
#[derive(Clone, Copy)]
pub struct Lines<'a> {
    /// The bytes of all lines.
    pub bytes: &'a [u8],
    /// Bytes from line to line.
    pub stride: usize,
    /// Number of lines.
    pub count: usize,
    /// Bytes of each line.
    pub len: usize,
}

impl Lines<'_> {
    /// 64 bytes of each of sixteen lines. Bytes past the end are 0.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    pub unsafe fn load(&self, first: usize, at: usize) -> [F32x16; SIDE] {
        let there = self.len - at;
        let mask = first_bits(there);
        let mut rows = [F32x16::zero(); SIDE];
        for (line, row) in rows.iter_mut().enumerate().take(self.count - first) {
            let from = self.bytes[(first + line) * self.stride + at..][..there.min(ROW)].as_ptr();
            // SAFETY: the caller's promise; the mask selects only bytes of the slice.
            *row = F32x16(unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(mask, from.cast())) });
        }
        rows
    }

    /// Packs all lines as right factors: one group of sixteen lines after the other, a tile for each 64 bytes.
    ///
    /// # Safety
    /// The CPU must have the level [`Amx`](super::Level::Amx).
    pub unsafe fn pack_all(&self, threads: usize) -> Result<Aligned<u8>> {
        let (sixteens, bytes) = (self.count.div_ceil(SIDE), self.len.div_ceil(ROW) * TILE);
        let mut tiles = Aligned::new(sixteens * bytes);
        let to = Shared::new(&mut tiles);
        pool::for_each(threads, sixteens, |at| {
            // SAFETY: tiles share no line. The rest is the caller's promise.
            unsafe { self.pack(at * SIDE, to.part(at * bytes, bytes)) };
        })?;
        Ok(tiles)
    }

    /// Packs sixteen lines into tiles: row `j` of a tile has word `j` of every line.
    ///
    /// # Safety
    /// The CPU must have these features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn pack(&self, first: usize, to: &mut [u8]) {
        for (tile, to) in to.chunks_exact_mut(TILE).enumerate() {
            // SAFETY: the caller's promise.
            let mut rows = unsafe { self.load(first, tile * ROW) };
            transpose(&mut rows);
            write(&rows, to);
        }
    }
}

/// The packing of a tile of bf16, whose 32-bit words hold two numbers each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// A row of a tile holds the numbers of one line: a left factor.
    Lines,
    /// A row of a tile holds two numbers of each of sixteen lines: a right factor.
    Pairs,
}

impl Order {
    /// The order of the other factor.
    pub fn other(self) -> Order {
        match self {
            Order::Lines => Order::Pairs,
            Order::Pairs => Order::Lines,
        }
    }
}

/// A mask of the first `count` bits.
#[inline(always)]
pub fn first_bits(count: usize) -> u64 {
    if count < 64 { (1 << count) - 1 } else { u64::MAX }
}

/// Reads the rows of a tile.
#[inline(always)]
pub fn read(tile: &[f32]) -> [F32x16; SIDE] {
    let mut rows = [F32x16::zero(); SIDE];
    for (row, from) in rows.iter_mut().zip(tile.chunks_exact(SIDE)) {
        *row = F32x16::load(from);
    }
    rows
}

/// Writes the rows of a tile.
#[inline(always)]
pub fn write(rows: &[F32x16; SIDE], to: &mut [u8]) {
    for (row, to) in rows.iter().zip(bytemuck::cast_slice_mut(to).chunks_exact_mut(SIDE)) {
        row.store(to);
    }
}
