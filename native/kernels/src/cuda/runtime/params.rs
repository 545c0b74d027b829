//! Parameters of kernels: one declaration gives the struct in Rust and its text in CUDA.

use super::tensor_map::TensorMap;
use cudarc::driver::sys::CUtensorMap;

/// A struct that the host fills and kernels read; [`params!`] declares it.
///
/// # Safety
/// `TEXT` and the structs in `NEEDED` declare the layout of the type. `Any` has the same fields, except for those of
/// the arithmetic's type.
pub unsafe trait Declared: Copy {
    /// The struct with `()` for the type of the arithmetic, as a tag for every such type: `Params<()>` for
    /// `Params<f32>`.
    type Any: Copy;

    /// The struct's declaration in CUDA, under the type's name.
    const TEXT: &'static str;

    /// The declarations of the structs that fields contain.
    const NEEDED: &'static [&'static str] = &[];
}

// SAFETY: there is no declaration, and no field.
unsafe impl Declared for () {
    type Any = ();
    const TEXT: &'static str = "";
}

// SAFETY: the driver's type has this size and alignment.
unsafe impl Declared for TensorMap {
    type Any = TensorMap;
    const TEXT: &'static str = "struct alignas(64) TensorMap { unsigned char bytes[128]; };\n";
}

const _: () = assert!(size_of::<CUtensorMap>() == 128 && align_of::<CUtensorMap>() == 64);

/// Declares a struct as [`Declared`](crate::cuda::Declared), for Rust and for CUDA.
///
/// ```ignore
/// params! {
///     /// The kernel's parameters.
///     struct Params<R> with Job {
///         x: u64 as "const STORAGE*",
///         planes: [u64; 2] as "unsigned char*",
///         jobs: [Job; 5],
///         rows: i64,
///         eps: R,
///     }
/// }
/// ```
///
/// A field that holds a device address states its pointer type in CUDA. Other numbers have the type of equal size; `R`
/// is `REAL`, the type of the arithmetic. `with` lists the declared structs that fields contain. The length of an array
/// is a number, or a name that the kernel's compiler options define.
#[macro_export]
macro_rules! params {
    ($(#[$about:meta])* $vis:vis struct $name:ident $(<$real:ident>)? $(with $($needed:ident),+)? {
        $($field:ident: $($word:ident)? $([$item:ident; $count:tt])? $(as $pointer:literal)?),* $(,)?
    }) => {
        #[repr(C)]
        #[derive(Clone, Copy)]
        $(#[$about])*
        $vis struct $name $(<$real>)? { $($field: $($word)? $([$item; $count])?),* }

        // SAFETY: the text has the same fields in the same order, and both languages lay them out alike, with pointers
        // for addresses and lengths that the options define with the same value.
        unsafe impl $(<$real: Copy>)? $crate::cuda::Declared for $name $(<$real>)? {
            type Any = $name $(<$crate::cuda::any!($real)>)?;
            const TEXT: &'static str = concat!(
                "struct ", stringify!($name), " {\n",
                $(
                    "    ", $crate::cuda::c_type!($($word)? $($item)? $($pointer)?), " ", stringify!($field),
                    $("[", stringify!($count), "]",)? ";\n",
                )*
                "};\n",
            );
            $(const NEEDED: &'static [&'static str] = &[$(<$needed as $crate::cuda::Declared>::TEXT),+];)?
        }
    };
}
pub use params;

/// The name of a type in CUDA.
#[doc(hidden)]
#[macro_export]
macro_rules! c_type {
    (u64 $pointer:literal) => {
        $pointer
    };
    (u64) => {
        "unsigned long long"
    };
    (u32) => {
        "unsigned"
    };
    (i32) => {
        "int"
    };
    (f32) => {
        "float"
    };
    (f64) => {
        "double"
    };
    (R) => {
        "REAL"
    };
    ($same:ident) => {
        stringify!($same)
    };
}
pub use c_type;

/// Replaces the type of the arithmetic in `Declared::Any`.
#[doc(hidden)]
#[macro_export]
macro_rules! any {
    ($real:ident) => {
        ()
    };
}
pub use any;
