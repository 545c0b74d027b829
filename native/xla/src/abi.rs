//! XLA's FFI in C, as far as handlers need it: `xla/ffi/api/c_api.h`, versions 0.1 to 0.3.
//!
//! Structs begin with their size, up to the end of their last field, so that either side may have newer, larger ones.
//! Handlers use only the common part of these versions.

use std::ffi::{c_char, c_void};

/// An optional part of a struct, such as a question for metadata.
#[repr(C)]
pub struct Extension {
    /// Bytes of the struct.
    pub size: usize,
    /// Which extension it is: [`METADATA`].
    pub kind: i32,
    /// The one after it.
    pub next: *mut Extension,
}

/// The extension by which XLA asks a handler for its version before it registers it.
pub const METADATA: i32 = 1;

/// A question for metadata.
#[repr(C)]
pub struct MetadataExtension {
    /// The part that all extensions have.
    pub base: Extension,
    /// Where the answer goes.
    pub metadata: *mut Metadata,
}

/// A handler's metadata. Newer versions add fields that a handler without state leaves alone.
#[repr(C)]
pub struct Metadata {
    /// Bytes of the struct.
    pub size: usize,
    /// The version that the handler was written for.
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
    /// None.
    pub extension: *mut Extension,
    /// 0 so far.
    pub major: i32,
    /// 1 to 3 so far.
    pub minor: i32,
}

/// An error, which XLA makes and frees.
#[repr(C)]
pub struct Error {
    _opaque: [u8; 0],
}

/// Arguments of the creation of an error.
#[repr(C)]
pub struct ErrorCreate {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// Text that ends with a zero byte.
    pub message: *const c_char,
    /// One of the codes of `absl::Status`.
    pub code: i32,
}

/// Arguments of the query of an error's message.
#[repr(C)]
pub struct ErrorMessage {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// The error.
    pub error: *mut Error,
    /// Its text, which lives as long as the error.
    pub message: *const c_char,
}

/// Arguments of the destruction of an error.
#[repr(C)]
pub struct ErrorDestroy {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// The error.
    pub error: *mut Error,
}

/// Text of a length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Span {
    /// Its first byte.
    pub start: *const u8,
    /// How many bytes it has.
    pub length: usize,
}

/// Arguments of the registration of a handler.
#[repr(C)]
pub struct HandlerRegister {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// The target of the custom call.
    pub name: Span,
    /// `Host` or `CUDA`.
    pub platform: Span,
    /// Handlers of the stages before the execution; none.
    pub earlier_stages: [Option<Handler>; 3],
    /// The handler.
    pub execute: Option<Handler>,
    /// Bits such as [`COMMAND_BUFFER_COMPATIBLE`].
    pub traits: u32,
}

/// Arguments of the query of XLA's stream.
#[repr(C)]
pub struct StreamGet {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// The call's context.
    pub context: *mut c_void,
    /// A `CUstream`.
    pub stream: *mut c_void,
}

/// A handler: null, or an error that XLA frees.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut Error;

/// XLA's functions. There are more after these.
#[repr(C)]
pub struct Api {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// XLA's version.
    pub version: Version,
    /// Not for handlers.
    pub internal: *const c_void,
    /// Makes an error.
    pub error_create: unsafe extern "C" fn(*mut ErrorCreate) -> *mut Error,
    /// Tells the text of one.
    pub error_message: unsafe extern "C" fn(*mut ErrorMessage),
    /// Frees one.
    pub error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    /// Registers a handler.
    pub handler_register: unsafe extern "C" fn(*mut HandlerRegister) -> *mut Error,
    /// Tells the stream of a call.
    pub stream_get: Option<unsafe extern "C" fn(*mut StreamGet) -> *mut Error>,
}

/// A tensor of a call, row-major.
#[repr(C)]
pub struct Buffer {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// Its elements, on the host or on a device; may be null where there are none.
    pub data: *mut c_void,
    /// How many axes it has.
    pub rank: i64,
    /// Their sizes.
    pub dims: *const i64,
}

/// Operands or results of a call: buffers, where `kinds` says [`BUFFER`].
#[repr(C)]
pub struct Buffers {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// How many there are.
    pub count: i64,
    /// What each of them is.
    pub kinds: *const i32,
    /// Each of them.
    pub items: *const *const Buffer,
}

/// An operand or result that is a buffer, the only kind there is.
pub const BUFFER: i32 = 1;

/// Attributes of a call, sorted by name.
#[repr(C)]
pub struct Attributes {
    /// Bytes of the struct.
    pub size: usize,
    /// None.
    pub extension: *mut Extension,
    /// How many there are.
    pub count: i64,
    /// What each of them is: [`ARRAY`], [`SCALAR`] or [`STRING`].
    pub kinds: *const i32,
    /// Their names.
    pub names: *const *const Span,
    /// An [`Array`], [`Scalar`] or [`Span`] each.
    pub items: *const *const c_void,
}

/// An attribute that is an [`Array`].
pub const ARRAY: i32 = 1;
/// An attribute that is a [`Scalar`].
pub const SCALAR: i32 = 3;
/// An attribute that is a [`Span`].
pub const STRING: i32 = 4;

/// A number or truth value.
#[repr(C)]
pub struct Scalar {
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// The value.
    pub value: *const c_void,
}

/// Numbers in a row.
#[repr(C)]
pub struct Array {
    /// One of the numbers of `XLA_FFI_DataType`.
    pub dtype: i32,
    /// How many there are.
    pub count: usize,
    /// The values.
    pub values: *const c_void,
}

/// The call frame of a handler.
#[repr(C)]
pub struct CallFrame {
    /// Bytes of the struct.
    pub size: usize,
    /// A question for metadata, in place of a call.
    pub extension: *mut Extension,
    /// XLA's functions.
    pub api: *const Api,
    /// The call's context, for those.
    pub context: *mut c_void,
    /// The stage: [`EXECUTE`].
    pub stage: i32,
    /// The operands.
    pub operands: Buffers,
    /// The results, whose memory is to be written.
    pub results: Buffers,
    /// The attributes.
    pub attributes: Attributes,
}

/// The stage in which a call computes.
pub const EXECUTE: i32 = 3;
