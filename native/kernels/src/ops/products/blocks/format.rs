//! The formats: bytes of a block, and how one is written and read.

use crate::error::{Error, Kind, Result};
use crate::op;
use crate::tensor::{Shape, Spec};
use half::f16;
use serde::{Deserialize, Serialize};

/// Values per block.
pub const BLOCK: usize = 32;

/// Bytes of the scale at the front of a block.
pub const SCALE: usize = 2;

/// A block format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// 8 bits a value.
    #[default]
    #[serde(rename = "q8_0")]
    Q8,
    /// 4 bits a value.
    #[serde(rename = "q4_0")]
    Q4,
}

impl Format {
    /// Both formats.
    pub const ALL: [Format; 2] = [Format::Q8, Format::Q4];

    /// The name used in options and files.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Q8 => "q8_0",
            Format::Q4 => "q4_0",
        }
    }

    /// Bytes of a block.
    #[inline(always)]
    pub const fn bytes(self) -> usize {
        match self {
            Format::Q8 => SCALE + BLOCK,
            Format::Q4 => SCALE + BLOCK / 2,
        }
    }

    /// The divisor that turns a block's largest magnitude into its scale.
    #[inline(always)]
    pub const fn divisor(self) -> f32 {
        match self {
            Format::Q8 => 127.0,
            Format::Q4 => 8.0,
        }
    }

    /// The bytes of rows of `values` values.
    #[inline(always)]
    pub fn row_bytes(self, values: usize) -> usize {
        values / BLOCK * self.bytes()
    }

    /// The shape of quantized rows, for the rows of floats `x`.
    pub fn quantized(self, x: &Spec) -> Result<Shape> {
        let expected = || format!("(..., N) with N a multiple of {BLOCK}");
        match x.shape.split_last() {
            Some((&values, _)) if values % BLOCK == 0 => with_last(&x.shape, self.row_bytes(values)),
            _ => Err(op::wrong_shape("x", &expected(), x)
                .hint(format_args!("A block is {BLOCK} values of a row; pad rows with zeros"))),
        }
    }

    /// The shape of rows of floats, for quantized rows of this shape.
    pub fn values(self, name: &str, rows: &Spec) -> Result<Shape> {
        let expected = || format!("(..., Q) with Q a multiple of {}", self.bytes());
        match rows.shape.split_last() {
            Some((&bytes, _)) if bytes % self.bytes() == 0 => with_last(&rows.shape, bytes / self.bytes() * BLOCK),
            _ => Err(op::wrong_shape(name, &expected(), rows).hint(format_args!(
                "A block of {} has {} bytes",
                self.name(),
                self.bytes()
            ))),
        }
    }

    /// The error for a value of `x` whose scale would not be finite.
    pub fn refused(self, at: usize, value: f32) -> Error {
        Error::new(Kind::Argument, "x")
            .expected(format_args!("finite values, in magnitude below {} for {}", self.limit(), self.name()))
            .got(format_args!("{value} at position {at}"))
            .hint("Scale the tensor down, or give `unchecked` to store infinite scales as ggml does")
    }

    /// Whether values up to this magnitude have a finite scale; false for NaN.
    #[inline(always)]
    pub fn holds(self, magnitude: f32) -> bool {
        magnitude < self.limit()
    }

    /// The least magnitude whose scale overflows f16.
    #[inline(always)]
    pub fn limit(self) -> f32 {
        65520.0 * self.divisor()
    }
}

/// A shape with another last axis.
pub fn with_last(shape: &Shape, last: usize) -> Result<Shape> {
    let mut dims = shape.to_vec();
    if let Some(axis) = dims.last_mut() {
        *axis = last;
    }
    Shape::new(&dims)
}

/// A scale as stored. Every NaN is stored as one bit pattern.
#[inline(always)]
pub fn stored(d: f32) -> f16 {
    if d.is_nan() { f16::NAN } else { f16::from_f32(d) }
}

/// The scale at the front of a block.
#[inline(always)]
pub fn scale(block: &[u8]) -> f32 {
    f16::from_le_bytes([block[0], block[1]]).to_f32()
}

