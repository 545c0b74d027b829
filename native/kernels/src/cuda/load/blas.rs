//! cuBLASLt, located and loaded at run time: matrix products with an optional fused epilogue.

use super::find;
use crate::base::activation::Activation;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Fused, cublasLtMatmulAlgo_t as Algo,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreferenceAttributes_t as Wish,
    cublasLtReductionScheme_t as Reduction, cudaDataType as Type,
};
use libloading::Library;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

type Pointer = *mut c_void;
type Destroy = unsafe extern "C" fn(Pointer) -> c_int;
type Set<A> = unsafe extern "C" fn(Pointer, A, *const c_void, usize) -> c_int;

/// The functions of cuBLASLt that this module calls.
struct Api {
    create: unsafe extern "C" fn(*mut Pointer) -> c_int,
    destroy: Destroy,
    create_operation: unsafe extern "C" fn(*mut Pointer, Compute, Type) -> c_int,
    destroy_operation: Destroy,
    set_operation: Set<Attribute>,
    create_layout: unsafe extern "C" fn(*mut Pointer, Type, u64, u64, i64) -> c_int,
    destroy_layout: Destroy,
    create_wishes: unsafe extern "C" fn(*mut Pointer) -> c_int,
    destroy_wishes: Destroy,
    set_wishes: Set<Wish>,
    /// Handle, operation, four layouts, preferences, requested count, output array, returned count.
    propose: unsafe extern "C" fn(
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        Pointer,
        c_int,
        *mut Proposal,
        *mut c_int,
    ) -> c_int,
    /// Handle, operation, alpha, a, b, beta, c and d (each matrix followed by its layout), algorithm, workspace, its
    /// bytes, stream.
    multiply: unsafe extern "C" fn(
        Pointer,
        Pointer,
        *const c_void,
        u64,
        Pointer,
        u64,
        Pointer,
        *const c_void,
        u64,
        Pointer,
        u64,
        Pointer,
        *const Algo,
        u64,
        usize,
        Pointer,
    ) -> c_int,
    /// Keeps the code of these functions loaded.
    _library: Library,
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| CUBLASLT.load(load)).as_ref().map_err(Error::clone)
}

const CUBLASLT: find::Library = find::Library {
    what: "cuBLASLt",
    name: "cublasLt",
    windows: |major| format!("cublasLt64_{major}.dll"),
    package: "nvidia-cublas",
    variable: "SIDEWINDER_CUBLASLT",
};

fn load(path: &Path) -> Option<Api> {
    // SAFETY: loading cuBLASLt runs its initialisers, which is what they are for.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the types are those that cublasLt.h declares, the same in versions 12 and 13.
    unsafe {
        Some(Api {
            create: *library.get(b"cublasLtCreate\0").ok()?,
            destroy: *library.get(b"cublasLtDestroy\0").ok()?,
            create_operation: *library.get(b"cublasLtMatmulDescCreate\0").ok()?,
            destroy_operation: *library.get(b"cublasLtMatmulDescDestroy\0").ok()?,
            set_operation: *library.get(b"cublasLtMatmulDescSetAttribute\0").ok()?,
            create_layout: *library.get(b"cublasLtMatrixLayoutCreate\0").ok()?,
            destroy_layout: *library.get(b"cublasLtMatrixLayoutDestroy\0").ok()?,
            create_wishes: *library.get(b"cublasLtMatmulPreferenceCreate\0").ok()?,
            destroy_wishes: *library.get(b"cublasLtMatmulPreferenceDestroy\0").ok()?,
            set_wishes: *library.get(b"cublasLtMatmulPreferenceSetAttribute\0").ok()?,
            propose: *library.get(b"cublasLtMatmulAlgoGetHeuristic\0").ok()?,
            multiply: *library.get(b"cublasLtMatmul\0").ok()?,
            _library: library,
        })
    }
}

const SUCCESS: c_int = 0;
const NO_MEMORY: c_int = 3;
const NOT_SUPPORTED: c_int = 15;

fn answer(code: c_int, what: &str) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        NO_MEMORY => Err(Error::new(Kind::Memory, what).got("no memory for its own use")),
        _ => Err(Error::new(Kind::Cuda, what).got(format_args!("cuBLASLt status {code}"))),
    }
}

