//! Kernels: compiled on first use, cached in memory per device and on disk per user.

use super::device::Device;
use crate::cuda::load::{cache, compiler};
use crate::error::{Error, Kind, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

/// The element types, rounding and functions that precede every kernel source.
pub const PRELUDE: &str = include_str!("../include/prelude.cu");

/// The source of one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// The name of the `extern "C"` function.
    pub name: &'static str,
    /// Its text, which is appended to [`PRELUDE`].
    pub text: &'static str,
}

/// A kernel loaded on a device. Never unloaded: there are few, and they are small.
#[derive(Clone, Copy)]
pub struct Kernel {
    function: sys::CUfunction,
    early: bool,
}

// SAFETY: functions of a loaded module may be launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: functions of a loaded module may be launched from any thread.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub(in crate::cuda) fn function(&self) -> sys::CUfunction {
        self.function
    }

    /// The kernel for launches that may begin before a preceding early kernel is done. Behind any other kernel, and on
    /// devices without this feature, it begins when all earlier work is done. So work queued before a run of early
    /// kernels is done when the first of them begins.
    ///
    /// # Safety
    /// The kernel runs `griddepcontrol.wait` before it accesses memory that other kernels write. Weights, which no
    /// early kernel writes, it may read at once.
    pub unsafe fn early(self) -> Kernel {
        Kernel { early: true, ..self }
    }

    pub(in crate::cuda) fn is_early(&self) -> bool {
        self.early
    }
}

/// Locked during compilation, so that concurrent calls wait. After a failure the next call tries again.
type Slot = Arc<Mutex<Option<Kernel>>>;

/// Identifies a source: the address of its text, which is a constant, and its name.
type Key = (*const u8, &'static str);

/// The kernels of one device by source and options.
#[derive(Default)]
pub(in crate::cuda) struct Loaded(Mutex<HashMap<Key, Variants>>);

type Variants = HashMap<String, Slot>;

// SAFETY: the addresses are only compared.
unsafe impl Send for Loaded {}
// SAFETY: the addresses are only compared.
unsafe impl Sync for Loaded {}

impl Loaded {
    pub(in crate::cuda) fn get(&self, device: &Device, source: &Source, options: &str) -> Result<Kernel> {
        let slot = self.slot(source, options);
        let mut loaded = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match *loaded {
            Some(kernel) => Ok(kernel),
            None => Ok(*loaded.insert(prepare(device, source, options)?)),
        }
    }

    fn slot(&self, source: &Source, options: &str) -> Slot {
        let mut kernels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let variants = kernels.entry((source.text.as_ptr(), source.name)).or_default();
        if let Some(slot) = variants.get(options) {
            return slot.clone();
        }
        variants.entry(options.to_string()).or_default().clone()
    }
}

fn prepare(device: &Device, source: &Source, options: &str) -> Result<Kernel> {
    let compiler = compiler::compiler()?;
    let version = format!("NVRTC {}.{}", compiler.0, compiler.1);
    let target = format!("--gpu-architecture={}", target(device.facts().capability, compiler));
    let parts = [source.name, PRELUDE, source.text, options, &target, &version];
    if let Some(kernel) = cache::load(&parts).and_then(|code| load(device, source.name, &code).ok()) {
        return Ok(kernel);
    }
    let mut arguments = vec![target.clone(), "-std=c++17".to_string()];
    arguments.extend(options.split_whitespace().map(str::to_string));
    let code = compiler::compile(source.name, &format!("{PRELUDE}\n{}", source.text), &arguments)?;
    let kernel = load(device, source.name, &code)?;
    cache::store(&parts, &code);
    Ok(kernel)
}

/// The compiler's target for a device: the architecture-specific one (`a`) where the compiler supports it.
fn target((major, minor): (u32, u32), compiler: (u32, u32)) -> String {
    let all = if major == 9 && compiler.0 >= 12 { "a" } else { "" };
    format!("sm_{major}{minor}{all}")
}

fn load(device: &Device, name: &str, code: &[u8]) -> Result<Kernel> {
    device.bind()?;
    let name = CString::new(name).map_err(|_| Error::new(Kind::Cuda, "kernel").got("a zero byte in its name"))?;
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the code is a whole CUBIN image, which carries its own length; each call writes one handle.
    unsafe {
        device.answer(sys::cuModuleLoadData(&mut module, code.as_ptr().cast()), "cuModuleLoadData")?;
        device.answer(sys::cuModuleGetFunction(&mut function, module, name.as_ptr()), "cuModuleGetFunction")?;
    }
    allow_shared_memory(device, function)?;
    Ok(Kernel { function, early: false })
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
