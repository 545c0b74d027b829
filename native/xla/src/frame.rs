//! A call as XLA passes it. Every pointer, count and type is checked before it is used.

use crate::abi::{self, Array, Attributes, BUFFER, Buffers, CallFrame, Scalar, Span};
use crate::value::{Value, configure, decode};
use serde::Deserialize;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{AnyOp, Configured};
use sidewinder_kernels::tensor::{DType, Spec};
use std::ffi::c_void;
use std::slice;

/// The attributes that are not options of the op: its name, the names of operands and results, separated by commas, and
/// how to run it.
const OWN: [&str; 6] = ["op", "inputs", "outputs", "level", "threads", "allow_tf32"];

/// How to run a call.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Target {
    /// A CPU level by name; the best by default.
    pub level: Option<String>,
    /// CPU threads; one per core by default.
    pub threads: Option<usize>,
    /// Whether matrix products on CUDA may round f32 to TF32.
    pub allow_tf32: bool,
}

/// A call with a checked frame.
pub struct Frame<'f> {
    frame: &'f CallFrame,
    attributes: Vec<(&'f str, Value<'f>)>,
}

/// A tensor of a call: its name, its spec and its address.
#[derive(Clone, Copy)]
pub struct Tensor<'f> {
    /// Its name.
    pub name: &'f str,
    /// Its type and shape.
    pub spec: Spec,
    /// Its first element, on the host or on a device; not null unless it has no elements.
    pub data: *mut u8,
}

/// The error for a frame that violates XLA's interface.
fn malformed(what: &str, expected: &str, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::Argument, what).expected(expected).got(got)
}

/// The items of a C array. XLA may pass null for an empty one.
///
/// # Safety
/// Unless it is null, `start` points to `count` items that live for `'f`.
unsafe fn items<'f, T>(what: &str, start: *const T, count: i64) -> Result<&'f [T]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: `start` points to `count` items, as promised.
        Ok(count) if !start.is_null() => Ok(unsafe { slice::from_raw_parts(start, count) }),
        _ => Err(malformed(what, "items where they are counted", format_args!("{count} at {start:?}"))),
    }
}

impl Span {
    /// The text of the span; `what` names it in errors.
    ///
    /// # Safety
    /// Unless it is null, `start` points to `length` bytes that live for `'f`.
    unsafe fn text<'f>(&self, what: &str) -> Result<&'f str> {
        // SAFETY: `start` points to `length` bytes, as promised.
        let bytes = unsafe { items(what, self.start, self.length as i64)? };
        std::str::from_utf8(bytes).map_err(|e| malformed(what, "text in UTF-8", e))
    }
}

impl<'f> Frame<'f> {
    /// Checks a frame and reads the attributes.
    ///
    /// # Safety
    /// Pointers of the frame that are not null point to what XLA's interface says.
    pub unsafe fn new(frame: &'f CallFrame) -> Result<Frame<'f>> {
        // SAFETY: the caller's promise.
        Ok(Frame { frame, attributes: unsafe { attributes(&frame.attributes)? } })
    }

    /// The text attribute of that name.
    pub fn text(&self, name: &str) -> Result<&'f str> {
        match self.find(name) {
            Some(Value::Text(text)) => Ok(text),
            other => Err(malformed(name, "an attribute that is a text", format_args!("{other:?}"))),
        }
    }

    /// The attribute of that name.
    pub fn find(&self, name: &str) -> Option<&Value<'f>> {
        self.attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value)
    }

    /// How to run the call, from the attributes.
    pub fn target(&self) -> Result<Target> {
        let own = self.attributes.iter().filter(|(name, _)| OWN[3..].contains(name));
        decode("attributes", own.cloned())
    }

    /// The op with its options, which are all other attributes.
    pub fn with_options(&self, op: &dyn AnyOp) -> Result<Configured> {
        let others = self.attributes.iter().filter(|(name, _)| !OWN.contains(name));
        configure(op, others.cloned())
    }

    /// The operands, under the names in the attribute `inputs`.
    pub fn operands(&self) -> Result<Vec<Tensor<'f>>> {
        // SAFETY: the frame is XLA's, as promised to `new`.
        unsafe { tensors("operands", &self.frame.operands, self.text("inputs")?) }
    }

    /// The results, under the names in the attribute `outputs`.
    pub fn results(&self) -> Result<Vec<Tensor<'f>>> {
        // SAFETY: as above.
        unsafe { tensors("results", &self.frame.results, self.text("outputs")?) }
    }

    /// The CUDA stream of the call.
    pub fn stream(&self) -> Result<*mut c_void> {
        // SAFETY: as above.
        let api = unsafe { self.frame.api.as_ref() }.filter(|api| api.size >= std::mem::size_of::<abi::Api>());
        let missing = || malformed("XLA", "a call with a stream", "none");
        let get = api.and_then(|api| api.stream_get).ok_or_else(missing)?;
        let mut asked = abi::StreamGet {
            size: std::mem::size_of::<abi::StreamGet>(),
            extension: std::ptr::null_mut(),
            context: self.frame.context,
            stream: std::ptr::null_mut(),
        };
        // SAFETY: XLA's own function, with the arguments that it expects.
        let error = unsafe { get(&mut asked) };
        if error.is_null() { Ok(asked.stream) } else { Err(self.error(error)) }
    }

    /// Converts an error of XLA, and frees it.
    fn error(&self, error: *mut abi::Error) -> Error {
        // SAFETY: the error was created by the XLA of this frame.
        let text = unsafe { crate::report::text(&*self.frame.api, error) };
        malformed("XLA", "a call with a stream", text)
    }
}

