//! Kernels: compiled on first use, cached in memory per device and on disk per user.

use super::device::Device;
use super::params::Declared;
use crate::cuda::load::{cache, compiler};
use crate::error::{Error, Kind, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

/// Element types, rounding and functions, included before every kernel source.
pub const PRELUDE: &str = include_str!("../include/prelude.cu");
/// Waits of kernels that begin early (see [`Kernel::early`]).
pub const EARLY: &str = include_str!("../include/early.cu");
/// Vectors of `VEC` elements.
pub const PACK: &str = include_str!("../include/pack.cu");
/// The sum over a block of `THREADS` threads.
pub const BLOCK_SUM: &str = include_str!("../include/block_sum.cu");

/// The source of one kernel, which takes a `P`.
#[derive(Clone, Copy)]
pub struct Source<P> {
    /// The name of the `extern "C"` function.
    pub name: &'static str,
    included: &'static [&'static str],
    text: &'static str,
    structs: Structs,
    params: PhantomData<fn(P)>,
}

/// The CUDA declarations of the structs that a text needs, and of the one that its kernel takes.
#[derive(Clone, Copy)]
struct Structs(&'static [&'static str], &'static str);

impl<P: Declared> Source<P> {
    /// The kernel `name` of a text that comes after [`PRELUDE`] and the declaration of `P`.
    pub const fn new(name: &'static str, text: &'static str) -> Source<P> {
        Source { name, included: &[], text, structs: Structs(P::NEEDED, P::TEXT), params: PhantomData }
    }
}

impl<P> Source<P> {
    /// Includes texts that the kernel needs, such as [`EARLY`], before its own.
    pub const fn after(self, included: &'static [&'static str]) -> Source<P> {
        Source { included, ..self }
    }

    /// The whole text to compile.
    fn whole(&self) -> String {
        [PRELUDE, "\n", &self.structs.0.concat(), self.structs.1, &self.included.concat(), self.text].concat()
    }
}

/// A kernel loaded on a device, which takes a `P`. Never unloaded: there are few, and they are small.
#[derive(Clone, Copy)]
pub struct Kernel<P> {
    function: Function,
    early: bool,
    params: PhantomData<fn(P)>,
}

/// A function of a loaded module.
#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: functions of a loaded module may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: functions of a loaded module may be launched from any thread.
unsafe impl Sync for Function {}

impl<P> Kernel<P> {
    pub(in crate::cuda) fn function(&self) -> sys::CUfunction {
        self.function.0
    }

    /// The kernel for launches that may begin before a preceding early kernel is done (programmatic dependent launch).
    /// After any other kernel, and on devices without this feature, it begins when all earlier work is done. So work
    /// queued before a run of early kernels is done when the first of them begins.
    ///
    /// # Safety
    /// The kernel runs `griddepcontrol.wait` before it accesses memory that other kernels write. Weights, which no
    /// early kernel writes, it may read at once.
    pub unsafe fn early(self) -> Kernel<P> {
        Kernel { early: true, ..self }
    }

    pub(in crate::cuda) fn is_early(&self) -> bool {
        self.early
    }
}

/// Locked during compilation, so that concurrent calls wait. After a failure the next call tries again.
type Slot = Arc<Mutex<Option<Function>>>;

/// Identifies a source: the addresses of its text and of its parameters' declaration, which are constants, and its
/// name.
type Key = (*const u8, *const u8, &'static str);

/// The kernels of one device by source and options.
#[derive(Default)]
pub(in crate::cuda) struct Loaded(Mutex<HashMap<Key, Variants>>);

type Variants = HashMap<String, Slot>;

// SAFETY: the addresses are only compared.
unsafe impl Send for Loaded {}
// SAFETY: the addresses are only compared.
unsafe impl Sync for Loaded {}

impl Loaded {
    pub(in crate::cuda) fn get<P>(&self, device: &Device, source: &Source<P>, options: &str) -> Result<Kernel<P>> {
        let slot = self.slot(source, options);
        let mut loaded = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match *loaded {
            Some(function) => function,
            None => *loaded.insert(prepare(device, source.name, &source.whole(), options)?),
        };
        Ok(Kernel { function, early: false, params: PhantomData })
    }

    fn slot<P>(&self, source: &Source<P>, options: &str) -> Slot {
        let mut kernels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let variants = kernels.entry((source.text.as_ptr(), source.structs.1.as_ptr(), source.name)).or_default();
        if let Some(slot) = variants.get(options) {
            return slot.clone();
        }
        variants.entry(options.to_string()).or_default().clone()
    }
}

fn prepare(device: &Device, name: &str, text: &str, options: &str) -> Result<Function> {
    let compiler = compiler::compiler()?;
    let version = format!("NVRTC {}.{}", compiler.0, compiler.1);
    let target = format!("--gpu-architecture={}", target(device.facts().capability, compiler));
    let parts = [name, text, options, &target, &version];
    if let Some(function) = cache::load(&parts).and_then(|code| load(device, name, &code).ok()) {
        return Ok(function);
    }
    let mut arguments = vec![target.clone(), "-std=c++17".to_string()];
    arguments.extend(options.split_whitespace().map(str::to_string));
    let code = compiler::compile(name, text, &arguments)?;
    let function = load(device, name, &code)?;
    cache::store(&parts, &code);
    Ok(function)
}

/// The compiler's target for a device: the architecture-specific one (`a`) where the compiler supports it.
fn target((major, minor): (u32, u32), compiler: (u32, u32)) -> String {
    let all = if major == 9 && compiler.0 >= 12 { "a" } else { "" };
    format!("sm_{major}{minor}{all}")
}

fn load(device: &Device, name: &str, code: &[u8]) -> Result<Function> {
    device.bind()?;
    let name = CString::new(name).map_err(|_| Error::new(Kind::Cuda, "kernel").got("a zero byte in its name"))?;
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the code is a whole CUBIN image, which carries its own length; each call writes one handle.
    unsafe {
        device.answer(sys::cuModuleLoadData(&mut module, code.as_ptr().cast()), "cuModuleLoadData")?;
        device.answer(sys::cuModuleGetFunction(&mut function, module, name.as_ptr()), "cuModuleGetFunction")?;
    }
    allow_shared_memory(device, function)?;
    Ok(Function(function))
}

/// Lets launches use all shared memory that the kernel does not declare. The default limit is 48 KiB.
fn allow_shared_memory(device: &Device, function: sys::CUfunction) -> Result<()> {
    use sys::CUfunction_attribute as Attribute;
    let mut declared = 0;
    // SAFETY: reads and sets a number of a loaded kernel.
    unsafe {
        let which = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        device.answer(sys::cuFuncGetAttribute(&mut declared, which, function), "cuFuncGetAttribute")?;
        let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let left = device.facts().shared as i32 - declared;
        device.answer(sys::cuFuncSetAttribute(function, which, left), "cuFuncSetAttribute")
    }
}