/// A library object and the function that destroys it.
struct Made {
    it: Pointer,
    destroy: Destroy,
}

impl Made {
    fn new(what: &str, destroy: Destroy, create: impl FnOnce(*mut Pointer) -> c_int) -> Result<Made> {
        let mut it = null_mut();
        answer(create(&mut it), what)?;
        Ok(Made { it, destroy })
    }

    /// Sets an attribute of the type `V`.
    fn set<A, V>(&self, set: Set<A>, which: A, value: V) -> Result<()> {
        // SAFETY: the library copies the value.
        answer(unsafe { set(self.it, which, (&raw const value).cast(), size_of::<V>()) }, "cublasLt...SetAttribute")
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once, by the function that belongs to it.
        unsafe { (self.destroy)(self.it) };
    }
}

// SAFETY: the library's objects may be used from any thread, by one thread at a time.
unsafe impl Send for Made {}

/// A row-major matrix on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Its address, as returned by [`Lane::address`](crate::cuda::Lane::address).
    pub address: u64,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
    /// Elements from the start of one row to the start of the next.
    pub stride: usize,
    /// Whether the product takes the transpose.
    pub transposed: bool,
}

impl Matrix {
    /// A contiguous matrix, not transposed.
    pub fn new(address: u64, rows: usize, columns: usize) -> Matrix {
        Matrix { address, rows, columns, stride: columns, transposed: false }
    }

    /// A range of columns of a matrix of `dtype` that is not transposed, in the same memory.
    pub fn part(self, columns: Range<usize>, dtype: DType) -> Matrix {
        let address = self.address + (columns.start * dtype.size()) as u64;
        Matrix { address, columns: columns.len(), ..self }
    }

    /// The transpose, in the same memory: only the flag changes.
    pub fn transposed(self) -> Matrix {
        Matrix { transposed: !self.transposed, ..self }
    }

    /// The library's layout. cuBLASLt is column-major, so it sees the transpose.
    fn layout(&self, dtype: DType, api: &Api) -> Result<Made> {
        let (rows, columns) = (self.columns as u64, self.rows as u64);
        // SAFETY: writes one pointer.
        let create = |to| unsafe { (api.create_layout)(to, types(dtype).0, rows, columns, self.stride as i64) };
        Made::new("cublasLtMatrixLayoutCreate", api.destroy_layout, create)
    }
}

/// The epilogue of a product, before sums are rounded; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Address of a vector of the result's type that is added to each row.
    pub bias: Option<u64>,
    /// The function applied after the bias.
    pub activation: Option<Activation>,
    /// Whether the sums are added to the previous contents of the result.
    pub add: bool,
}

/// A product: the type of its factors and of its result, then both factors and the result.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct Product {
    pub types: [DType; 2],
    pub matrices: [Matrix; 3],
    pub epilogue: Epilogue,
    /// Whether factors in f32 may be rounded to TF32.
    pub tf32: bool,
}

impl Product {
    /// The product with each address replaced by the lowest one of equal alignment: the key under which plans are
    /// cached.
    fn kind(self) -> Product {
        let lowest = |address| u64::from(alignment(address));
        Product {
            matrices: self.matrices.map(|matrix| Matrix { address: lowest(matrix.address), ..matrix }),
            epilogue: Epilogue { bias: self.epilogue.bias.map(lowest), ..self.epilogue },
            ..self
        }
    }