/// The largest of some magnitudes; NaN ranks above infinity.
#[inline(always)]
fn largest(x: &[f32; BLOCK]) -> f32 {
    let bits = x.iter().fold(0, |most: u32, v| most.max(v.to_bits() & 0x7fff_ffff));
    f32::from_bits(bits)
}

/// The first value of that magnitude.
#[inline(always)]
fn first_of(x: &[f32; BLOCK], magnitude: f32) -> f32 {
    let mut first = BLOCK as u32 - 1;
    for (at, v) in x.iter().enumerate() {
        let here = if v.to_bits() & 0x7fff_ffff == magnitude.to_bits() { at as u32 } else { BLOCK as u32 - 1 };
        first = first.min(here);
    }
    // In a block of zeros, -0 counts as positive.
    if magnitude == 0.0 { 0.0 } else { x[first as usize] }
}

#[inline(always)]
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Truncates a value within limits; NaN counts as 0. With a plain `as` compilers do not vectorize.
#[inline(always)]
fn whole<const LEAST: i8, const MOST: i8>(v: f32) -> i32 {
    let v = if v.is_nan() { 0.0 } else { v.clamp(f32::from(LEAST), f32::from(MOST)) };
    // SAFETY: `v` is not NaN, and its limits are those of a byte.
    unsafe { v.to_int_unchecked() }
}

/// Writes a block of Q8_0. Returns the largest magnitude of its values, NaN if one is NaN, and the scale as stored.
#[inline(always)]
pub fn to_q8(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, f16) {
    let amax = largest(x);
    let d = amax / Format::Q8.divisor();
    let id = inverse(d);
    for (q, x) in q.iter_mut().zip(x) {
        let v = x * id;
        // Rounds halves away from zero, for |v| < 2^22.
        *q = whole::<-127, 127>(v + 0.49999997f32.copysign(v)) as i8;
    }
    (amax, stored(d))
}

/// Like [`to_q8`], for a block of Q4_0.
#[inline(always)]
pub fn to_q4(x: &[f32; BLOCK], q: &mut [u8; BLOCK / 2]) -> (f32, f16) {
    let amax = largest(x);
    let d = first_of(x, amax) / -Format::Q4.divisor();
    let id = inverse(d);
    let mut nibbles = [0u8; BLOCK];
    for (nibble, x) in nibbles.iter_mut().zip(x) {
        *nibble = whole::<0, 15>(x * id + 8.5) as u8;
    }
    for (j, q) in q.iter_mut().enumerate() {
        *q = nibbles[j] | nibbles[j + BLOCK / 2] << 4;
    }
    (amax, stored(d))
}

/// Writes a block of either format. Returns the largest magnitude.
#[inline(always)]
pub fn write(format: Format, x: &[f32; BLOCK], block: &mut [u8]) -> f32 {
    let (to_scale, q) = block.split_at_mut(SCALE);
    let (amax, d) = match format {
        Format::Q8 => {
            let q: &mut [u8; BLOCK] = q.try_into().expect("a block");
            to_q8(x, bytemuck::cast_mut(q))
        }
        Format::Q4 => to_q4(x, q.try_into().expect("a block")),
    };
    to_scale.copy_from_slice(&d.to_le_bytes());
    amax
}

/// The integers of a block, which times its scale are the values.
#[inline(always)]
pub fn integers(format: Format, block: &[u8]) -> [i8; BLOCK] {
    let (q, mut to) = (&block[SCALE..], [0; BLOCK]);
    match format {
        Format::Q8 => to.copy_from_slice(bytemuck::cast_slice(&q[..BLOCK])),
        Format::Q4 => {
            let (low, high) = to.split_at_mut(BLOCK / 2);
            for ((low, high), byte) in low.iter_mut().zip(high).zip(q) {
                *low = (byte & 15) as i8 - 8;
                *high = (byte >> 4) as i8 - 8;
            }
        }
    }
    to
}

/// The values of a block.
#[inline(always)]
pub fn read(format: Format, block: &[u8]) -> [f32; BLOCK] {
    let (d, q) = (scale(block), integers(format, block));
    let mut values = [0.0; BLOCK];
    for (value, q) in values.iter_mut().zip(q) {
        *value = d * f32::from(q);
    }
    values
}
