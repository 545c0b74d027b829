//! cuBLAS, found and loaded by ourselves: matrix products on a lane.

use super::find;
use super::lane::Lane;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

type Gemm = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    u64,
    c_int,
    c_int,
    u64,
    c_int,
    c_int,
    *const c_void,
    u64,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The functions of the library that we call.
struct Api {
    create: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    set_stream: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    set_math_mode: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    gemm: Gemm,
    /// Keeps the code of the functions above in memory.
    _library: Library,
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| CUBLAS.load(load)).as_ref().map_err(Error::clone)
}

const CUBLAS: find::Library = find::Library {
    what: "cuBLAS",
    name: "cublas",
    windows: |major| format!("cublas64_{major}.dll"),
    package: "nvidia-cublas",
    variable: "SIDEWINDER_CUBLAS",
};

fn load(path: &Path) -> Option<Api> {
    // SAFETY: loading cuBLAS runs its initialisers, which is what they are for.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the types are those that cublas_api.h declares, the same in versions 11 to 13.
    unsafe {
        Some(Api {
            create: *library.get(b"cublasCreate_v2\0").ok()?,
            destroy: *library.get(b"cublasDestroy_v2\0").ok()?,
            set_stream: *library.get(b"cublasSetStream_v2\0").ok()?,
            set_math_mode: *library.get(b"cublasSetMathMode\0").ok()?,
            gemm: *library.get(b"cublasGemmEx\0").ok()?,
            _library: library,
        })
    }
}

fn answer(code: c_int, what: &str) -> Result<()> {
    const NO_MEMORY: c_int = 3;
    match code {
        0 => Ok(()),
        NO_MEMORY => Err(Error::new(Kind::Memory, what).got("no memory for its workspace")),
        _ => Err(Error::new(Kind::Cuda, what).got(format_args!("cuBLAS status {code}"))),
    }
}

/// The library's state for one stream. Its workspace is that stream's alone, which makes results repeat
/// to the bit.
pub(super) struct Handle(*mut c_void);

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Handle {}

impl Handle {
    /// For work on a stream of the bound context.
    pub(super) fn new(stream: *mut c_void) -> Result<Handle> {
        // 16-bit products are not added up in 16 bits, and f32 is not rounded to TF32.
        const ACCUMULATE_WIDE: c_int = 16;
        let api = api()?;
        let mut handle = Handle(std::ptr::null_mut());
        // SAFETY: writes one handle, which the other calls are given.
        unsafe {
            answer((api.create)(&mut handle.0), "cublasCreate")?;
            answer((api.set_stream)(handle.0, stream), "cublasSetStream")?;
            answer((api.set_math_mode)(handle.0, ACCUMULATE_WIDE), "cublasSetMathMode")?;
        }
        Ok(handle)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let (false, Ok(api)) = (self.0.is_null(), api()) {
            // SAFETY: created once and destroyed once.
            unsafe { (api.destroy)(self.0) };
        }
    }
}

/// A row-major matrix on a device.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Where it lies, as [`Lane::address`] says.
    pub address: u64,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
    /// Whether it is used with rows and columns changed.
    pub transposed: bool,
}

impl Matrix {
    /// A matrix as it lies.
    pub fn new(address: u64, rows: usize, columns: usize) -> Matrix {
        Matrix { address, rows, columns, transposed: false }
    }

    /// The same with rows and columns changed.
    pub fn transposed(self) -> Matrix {
        Matrix { transposed: !self.transposed, ..self }
    }

    fn sizes(&self) -> [usize; 2] {
        if self.transposed { [self.columns, self.rows] } else { [self.rows, self.columns] }
    }
}

/// Queues `to = a b` for matrices of the first type and a result of the second, with sums in f32 (f64).
///
/// # Safety
/// The matrices lie where they say, at addresses of this lane, and no inner size is 0.
pub(super) unsafe fn multiply(
    lane: &Lane,
    handle: &Handle,
    [dtype, result]: [DType; 2],
    [a, b, to]: [Matrix; 3],
) -> Result<()> {
    let ([m, k], [_, n]) = (a.sizes(), b.sizes());
    let size = |size: usize| {
        c_int::try_from(size).map_err(|_| Error::new(Kind::Size, "matrix").expected("sizes below 2^31").got(size))
    };
    let (single, double) = ([1.0f32, 0.0], [1.0f64, 0.0]);
    let scales: [*const c_void; 2] = match dtype {
        DType::F64 => [(&raw const double[0]).cast(), (&raw const double[1]).cast()],
        _ => [(&raw const single[0]).cast(), (&raw const single[1]).cast()],
    };
    let (storage, compute) = types(dtype);
    let transposed = |matrix: Matrix| c_int::from(matrix.transposed);
    let (columns_a, columns_b, columns_to) = (size(a.columns)?, size(b.columns)?, size(to.columns)?);
    // cuBLAS counts by columns: to it a row-major matrix is its transpose, and to^T = b^T a^T.
    // SAFETY: the caller's promise; sizes and leading dimensions are those of the matrices.
    let code = unsafe {
        const BEST: c_int = -1;
        (api()?.gemm)(
            handle.0,
            transposed(b),
            transposed(a),
            size(n)?,
            size(m)?,
            size(k)?,
            scales[0],
            b.address,
            storage,
            columns_b,
            a.address,
            storage,
            columns_a,
            scales[1],
            to.address,
            types(result).0,
            columns_to,
            compute,
            BEST,
        )
    };
    lane.device().check()?;
    answer(code, "cublasGemmEx")
}

/// The library's numbers for a type and for the type of its sums.
fn types(dtype: DType) -> (c_int, c_int) {
    const SUM_F32: c_int = 68;
    const SUM_F64: c_int = 70;
    match dtype {
        DType::F32 => (0, SUM_F32),
        DType::F64 => (1, SUM_F64),
        DType::F16 => (2, SUM_F32),
        DType::Bf16 => (14, SUM_F32),
        DType::U8 => unreachable!("ops check that they compute with floats"),
    }
}