    /// The library's name for this epilogue, if it has one.
    ///
    /// Its GELU was up to 5.5e-6 off (cuBLASLt 13.1, H200). The rounding of a bf16 result exceeds that error where the
    /// result is above 0.0014, so for x above -3.4; that of an f16 only above 0.011, that of an f32 nowhere. Both
    /// functions keep NaN.
    fn fused(&self) -> Option<Fused> {
        if self.epilogue != (Epilogue { add: self.epilogue.add, ..Epilogue::default() }) && !self.fits_vectors() {
            return None;
        }
        Some(match (self.epilogue.activation, self.epilogue.bias, self.types[1]) {
            (None, None, _) => Fused::CUBLASLT_EPILOGUE_DEFAULT,
            (None, Some(_), _) => Fused::CUBLASLT_EPILOGUE_BIAS,
            (Some(Activation::Relu), None, _) => Fused::CUBLASLT_EPILOGUE_RELU,
            (Some(Activation::Relu), Some(_), _) => Fused::CUBLASLT_EPILOGUE_RELU_BIAS,
            (Some(Activation::GeluTanh), None, DType::Bf16) => Fused::CUBLASLT_EPILOGUE_GELU,
            (Some(Activation::GeluTanh), Some(_), DType::Bf16) => Fused::CUBLASLT_EPILOGUE_GELU_BIAS,
            _ => return None,
        })
    }

    /// Whether all rows and the bias are aligned to vectors of 16 bytes. Without that, the library refused some
    /// epilogues only at launch, and bf16 results were off as if rounded before the bias was added.
    fn fits_vectors(&self) -> bool {
        let ([factor, result], [a, b, to]) = (self.types, self.matrices);
        let fits = |matrix: Matrix, dtype: DType| {
            alignment(matrix.address) >= 16 && (matrix.stride * dtype.size()).is_multiple_of(16)
        };
        let bias = self.epilogue.bias.is_none_or(|bias| alignment(bias) >= 16);
        bias && fits(a, factor) && fits(b, factor) && fits(to, result)
    }

    /// The operation descriptor. The library takes the transposed factors in reverse order: to^T = b^T a^T.
    fn operation(&self, fused: Fused, api: &Api) -> Result<Made> {
        let ((scale, exact), [a, b, _]) = (types(self.types[0].wide()), self.matrices);
        let sum = match self.types[0] {
            DType::F32 if self.tf32 => Compute::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => exact,
        };
        // SAFETY: writes one pointer.
        let create = |to| unsafe { (api.create_operation)(to, sum, scale) };
        let operation = Made::new("cublasLtMatmulDescCreate", api.destroy_operation, create)?;
        operation.set(api.set_operation, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(b.transposed))?;
        operation.set(api.set_operation, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(a.transposed))?;
        operation.set(api.set_operation, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, fused)?;
        Ok(operation)
    }

    /// The preferences that a proposed algorithm must satisfy.
    fn wishes(&self, api: &Api) -> Result<Made> {
        // SAFETY: writes one pointer.
        let create = |to| unsafe { (api.create_wishes)(to) };
        let wishes = Made::new("cublasLtMatmulPreferenceCreate", api.destroy_wishes, create)?;
        wishes.set(api.set_wishes, Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE)?;
        // Partial sums must not be rounded to 16 bits before they are added.
        let reduction = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        wishes.set(api.set_wishes, Wish::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction)?;
        let [a, b, to] = self.matrices.map(|matrix| alignment(matrix.address));
        let to = self.epilogue.bias.map_or(to, |bias| to.min(alignment(bias)));
        for (wish, bytes) in [
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, to),
            (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, to),
        ] {
            wishes.set(api.set_wishes, wish, bytes)?;
        }
        Ok(wishes)
    }
}

/// The largest power of two that divides an address, capped at 256: more alignment brings nothing.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// Upper limit for an algorithm's workspace, in bytes: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;

/// One proposal of the library, laid out as `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Proposal {
    algo: Algo,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The descriptors and the algorithm of a cached plan.
struct Plan {
    operation: Made,
    /// Layouts of both factors and the result, in the order of `Product::matrices`.
    layouts: [Made; 3],
    algo: Algo,
    workspace: usize,
}

