//! Registration with an XLA that this process has loaded.

use crate::abi::{Api, Handler, HandlerRegister, Span};
use crate::report;
use crate::{GRAPH_TARGET, TARGET, sidewinder_xla_cuda, sidewinder_xla_cuda_graph, sidewinder_xla_host};
#[cfg(unix)]
use libloading::os::unix::Library;
#[cfg(windows)]
use libloading::os::windows::Library;
use sidewinder_kernels::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// XLA's function that returns its FFI table: its C name, and its mangled C++ name.
const ENTRIES: [&[u8]; 2] = [b"XLA_FFI_GetApi\0", b"_ZN3xla3ffi12GetXlaFfiApiEv\0"];

/// The libraries whose XLA the handlers have been registered with.
static DONE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The handlers by target and platform. XLA requests their traits from the handlers themselves.
const HANDLERS: [(&str, &str, Handler); 3] = [
    (TARGET, "Host", sidewinder_xla_host),
    (TARGET, "CUDA", sidewinder_xla_cuda),
    (GRAPH_TARGET, "CUDA", sidewinder_xla_cuda_graph),
];
/// The platforms that have handlers.
const PLATFORMS: [&str; 2] = ["Host", "CUDA"];

/// Registers the handlers with the XLA in the library at this path, or in one of its dependencies, unless that was done
/// before; returns their platforms. The library must be loaded already, and is never unloaded. Neither may the library
/// of this code be unloaded: XLA holds pointers into it.
pub fn register(library: &Path) -> Result<Vec<&'static str>> {
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !done.iter().any(|path| path == library) {
        let api = api(library)?;
        HANDLERS.iter().try_for_each(|(target, platform, handle)| handler(api, target, platform, *handle))?;
        done.push(library.to_path_buf());
    }
    Ok(PLATFORMS.to_vec())
}

fn api(path: &Path) -> Result<&'static Api> {
    let wrong = |expected: &str, got: String| {
        Error::new(Kind::Unavailable, path.display().to_string()).expected(expected).got(got)
    };
    let library = loaded(path).map_err(|e| wrong("a library that is loaded", e.to_string()))?;
    let entry = ENTRIES.iter().find_map(|&name| {
        // SAFETY: the symbol of this name is this function.
        unsafe { library.get::<unsafe extern "C" fn() -> *const Api>(name) }.ok().map(|entry| *entry)
    });
    let entry = entry.ok_or_else(|| wrong("XLA's FFI, `XLA_FFI_GetApi`", "no such symbol".to_string()))?;
    // Never unloads the library, because it holds pointers to the handlers.
    std::mem::forget(library);
    // SAFETY: XLA's own function, which returns null or a table that lives as long as the library.
    unsafe { entry().as_ref() }.ok_or_else(|| wrong("XLA's FFI", "null".to_string()))
}

#[cfg(unix)]
fn loaded(path: &Path) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: opening a library that is loaded already runs no code.
    unsafe { Library::open(Some(path), libc::RTLD_NOW | libc::RTLD_NOLOAD) }
}

#[cfg(windows)]
fn loaded(path: &Path) -> std::result::Result<Library, libloading::Error> {
    Library::open_already_loaded(path)
}

fn handler(api: &Api, target: &str, platform: &str, handler: Handler) -> Result<()> {
    let span = |text: &str| Span { start: text.as_ptr(), length: text.len() };
    let mut asked = HandlerRegister {
        size: size_of::<HandlerRegister>(),
        extension: null_mut(),
        name: span(target),
        platform: span(platform),
        earlier_stages: [None; 3],
        execute: Some(handler),
        traits: 0,
    };
    // SAFETY: XLA's own function, which copies the names.
    let error = unsafe { (api.handler_register)(&mut asked) };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the error was created by this table's XLA.
    let got = unsafe { report::text(api, error) };
    Err(Error::new(Kind::Unavailable, "XLA").expected(format!("a handler for {platform} to be taken")).got(got))
}
