//! The CPU handler, called as XLA calls it.
#![allow(clippy::undocumented_unsafe_blocks, reason = "all of it is this test's own XLA")]

use sidewinder_xla::abi::*;
use sidewinder_xla::{sidewinder_xla_cuda, sidewinder_xla_cuda_graph, sidewinder_xla_host};
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

/// An error of this test's XLA.
struct Made {
    text: CString,
    code: i32,
}

unsafe extern "C" fn create(asked: *mut ErrorCreate) -> *mut Error {
    let (text, code) = unsafe { (CStr::from_ptr((*asked).message).to_owned(), (*asked).code) };
    Box::into_raw(Box::new(Made { text, code })).cast()
}

unsafe extern "C" fn message(asked: *mut ErrorMessage) {
    unsafe { (*asked).message = (*(*asked).error.cast::<Made>()).text.as_ptr() };
}

unsafe extern "C" fn destroy(asked: *mut ErrorDestroy) {
    drop(unsafe { Box::from_raw((*asked).error.cast::<Made>()) });
}

unsafe extern "C" fn refuse(_: *mut HandlerRegister) -> *mut Error {
    unreachable!("handlers register nothing")
}

fn api() -> Api {
    Api {
        size: size_of::<Api>(),
        extension: null_mut(),
        version: Version { size: size_of::<Version>(), extension: null_mut(), major: 0, minor: 3 },
        internal: null(),
        error_create: create,
        error_message: message,
        error_destroy: destroy,
        handler_register: refuse,
        stream_get: None,
    }
}

const F32: i32 = 11;
const I64: i32 = 5;

/// An attribute of a call in a test.
#[derive(Clone)]
enum Attribute {
    Text(&'static str),
    Integer(i64),
    Floats(Vec<f64>),
}

use Attribute::{Floats, Integer, Text};

fn buffer(data: &mut [f32], dims: &[i64]) -> Buffer {
    let (rank, dims) = (dims.len() as i64, dims.as_ptr());
    Buffer { size: size_of::<Buffer>(), extension: null_mut(), dtype: F32, data: data.as_mut_ptr().cast(), rank, dims }
}

fn list(kinds: &[i32], items: &[*const Buffer]) -> Buffers {
    let (kinds, count) = (kinds.as_ptr(), items.len() as i64);
    Buffers { size: size_of::<Buffers>(), extension: null_mut(), count, kinds, items: items.as_ptr() }
}

fn span(text: &str) -> Span {
    Span { start: text.as_ptr(), length: text.len() }
}

/// Calls the handler with a frame that `change` may modify first; returns the code and text of its error, if any.
fn call_changed(
    attributes: &[(&str, Attribute)],
    operands: &[Buffer],
    results: &[Buffer],
    change: impl FnOnce(&mut CallFrame),
) -> Result<(), (i32, String)> {
    let kinds = vec![BUFFER; operands.len().max(results.len())];
    let operands: Vec<*const Buffer> = operands.iter().map(|b| &raw const *b).collect();
    let results: Vec<*const Buffer> = results.iter().map(|b| &raw const *b).collect();
    let names: Vec<Span> = attributes.iter().map(|(name, _)| span(name)).collect();
    let names: Vec<*const Span> = names.iter().map(|name| &raw const *name).collect();
    let kinds_of = |(_, value): &(&str, Attribute)| match value {
        Text(_) => STRING,
        Integer(_) => SCALAR,
        Floats(_) => ARRAY,
    };
    let attribute_kinds: Vec<i32> = attributes.iter().map(kinds_of).collect();
    let value = |(_, value): &(&str, Attribute)| -> Box<dyn std::any::Any> {
        match value {
            Text(text) => Box::new(span(text)),
            Integer(number) => Box::new(Scalar { dtype: I64, value: (&raw const *number).cast() }),
            Floats(all) => Box::new(Array { dtype: 12, count: all.len(), values: all.as_ptr().cast() }),
        }
    };
    let values: Vec<_> = attributes.iter().map(value).collect();
    let values: Vec<*const c_void> = values.iter().map(|value| (&raw const **value).cast()).collect();
    let api = api();
    let mut frame = CallFrame {
        size: size_of::<CallFrame>(),
        extension: null_mut(),
        api: &api,
        context: null_mut(),
        stage: EXECUTE,
        operands: list(&kinds, &operands),
        results: list(&kinds, &results),
        attributes: Attributes {
            size: size_of::<Attributes>(),
            extension: null_mut(),
            count: attributes.len() as i64,
            kinds: attribute_kinds.as_ptr(),
            names: names.as_ptr(),
            items: values.as_ptr(),
        },
    };
    change(&mut frame);
    let error = unsafe { sidewinder_xla_host(&mut frame) }.cast::<Made>();
    if error.is_null() {
        return Ok(());
    }
    let made = unsafe { Box::from_raw(error) };
    Err((made.code, made.text.into_string().unwrap()))
}

fn call(attributes: &[(&str, Attribute)], operands: &[Buffer], results: &[Buffer]) -> Result<(), (i32, String)> {
    call_changed(attributes, operands, results, |_| ())
}

fn relu() -> Vec<(&'static str, Attribute)> {
    vec![("op", Text("activations")), ("inputs", Text("x")), ("outputs", Text("y")), ("fn", Text("relu"))]
}

#[test]
fn results_are_written_where_they_lie() {
    let (mut x, mut y) = ([-1.0, 2.0, -3.0, 4.0], [f32::NAN; 4]);
    let dims = [2, 2];
    call(&relu(), &[buffer(&mut x, &dims)], &[buffer(&mut y, &dims)]).unwrap();
    assert_eq!(y, [0.0, 2.0, 0.0, 4.0]);
}

#[test]
fn options_of_every_kind_are_read() {
    // One channel, one state: h = dt B x with dt = clamp(5, 0, 2), y = C h.
    let (mut x, mut dt, mut a, mut one, mut y) = ([3.0], [5.0], [-1.0], [1.0], [f32::NAN]);
    let [cube, square] = [&[1, 1, 1][..], &[1, 1]];
    let attributes = [
        ("op", Text("selective_scan")),
        ("inputs", Text("x,dt,A,B,C")),
        ("outputs", Text("y")),
        ("dt_clamp", Floats(vec![0.0, 2.0])),
        ("threads", Integer(1)),
    ];
    let (b, c) = (buffer(&mut one, cube), buffer(&mut one, cube));
    let operands = [buffer(&mut x, cube), buffer(&mut dt, cube), buffer(&mut a, square), b, c];
    call(&attributes, &operands, &[buffer(&mut y, cube)]).unwrap();
    assert_eq!(y, [6.0]);
}

#[test]
fn wrong_calls_are_errors_with_our_text() {
    let (mut x, mut y) = ([1.0, 2.0], [f32::NAN; 2]);
    let (dims, other) = ([1, 2], [2, 1]);
    let mut fails_with = |expected: i32, name: &'static str, value: Attribute, text: &str| {
        let mut attributes = relu();
        attributes.retain(|(known, _)| *known != name);
        attributes.push((name, value));
        let (code, got) = call(&attributes, &[buffer(&mut x, &dims)], &[buffer(&mut y, &dims)]).unwrap_err();
        assert!(code == expected && got.contains(text), "{code}: {got}");
    };
    // Code 9, not 3: a level that this CPU lacks may exist on another one.
    fails_with(9, "level", Text("avx9"), "avx9");
    let mut fails = |name, value, text: &str| fails_with(3, name, value, text);
    fails("op", Text("no_such_op"), "no_such_op");
    fails("op", Integer(1), "op");
    fails("inputs", Text("x,x"), "operands");
    fails("inputs", Text("z"), "x");
    fails("outputs", Text("z"), "results");
    fails("outputs", Text(""), "results");
    fails("fn", Text("none"), "none");
    fails("fn", Floats(vec![]), "fn");
    fails("unknown", Integer(1), "unknown");
    fails("threads", Integer(-1), "threads");
    fails("threads", Integer(1 << 40), "threads");
    let (_, got) = call(&relu(), &[buffer(&mut x, &dims)], &[buffer(&mut y, &other)]).unwrap_err();
    assert!(got.contains("(2, 1)"), "{got}");
    assert!(y.iter().all(|value| value.is_nan()));
}

