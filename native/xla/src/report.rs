//! Answers to XLA: metadata, results, and errors with our text, also for panics.

use crate::abi::{self, Api, CallFrame, EXECUTE, METADATA, MetadataExtension};
use crate::frame::Frame;
use sidewinder_kernels::error::{Error, Kind, Result};
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// The version to report if XLA does not tell its own.
const OLDEST: (i32, i32) = (0, 1);

/// Runs a call, or answers a request that XLA makes in place of one.
///
/// # Safety
/// The frame is null or one of XLA's.
pub unsafe fn answer(
    frame: *mut CallFrame,
    traits: u32,
    work: impl FnOnce(&Frame<'_>) -> Result<()>,
) -> *mut abi::Error {
    // SAFETY: the caller's promise.
    let Some(frame) = (unsafe { frame.as_ref() }) else { return null_mut() };
    // SAFETY: as above.
    if unsafe { tell_metadata(frame, traits) } || frame.stage != EXECUTE {
        return null_mut();
    }
    // SAFETY: as above.
    let worked = || unsafe { Frame::new(frame) }.and_then(|frame| work(&frame));
    let done = catch_unwind(AssertUnwindSafe(worked)).unwrap_or_else(|payload| Err(Error::panicked(&*payload, "")));
    // SAFETY: as above.
    done.map_or_else(|error| unsafe { create(frame.api, &error) }, |()| null_mut())
}

/// Answers a request for metadata; returns false if the frame is none.
unsafe fn tell_metadata(frame: &CallFrame, traits: u32) -> bool {
    // SAFETY: an extension of this kind is a `MetadataExtension`; XLA's table begins with its version.
    unsafe {
        let Some(extension) = frame.extension.as_ref().filter(|extension| extension.kind == METADATA) else {
            return false;
        };
        let question = &*(&raw const *extension).cast::<MetadataExtension>();
        let Some(metadata) = question.metadata.as_mut() else { return true };
        let theirs = frame.api.as_ref().map(|api| (api.version.major, api.version.minor));
        (metadata.version.major, metadata.version.minor) = theirs.unwrap_or(OLDEST);
        metadata.traits = traits;
    }
    true
}

/// Creates an XLA error with our text.
unsafe fn create(api: *const Api, error: &Error) -> *mut abi::Error {
    // SAFETY: the caller's promise. Without a table no error can be created, and no call was possible.
    let Some(api) = (unsafe { api.as_ref() }) else { return null_mut() };
    let text: Vec<u8> = error.to_string().bytes().filter(|&byte| byte != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    let mut made = abi::ErrorCreate {
        size: size_of::<abi::ErrorCreate>(),
        extension: null_mut(),
        message: text.as_ptr(),
        code: code(error.kind),
    };
    // SAFETY: XLA's own function, which copies the text.
    unsafe { (api.error_create)(&mut made) }
}

/// The most specific code of `absl::Status` for an error.
fn code(kind: Kind) -> i32 {
    match kind {
        Kind::Cancelled => 1,
        Kind::Shape | Kind::DType | Kind::Size | Kind::Argument | Kind::Option => 3,
        Kind::File => 5,
        Kind::Memory => 8,
        Kind::Unavailable => 9,
        Kind::Cuda | Kind::Panic => 13,
        Kind::DeviceLost => 14,
    }
}

/// Returns the text of an XLA error, and frees the error.
///
/// # Safety
/// The error was created by this table's XLA.
pub unsafe fn text(api: &Api, error: *mut abi::Error) -> String {
    let mut asked = abi::ErrorMessage {
        size: size_of::<abi::ErrorMessage>(),
        extension: null_mut(),
        error,
        message: std::ptr::null(),
    };
    let mut freed = abi::ErrorDestroy { size: size_of::<abi::ErrorDestroy>(), extension: null_mut(), error };
    // SAFETY: the caller's promise; the text lives until the error is freed.
    unsafe {
        (api.error_message)(&mut asked);
        let text = match asked.message.is_null() {
            true => String::new(),
            false => CStr::from_ptr(asked.message).to_string_lossy().into_owned(),
        };
        (api.error_destroy)(&mut freed);
        text
    }
}