/// All attributes by name.
///
/// # Safety
/// Pointers of the list that are not null point to what XLA's interface says, and live for `'f`.
unsafe fn attributes<'f>(list: &Attributes) -> Result<Vec<(&'f str, Value<'f>)>> {
    // SAFETY: three arrays of `count` items each, as XLA's interface says.
    let (kinds, names, values) = unsafe {
        (
            items("attributes", list.kinds, list.count)?,
            items("attributes", list.names, list.count)?,
            items("attributes", list.items, list.count)?,
        )
    };
    let each = kinds.iter().zip(names).zip(values);
    each.map(|((&kind, &name), &value)| {
        if name.is_null() || value.is_null() {
            return Err(malformed("attributes", "names and values", "null"));
        }
        // SAFETY: neither is null, and the kind determines the type of the value.
        unsafe {
            let name = (*name).text("attributes")?;
            Ok((name, attribute(name, kind, value)?))
        }
    })
    .collect()
}

/// The value of the attribute `name`.
///
/// # Safety
/// `value` points to a value of that kind, which lives for `'f`.
unsafe fn attribute<'f>(name: &str, kind: i32, value: *const c_void) -> Result<Value<'f>> {
    // SAFETY: a value of that kind, as promised.
    unsafe {
        match kind {
            abi::STRING => Ok(Value::Text((*value.cast::<Span>()).text(name)?)),
            abi::SCALAR => {
                let Scalar { dtype, value } = *value.cast::<Scalar>();
                let [number] = &numbers(name, dtype, value, 1)?[..] else { unreachable!("one was asked for") };
                Ok(number.clone())
            }
            abi::ARRAY => {
                let Array { dtype, count, values } = *value.cast::<Array>();
                Ok(Value::List(numbers(name, dtype, values, count)?))
            }
            other => Err(malformed(name, "a text, a number, a truth value or an array", format_args!("kind {other}"))),
        }
    }
}

/// Numbers of one of the types that attributes have.
///
/// # Safety
/// Unless it is null, `start` points to `count` numbers of that type, at any alignment.
unsafe fn numbers<'f>(name: &str, dtype: i32, start: *const c_void, count: usize) -> Result<Vec<Value<'f>>> {
    macro_rules! of {
        // Attributes may have any alignment.
        ($type:ty, $value:expr) => {{
            // SAFETY: `start` points to `count` numbers, as promised.
            let bytes = unsafe { items(name, start.cast::<[u8; std::mem::size_of::<$type>()]>(), count as i64)? };
            Ok(bytes.iter().map(|&bytes| $value(<$type>::from_ne_bytes(bytes))).collect())
        }};
    }
    match dtype {
        1 => of!(u8, |value: u8| Value::Bool(value != 0)),
        3 => of!(i16, |value: i16| Value::Integer(value.into())),
        4 => of!(i32, |value: i32| Value::Integer(value.into())),
        5 => of!(i64, Value::Integer),
        8 => of!(u32, |value: u32| Value::Integer(value.into())),
        9 => of!(u64, |value: u64| i64::try_from(value).map_or(Value::Float(value as f64), Value::Integer)),
        11 => of!(f32, |value: f32| Value::Float(value.into())),
        12 => of!(f64, Value::Float),
        other => Err(malformed(name, "integers of 16 to 64 bits, f32, f64 or i1", format_args!("data type {other}"))),
    }
}

/// The buffers of a list, under these names.
///
/// # Safety
/// Pointers of the list that are not null point to what XLA's interface says, and live for `'f`.
unsafe fn tensors<'f>(what: &str, list: &Buffers, names: &'f str) -> Result<Vec<Tensor<'f>>> {
    // SAFETY: two arrays of `count` items each, as XLA's interface says.
    let (kinds, buffers) = unsafe { (items(what, list.kinds, list.count)?, items(what, list.items, list.count)?) };
    let names: Vec<&str> = if names.is_empty() { Vec::new() } else { names.split(',').collect() };
    if names.len() != buffers.len() {
        return Err(malformed(what, &format!("{}, as named", names.len()), buffers.len()));
    }
    let each = kinds.iter().zip(buffers).zip(names);
    each.map(|((&kind, &buffer), name)| {
        if kind != BUFFER || buffer.is_null() {
            return Err(malformed(name, "a buffer", format_args!("kind {kind} at {buffer:?}")));
        }
        // SAFETY: the kind is that of a buffer, and the pointer is not null.
        unsafe { tensor(name, &*buffer) }
    })
    .collect()
}

/// The tensor of a buffer, under this name.
///
/// # Safety
/// Unless it is null, `buffer.dims` points to `buffer.rank` sizes.
unsafe fn tensor<'f>(name: &'f str, buffer: &abi::Buffer) -> Result<Tensor<'f>> {
    // SAFETY: `rank` sizes, as promised.
    let dims = unsafe { items(name, buffer.dims, buffer.rank)? };
    let dims: Option<Vec<usize>> = dims.iter().map(|&size| usize::try_from(size).ok()).collect();
    let dims = dims.ok_or_else(|| malformed(name, "sizes of 0 or more", "a negative one"))?;
    let spec = Spec::new(dtype(name, buffer.dtype)?, &dims)?;
    if buffer.data.is_null() && spec.bytes() > 0 {
        return Err(malformed(name, "elements", format_args!("null for {spec}")));
    }
    Ok(Tensor { name, spec, data: buffer.data.cast() })
}

/// The element type for a number of XLA's. Booleans are masks.
fn dtype(name: &str, number: i32) -> Result<DType> {
    Ok(match number {
        1 | 6 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        10 => DType::F16,
        11 => DType::F32,
        12 => DType::F64,
        16 => DType::Bf16,
        other => {
            let expected = "pred, u8, s8, s16, s32, s64, f16, bf16, f32 or f64";
            return Err(Error::new(Kind::DType, name).expected(expected).got(format_args!("data type {other}")));
        }
    })
}