impl Plan {
    /// `None` where the library has no algorithm for it.
    fn new(product: &Product, handle: &Made, api: &Api) -> Result<Option<Plan>> {
        let Some(fused) = product.fused() else { return Ok(None) };
        let (operation, wishes) = (product.operation(fused, api)?, product.wishes(api)?);
        let ([dtype, result], [a, b, to]) = (product.types, product.matrices);
        let layouts = [a.layout(dtype, api)?, b.layout(dtype, api)?, to.layout(result, api)?];
        let [a, b, to] = layouts.each_ref().map(|layout| layout.it);
        let none = Algo { data: [0; 8] };
        let mut best = Proposal { algo: none, workspace: 0, state: SUCCESS, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        // SAFETY: all handles were made above; the call writes at most one proposal, and a count.
        let code = unsafe { (api.propose)(handle.it, operation.it, b, a, to, to, wishes.it, 1, &mut best, &mut count) };
        if code == NOT_SUPPORTED || (code == SUCCESS && (count == 0 || best.state != SUCCESS)) {
            return Ok(None);
        }
        answer(code, "cublasLtMatmulAlgoGetHeuristic")?;
        Ok(Some(Plan { operation, layouts, algo: best.algo, workspace: best.workspace }))
    }
}

/// Limit for the number of cached plans. A query to the library takes tens of microseconds.
const KEPT_PLANS: usize = 1024;

/// The library's handle and the cached plans of one lane.
pub(in crate::cuda) struct Handle {
    plans: HashMap<Product, Option<Plan>>,
    it: Made,
}

impl Handle {
    pub(in crate::cuda) fn new() -> Result<Handle> {
        let api = api()?;
        // SAFETY: writes one pointer.
        let it = Made::new("cublasLtCreate", api.destroy, |to| unsafe { (api.create)(to) })?;
        Ok(Handle { plans: HashMap::new(), it })
    }

    fn plan(&mut self, product: &Product, api: &Api) -> Result<Option<&Plan>> {
        let kind = product.kind();
        if !self.plans.contains_key(&kind) {
            if self.plans.len() == KEPT_PLANS {
                self.plans.clear();
            }
            self.plans.insert(kind, Plan::new(product, &self.it, api)?);
        }
        Ok(self.plans[&kind].as_ref())
    }

    /// Queues a product on a stream of the bound context, where the library can do it. `workspace(bytes)` returns the
    /// address of `bytes` bytes of workspace.
    ///
    /// # Safety
    /// The matrices and the bias are valid at their addresses for work on this stream, and no size is 0.
    pub(in crate::cuda) unsafe fn multiply(
        &mut self,
        product: &Product,
        stream: Pointer,
        workspace: impl FnOnce(usize) -> Result<u64>,
    ) -> Result<bool> {
        let (api, handle) = (api()?, self.it.it);
        let Some(plan) = self.plan(product, api)? else { return Ok(false) };
        if let Some(bias) = product.epilogue.bias {
            plan.operation.set(api.set_operation, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        let [one, zero]: [*const c_void; 2] = match product.types[0] {
            DType::F64 => [(&raw const ONE_F64).cast(), (&raw const ZERO_F64).cast()],
            _ => [(&raw const ONE_F32).cast(), (&raw const ZERO_F32).cast()],
        };
        let before = if product.epilogue.add { one } else { zero };
        let workspace = workspace(plan.workspace)?;
        let ([a, b, to], [of_a, of_b, of_to]) = (product.matrices, plan.layouts.each_ref().map(|layout| layout.it));
        // SAFETY: the caller's promise; the plan was made for matrices like these.
        let code = unsafe {
            (api.multiply)(
                handle,
                plan.operation.it,
                one,
                b.address,
                of_b,
                a.address,
                of_a,
                before,
                to.address,
                of_to,
                to.address,
                of_to,
                &plan.algo,
                workspace,
                plan.workspace,
                stream,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        answer(code, "cublasLtMatmul").map(|()| true)
    }
}

static ONE_F32: f32 = 1.0;
static ZERO_F32: f32 = 0.0;
static ONE_F64: f64 = 1.0;
static ZERO_F64: f64 = 0.0;

/// The library's names for an element type and for accumulation in it.
fn types(dtype: DType) -> (Type, Compute) {
    match dtype {
        DType::F32 => (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F),
        DType::F64 => (Type::CUDA_R_64F, Compute::CUBLAS_COMPUTE_64F),
        DType::F16 => (Type::CUDA_R_16F, Compute::CUBLAS_COMPUTE_32F),
        DType::Bf16 => (Type::CUDA_R_16BF, Compute::CUBLAS_COMPUTE_32F),
        integer => unreachable!("ops check that they compute with floats, not {integer}"),
    }
}