#[test]
fn broken_frames_are_errors() {
    let (mut x, mut y) = ([1.0, 2.0], [f32::NAN; 2]);
    let dims = [1, 2];
    let (negative, endless) = ([-1, 2], [i64::MAX, i64::MAX]);
    let mut fails = |change: &dyn Fn(&mut CallFrame)| {
        let done = call_changed(&relu(), &[buffer(&mut x, &dims)], &[buffer(&mut y, &dims)], change);
        assert!(done.is_err());
    };
    fails(&|frame| frame.operands.count = -1);
    fails(&|frame| frame.operands.items = null());
    fails(&|frame| frame.attributes.kinds = null());
    fails(&|frame| frame.attributes.count = 0);
    let mut refused = |change: &dyn Fn(&mut Buffer)| {
        let (mut from, to) = (buffer(&mut x, &dims), buffer(&mut y, &dims));
        change(&mut from);
        assert!(call(&relu(), &[from], &[to]).is_err());
    };
    refused(&|buffer| buffer.dtype = 99);
    refused(&|buffer| buffer.data = null_mut());
    refused(&|buffer| buffer.dims = negative.as_ptr());
    refused(&|buffer| buffer.dims = endless.as_ptr());
    refused(&|buffer| buffer.rank = -1);
    refused(&|buffer| buffer.rank = 0);
}

#[test]
fn metadata_is_told_and_other_stages_do_nothing() {
    let mut metadata = Metadata {
        size: size_of::<Metadata>(),
        version: Version { size: size_of::<Version>(), extension: null_mut(), major: -1, minor: -1 },
        traits: 7,
    };
    let base = Extension { size: size_of::<MetadataExtension>(), kind: METADATA, next: null_mut() };
    let mut question = MetadataExtension { base, metadata: &mut metadata };
    call_changed(&[], &[], &[], |frame| frame.extension = (&raw mut question).cast()).unwrap();
    assert_eq!((metadata.version.major, metadata.version.minor, metadata.traits), (0, 3, 0));
    // Only the handler for calls without memory of their own may be part of a command buffer.
    for (handler, traits) in [(sidewinder_xla_cuda as Handler, 0), (sidewinder_xla_cuda_graph, 1)] {
        let ask = |frame: &mut CallFrame| {
            frame.extension = (&raw mut question).cast();
            assert!(unsafe { handler(frame) }.is_null());
            assert_eq!(unsafe { (*question.metadata).traits }, traits);
        };
        call_changed(&[], &[], &[], ask).unwrap();
    }
    call_changed(&[], &[], &[], |frame| frame.stage = 0).unwrap();
}
