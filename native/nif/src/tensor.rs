//! Tensors at the boundary: `{type, shape, data}`, where `data` is a binary or a device buffer.

use crate::held::Held;
use rustler::{Atom, Binary, Encoder, Env, NewBinary, OwnedBinary, ResourceArc, Term};
use sidewinder_kernels::cuda::Buffer;
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec, View, ViewMut};

/// Device memory as a resource.
pub struct DeviceBuffer(pub Buffer);

impl rustler::Resource for DeviceBuffer {}

/// A decoded tensor.
pub enum Tensor<'a> {
    /// An aligned binary of the caller.
    Binary(Spec, Binary<'a>),
    /// A copy, because the binary was not aligned for its type.
    Copied(Owned),
    /// A device buffer.
    Device(ResourceArc<DeviceBuffer>),
    /// Memory that calls change in place.
    Held(ResourceArc<Held>),
}

impl<'a> Tensor<'a> {
    /// Decodes a term and checks it; `name` is for errors.
    pub fn decode(name: &str, term: Term<'a>) -> Result<Tensor<'a>> {
        let wrong = |e: Error| Error { argument: name.into(), ..e };
        let (spec, data) = decode_spec(term).map_err(wrong)?;
        if let Ok(buffer) = data.decode::<ResourceArc<DeviceBuffer>>() {
            return same_spec(spec, buffer.0.spec()).map(|()| Tensor::Device(buffer)).map_err(wrong);
        }
        if let Ok(held) = data.decode::<ResourceArc<Held>>() {
            return same_spec(spec, held.spec()).map(|()| Tensor::Held(held)).map_err(wrong);
        }
        let binary = data.decode::<Binary>().map_err(|_| {
            Error::new(Kind::Argument, name).expected("a binary or a device buffer as data").got(describe(data))
        })?;
        Tensor::host(spec, binary).map_err(wrong)
    }

    fn host(spec: Spec, binary: Binary<'a>) -> Result<Tensor<'a>> {
        let aligned = (binary.as_ptr() as usize).is_multiple_of(spec.dtype.size());
        if binary.len() == spec.bytes() && !aligned {
            let mut copy = Owned::try_any(spec)?;
            copy.view_mut().bytes().copy_from_slice(&binary);
            return Ok(Tensor::Copied(copy));
        }
        View::new(spec, binary.as_slice()).map(|_| Tensor::Binary(spec, binary))
    }

    /// A view for reading on the host.
    pub fn view(&self) -> Result<View<'_>> {
        match self {
            Tensor::Binary(spec, binary) => View::new(*spec, binary.as_slice()),
            Tensor::Copied(owned) => Ok(owned.view()),
            Tensor::Device(buffer) => Err(Error::new(Kind::Argument, "data")
                .expected("a tensor on the host")
                .got(format_args!("one on {}", buffer.0.device()))
                .hint("Copy it with Sidewinder.Tensor.to_host/1")),
            Tensor::Held(_) => {
                Err(Error::new(Kind::Argument, "data").expected("a tensor").got("a cache that is changed in place"))
            }
        }
    }
}

impl Described for Tensor<'_> {
    fn spec(&self) -> Spec {
        match self {
            Tensor::Binary(spec, _) => *spec,
            Tensor::Copied(owned) => owned.spec(),
            Tensor::Device(buffer) => buffer.0.spec(),
            Tensor::Held(held) => held.spec(),
        }
    }
}

fn same_spec(spec: Spec, of_memory: Spec) -> Result<()> {
    if of_memory == spec {
        return Ok(());
    }
    Err(Error::new(Kind::Shape, "data").expected(spec).got(format_args!("memory of {of_memory}")))
}

/// A short text of a term, for errors.
pub fn describe(term: Term) -> String {
    let text = format!("{term:?}");
    if text.chars().count() <= 80 { text } else { text.chars().take(77).chain("...".chars()).collect() }
}

mod types {
    rustler::atoms! { f64, f32, bf16, f16, u8, i8, i16, i32, i64 }
}

