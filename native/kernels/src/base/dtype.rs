//! Element types: their names, their Rust types, and conversions.

pub use half::{bf16, f16};
use std::fmt;

/// The element types that tensors can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Unsigned byte, also for masks, where any number but 0 is true.
    U8,
    /// 8-bit signed integer, for quantized values.
    I8,
    /// 16-bit signed integer, which also carries the bits of half-precision numbers.
    I16,
    /// 32-bit signed integer: indices of slots, and sums of quantized products.
    I32,
    /// 64-bit signed integer, for sizes and positions.
    I64,
}

impl DType {
    /// All types.
    pub const ALL: [DType; 9] =
        [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::U8, DType::I8, DType::I16, DType::I32, DType::I64];
    /// The types that ops compute with.
    pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

    /// The name used in options, errors and other languages.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
        }
    }

    /// The type of that name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes an element takes.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 | DType::I16 => 2,
            DType::U8 | DType::I8 => 1,
        }
    }

    /// Whether it is one of [`DType::FLOATS`].
    pub fn is_float(self) -> bool {
        DType::FLOATS.contains(&self)
    }

    /// The accumulation type: f64 for f64, f32 for all others.
    pub fn wide(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number type that tensors can store.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its [`DType`].
    const DTYPE: DType;
    /// Its value: exact, except that integers beyond 2^53 are rounded to the nearest f64.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $to:expr, $from:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $to(self)
            }
            // Inlined, because vector code takes its constants from here.
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                $from(value)
            }
        }
    };
}
element!(f64, F64, |v| v, |v| v);
element!(f32, F32, |v| v as f64, |v| v as f32);
element!(bf16, Bf16, bf16::to_f64, bf16::from_f64);
element!(f16, F16, f16::to_f64, f16::from_f64);
element!(u8, U8, |v| v as f64, |v: f64| v.round_ties_even() as u8);
element!(i8, I8, |v| v as f64, |v: f64| v.round_ties_even() as i8);
element!(i16, I16, |v| v as f64, |v: f64| v.round_ties_even() as i16);
element!(i32, I32, |v| v as f64, |v: f64| v.round_ties_even() as i32);
element!(i64, I64, |v| v as f64, |v: f64| v.round_ties_even() as i64);

/// Calls `$body` with the Rust type of any [`DType`] as `$type`.
#[macro_export]
macro_rules! with_any_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::U8 => {
                type $type = u8;
                $body
            }
            $crate::tensor::DType::I8 => {
                type $type = i8;
                $body
            }
            $crate::tensor::DType::I16 => {
                type $type = i16;
                $body
            }
            $crate::tensor::DType::I32 => {
                type $type = i32;
                $body
            }
            $crate::tensor::DType::I64 => {
                type $type = i64;
                $body
            }
            float => $crate::with_type!(float, $type => $body),
        }
    };
}

/// Calls `$body` with the Rust type of a floating-point [`DType`] as `$type`.
#[macro_export]
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F64 => {
                type $type = f64;
                $body
            }
            $crate::tensor::DType::F32 => {
                type $type = f32;
                $body
            }
            $crate::tensor::DType::Bf16 => {
                type $type = $crate::tensor::bf16;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $type = $crate::tensor::f16;
                $body
            }
            integer => unreachable!("ops check that they compute with floats, not {integer}"),
        }
    };
}
