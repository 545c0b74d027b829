//! One error for every failure: the argument, what was expected, what was got, and a hint.

use std::any::Any;
use std::fmt;

/// The sort of failure, for callers that match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A tensor has the wrong rank or size.
    Shape,
    /// A tensor has the wrong element type.
    DType,
    /// A tensor's bytes do not match its shape, or a size overflows.
    Size,
    /// A required tensor is missing, or a tensor is unknown to the op.
    Argument,
    /// An option is unknown or has a value that is not allowed.
    Option,
    /// The wanted device, level or library is not on this machine.
    Unavailable,
    /// The device failed earlier and takes no more work in this OS process.
    DeviceLost,
    /// A call to the CUDA driver, to NVRTC or to cuBLASLt failed.
    Cuda,
    /// Memory could not be allocated.
    Memory,
    /// A file is missing, damaged or cannot be written.
    File,
    /// The call was ended before it was done, as its caller wanted.
    Cancelled,
    /// A bug in this library, caught before it could do harm.
    Panic,
}

impl Kind {
    /// The name by which other languages match on it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Shape => "shape",
            Kind::DType => "dtype",
            Kind::Size => "size",
            Kind::Argument => "argument",
            Kind::Option => "option",
            Kind::Unavailable => "unavailable",
            Kind::DeviceLost => "device_lost",
            Kind::Cuda => "cuda",
            Kind::Memory => "memory",
            Kind::File => "file",
            Kind::Cancelled => "cancelled",
            Kind::Panic => "panic",
        }
    }
}

/// A failure with everything needed to fix it. Empty fields are left out of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The sort of failure.
    pub kind: Kind,
    /// The op that was called.
    pub op: Box<str>,
    /// The argument, option, device or file that is wrong.
    pub argument: Box<str>,
    /// What was expected.
    pub expected: Box<str>,
    /// What was given instead.
    pub got: Box<str>,
    /// The remedy.
    pub hint: Box<str>,
}

/// The result of fallible functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about `argument`; the other fields are added by the methods below.
    pub fn new(kind: Kind, argument: impl Into<Box<str>>) -> Self {
        Error {
            kind,
            op: Box::default(),
            argument: argument.into(),
            expected: Box::default(),
            got: Box::default(),
            hint: Box::default(),
        }
    }

    /// Sets what was expected.
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.expected = expected.to_string().into();
        self
    }

    /// Sets what was given instead.
    pub fn got(mut self, got: impl fmt::Display) -> Self {
        self.got = got.to_string().into();
        self
    }

    /// Sets the remedy.
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = hint.to_string().into();
        self
    }

    /// The error of a panic that was caught, at `place` where that is known.
    pub fn panicked(payload: &(dyn Any + Send), place: &str) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
        let place = if place.is_empty() { String::new() } else { format!(" ({place})") };
        Error::new(Kind::Panic, "native library")
            .got(format_args!("a panic: {text}{place}"))
            .hint("This is a bug in Sidewinder; please report it with the call that caused it")
    }

    /// Names the op, unless an inner call has named one already.
    pub fn in_op(mut self, op: &str) -> Self {
        if self.op.is_empty() {
            self.op = op.into();
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.op.is_empty() {
            write!(f, "{}: ", self.op)?;
        }
        write!(f, "{}", self.argument)?;
        if !self.expected.is_empty() {
            write!(f, ": expected {}", self.expected)?;
        }
        if !self.got.is_empty() {
            let joint = if self.expected.is_empty() { ":" } else { ", got" };
            write!(f, "{joint} {}", self.got)?;
        }
        if !self.hint.is_empty() {
            write!(f, ". {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