/// The element type of that name.
pub fn decode_type(term: Term) -> Result<DType> {
    // Atoms are compared directly, as converting them to strings would copy.
    let known = [
        (types::f64(), DType::F64),
        (types::f32(), DType::F32),
        (types::bf16(), DType::Bf16),
        (types::f16(), DType::F16),
        (types::u8(), DType::U8),
        (types::i8(), DType::I8),
        (types::i16(), DType::I16),
        (types::i32(), DType::I32),
        (types::i64(), DType::I64),
    ];
    known.into_iter().find(|(atom, _)| atom == &term).map(|(_, dtype)| dtype).ok_or_else(|| {
        Error::new(Kind::DType, "type").expected("f64, f32, bf16, f16, u8, i8, i16, i32 or i64").got(describe(term))
    })
}

fn decode_spec<'a>(term: Term<'a>) -> Result<(Spec, Term<'a>)> {
    let malformed = |_| Error::new(Kind::Argument, "tensor").expected("{type, shape, data}").got(describe(term));
    let (dtype, shape, data) = term.decode::<(Term, Term, Term)>().map_err(malformed)?;
    Ok((Spec::new(decode_type(dtype)?, &decode_shape(shape)?)?, data))
}

/// Decodes a tuple of sizes.
pub fn decode_shape(shape: Term) -> Result<Vec<usize>> {
    let sizes =
        rustler::types::tuple::get_tuple(shape).and_then(|sizes| sizes.into_iter().map(|d| d.decode()).collect());
    sizes.map_err(|_| Error::new(Kind::Shape, "shape").expected("a tuple of sizes, none negative").got(describe(shape)))
}

/// A tensor to be returned to Elixir, written straight into its binary.
pub struct Output {
    spec: Spec,
    binary: OwnedBinary,
}

impl Output {
    /// Allocates a tensor; its contents are undefined.
    pub fn new(spec: Spec) -> Result<Output> {
        Ok(Output { spec, binary: allocated(spec.bytes())? })
    }

    /// A copy of a tensor.
    pub fn copied(view: View) -> Result<Output> {
        let mut output = Output::new(view.spec())?;
        output.view_mut()?.bytes().copy_from_slice(view.bytes());
        Ok(output)
    }

    /// A view for writing.
    pub fn view_mut(&mut self) -> Result<ViewMut<'_>> {
        ViewMut::new(self.spec, self.binary.as_mut_slice())
    }

    /// A view for reading.
    pub fn view(&self) -> Result<View<'_>> {
        View::new(self.spec, self.binary.as_slice())
    }

    /// The term to return to Elixir.
    pub fn into_term(self, env: Env) -> Term {
        encode(env, self.spec, self.binary.release(env).to_term(env))
    }
}

/// Memory for a binary. To grow one reports when memory runs out; to allocate it at once would abort the VM.
fn allocated(bytes: usize) -> Result<OwnedBinary> {
    let mut binary = OwnedBinary::new(0);
    match binary.realloc(bytes) {
        true => Ok(binary),
        false => Err(Error::new(Kind::Memory, "output").expected(format_args!("{bytes} bytes of memory")).got("none")),
    }
}

/// A binary with these bytes.
pub fn binary<'a>(env: Env<'a>, bytes: &[u8]) -> Result<Term<'a>> {
    let mut binary = allocated(bytes.len())?;
    binary.as_mut_slice().copy_from_slice(bytes);
    Ok(binary.release(env).to_term(env))
}

/// A binary with a short text.
pub fn text<'a>(env: Env<'a>, text: &[u8]) -> Term<'a> {
    let mut binary = NewBinary::new(env, text.len());
    binary.copy_from_slice(text);
    binary.into()
}

/// A term for a device buffer.
pub fn buffer_term(env: Env, buffer: Buffer) -> Term {
    let spec = buffer.spec();
    encode(env, spec, ResourceArc::new(DeviceBuffer(buffer)).encode(env))
}

/// The term of a tensor with this data.
pub fn encode<'a>(env: Env<'a>, spec: Spec, data: Term<'a>) -> Term<'a> {
    let dims: Vec<Term> = spec.shape.iter().map(|d| d.encode(env)).collect();
    let dtype = Atom::from_str(env, spec.dtype.name()).expect("a short name");
    (dtype, rustler::types::tuple::make_tuple(env, &dims), data).encode(env)
}
