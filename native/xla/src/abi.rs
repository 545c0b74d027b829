//! XLA's FFI in C, as far as handlers need it: `xla/ffi/api/c_api.h`, versions 0.1 to 0.3.
//!
//! Structs begin with their size up to the end of their last field, so that either side may have newer, larger ones.
//! Handlers use only the common part of these versions.

use std::ffi::{c_char, c_void};

/// An optional extension of a struct, such as a request for metadata.
#[repr(C)]
pub struct Extension {
    /// Bytes of the struct.
    pub size: usize,
    /// The kind of extension, such as [`METADATA`].
    pub kind: i32,
    /// The next extension, or null.
    pub next: *mut Extension,
}

/// The extension by which XLA requests a handler's version before it registers the handler.
pub const METADATA: i32 = 1;

/// A request for metadata.
#[repr(C)]
pub struct MetadataExtension {
    /// The common part of all extensions.
    pub base: Extension,
    /// The memory for the answer.
    pub metadata: *mut Metadata,
}

/// A handler's metadata. Newer versions have more fields, which a handler without state need not fill.
#[repr(C)]
pub struct Metadata {
    /// Bytes of the struct.
    pub size: usize,
    /// The version for which the handler was written.
    pub version: Version,
    /// Bits such as [`COMMAND_BUFFER_COMPATIBLE`].
    pub traits: u32,
}

/// Calls may be traced into a command buffer, which replays the same device operations.
pub const COMMAND_BUFFER_COMPATIBLE: u32 = 1;

/// A version of the interface.
#[repr(C)]
pub struct Version {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// 0 so far.
    pub major: i32,
    /// 1 to 3 so far.
    pub minor: i32,
}

/// An error; XLA allocates and frees it.
#[repr(C)]
pub struct Error {
    _opaque: [u8; 0],
}

/// Arguments for creating an error.
#[repr(C)]
pub struct ErrorCreate {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// Text that ends with a zero byte.
    pub message: *const c_char,
    /// One of the codes of `absl::Status`.
    pub code: i32,
}

/// Arguments for reading an error's message.
#[repr(C)]
pub struct ErrorMessage {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// The error.
    pub error: *mut Error,
    /// Its text, valid for the lifetime of the error.
    pub message: *const c_char,
}

/// Arguments for destroying an error.
#[repr(C)]
pub struct ErrorDestroy {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// The error.
    pub error: *mut Error,
}

/// Text with a length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Span {
    /// Its first byte.
    pub start: *const u8,
    /// Length in bytes.
    pub length: usize,
}

/// Arguments for registering a handler.
#[repr(C)]
pub struct HandlerRegister {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// The target of the custom call.
    pub name: Span,
    /// `Host` or `CUDA`.
    pub platform: Span,
    /// Handlers for the stages before execution; none.
    pub earlier_stages: [Option<Handler>; 3],
    /// The handler.
    pub execute: Option<Handler>,
    /// Bits such as [`COMMAND_BUFFER_COMPATIBLE`].
    pub traits: u32,
}

/// Arguments for reading the call's stream.
#[repr(C)]
pub struct StreamGet {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// The call's context.
    pub context: *mut c_void,
    /// A `CUstream`.
    pub stream: *mut c_void,
}

/// A handler; returns null, or an error that XLA frees.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut Error;

/// XLA's table of functions, of which these are the first ones.
#[repr(C)]
pub struct Api {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// XLA's version.
    pub version: Version,
    /// Reserved for XLA itself.
    pub internal: *const c_void,
    /// Makes an error.
    pub error_create: unsafe extern "C" fn(*mut ErrorCreate) -> *mut Error,
    /// Reads an error's text.
    pub error_message: unsafe extern "C" fn(*mut ErrorMessage),
    /// Frees an error.
    pub error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    /// Registers a handler.
    pub handler_register: unsafe extern "C" fn(*mut HandlerRegister) -> *mut Error,
    /// Reads the stream of a call.
    pub stream_get: Option<unsafe extern "C" fn(*mut StreamGet) -> *mut Error>,
}

/// A tensor of a call, in row-major order.
#[repr(C)]
pub struct Buffer {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// Its elements, on the host or on a device; may be null if there are none.
    pub data: *mut c_void,
    /// The number of axes.
    pub rank: i64,
    /// The sizes of the axes.
    pub dims: *const i64,
}

/// Operands or results of a call.
#[repr(C)]
pub struct Buffers {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// Their number.
    pub count: i64,
    /// Their kinds: [`BUFFER`].
    pub kinds: *const i32,
    /// The operands or results.
    pub items: *const *const Buffer,
}

/// The kind of an operand or result that is a buffer; there are no others.
pub const BUFFER: i32 = 1;

/// Attributes of a call, sorted by name.
#[repr(C)]
pub struct Attributes {
    /// Bytes of the struct.
    pub size: usize,
    /// Null.
    pub extension: *mut Extension,
    /// Their number.
    pub count: i64,
    /// Their kinds: [`ARRAY`], [`SCALAR`] or [`STRING`].
    pub kinds: *const i32,
    /// Their names.
    pub names: *const *const Span,
    /// Their values: an [`Array`], [`Scalar`] or [`Span`] each.
    pub items: *const *const c_void,
}

/// An attribute that is an [`Array`].
pub const ARRAY: i32 = 1;
/// An attribute that is a [`Scalar`].
pub const SCALAR: i32 = 3;
/// An attribute that is a [`Span`].
pub const STRING: i32 = 4;

/// A number or boolean.
#[repr(C)]
pub struct Scalar {
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// The value.
    pub value: *const c_void,
}

/// An array of numbers.
#[repr(C)]
pub struct Array {
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// The number of values.
    pub count: usize,
    /// The values.
    pub values: *const c_void,
}

/// The call frame of a handler.
#[repr(C)]
pub struct CallFrame {
    /// Bytes of the struct.
    pub size: usize,
    /// A request for metadata, which then takes the place of a call.
    pub extension: *mut Extension,
    /// XLA's functions.
    pub api: *const Api,
    /// The call's context, an argument of these functions.
    pub context: *mut c_void,
    /// The stage: [`EXECUTE`].
    pub stage: i32,
    /// The operands.
    pub operands: Buffers,
    /// The results, whose memory the handler writes.
    pub results: Buffers,
    /// The attributes.
    pub attributes: Attributes,
}

/// The stage in which a call is executed.
pub const EXECUTE: i32 = 3;
