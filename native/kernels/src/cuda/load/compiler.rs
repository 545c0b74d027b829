//! NVRTC, the run-time compiler for kernels, located and loaded at run time.

use super::find;
use crate::error::{Error, Kind, Result};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

type Program = *mut c_void;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Fill = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// The functions of NVRTC that this module calls.
struct Api {
    version: (u32, u32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    cubin_size: Size,
    cubin: Fill,
    log_size: Size,
    log: Fill,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Keep the code of these functions loaded.
    _libraries: Vec<Library>,
}

/// Major and minor version of NVRTC, or why kernels cannot be compiled. The search runs once.
pub fn compiler() -> Result<(u32, u32)> {
    api().map(|api| api.version)
}

fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| NVRTC.load(load)).as_ref().map_err(Error::clone)
}

const NVRTC: find::Library = find::Library {
    what: "NVRTC, the CUDA run-time compiler",
    name: "nvrtc",
    windows: |major| format!("nvrtc64_{major}0_0.dll"),
    package: "nvidia-cuda-nvrtc",
    variable: "SIDEWINDER_NVRTC",
};

fn load(path: &Path) -> Option<Api> {
    let mut libraries = builtins(path);
    // SAFETY: loading NVRTC runs its initialisers, which is what they are for.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the types are those that nvrtc.h declares, the same in versions 11 to 13.
    let api = unsafe {
        let version = *library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0").ok()?;
        let (mut major, mut minor) = (0, 0);
        version(&mut major, &mut minor);
        Api {
            version: (major as u32, minor as u32),
            create: *library.get(b"nvrtcCreateProgram\0").ok()?,
            compile: *library.get(b"nvrtcCompileProgram\0").ok()?,
            destroy: *library.get(b"nvrtcDestroyProgram\0").ok()?,
            cubin_size: *library.get(b"nvrtcGetCUBINSize\0").ok()?,
            cubin: *library.get(b"nvrtcGetCUBIN\0").ok()?,
            log_size: *library.get(b"nvrtcGetProgramLogSize\0").ok()?,
            log: *library.get(b"nvrtcGetProgramLog\0").ok()?,
            error_text: *library.get(b"nvrtcGetErrorString\0").ok()?,
            _libraries: Vec::new(),
        }
    };
    libraries.push(library);
    Some(Api { _libraries: libraries, ..api })
}

/// Loads NVRTC's builtins. NVRTC asks the loader for them by bare name, and the loader finds a copy beside NVRTC only
/// if it is already in memory.
fn builtins(path: &Path) -> Vec<Library> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = folder.and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so"))
        // SAFETY: a library of data and of functions that NVRTC alone calls.
        .filter_map(|entry| unsafe { Library::new(entry.path()) }.ok())
        .collect()
}

/// Compiles a kernel to machine code for `sm_{major}{minor}`. Errors carry the compiler's log.
pub(in crate::cuda) fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>> {
    let api = api()?;
    let text = |s: &str| CString::new(s).map_err(|_| Error::new(Kind::Cuda, name).got("a zero byte in the source"));
    let (source, file) = (text(source)?, text(&format!("{name}.cu"))?);
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = Open { api, program: null_mut() };
    // SAFETY: all strings end with a zero and outlive the calls; there are no headers.
    unsafe {
        let code =
            (api.create)(&mut program.program, source.as_ptr(), file.as_ptr(), 0, std::ptr::null(), std::ptr::null());
        program.answer(name, code)?;
        program.answer(name, (api.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()))?;
    }
    program.read(api.cubin_size, api.cubin).map_err(|code| program.error(name, code))
}

/// A program, destroyed on drop.
struct Open {
    api: &'static Api,
    program: Program,
}

impl Open {
    fn answer(&self, name: &str, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(name, code)) }
    }

    fn error(&self, name: &str, code: c_int) -> Error {
        // SAFETY: returns a static C string.
        let what = unsafe { CStr::from_ptr((self.api.error_text)(code)) }.to_string_lossy();
        let log = self.read(self.api.log_size, self.api.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
        let (major, minor) = self.api.version;
        Error::new(Kind::Cuda, format!("compiling {name} with NVRTC {major}.{minor}"))
            .got(format_args!("{what}: {log}"))
    }

    fn read(&self, size: Size, fill: Fill) -> std::result::Result<Vec<u8>, c_int> {
        let mut bytes = 0;
        // SAFETY: writes one size.
        let code = unsafe { size(self.program, &mut bytes) };
        let mut content = vec![0; bytes];
        // SAFETY: writes `bytes` bytes, the size just asked for.
        match if code == 0 { unsafe { fill(self.program, content.as_mut_ptr().cast()) } } else { code } {
            0 => Ok(content),
            code => Err(code),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created once and destroyed once.
            unsafe { (self.api.destroy)(&mut self.program) };
        }
    }
}
