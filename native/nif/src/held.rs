//! Memory that calls change in place, such as KV caches.

use crate::answer::answer;
use crate::tensor::{Output, Tensor, buffer_term, decode_type, describe, encode};
use rustler::{Encoder, Env, ResourceArc, Term};
use sidewinder_kernels::cuda::{Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::place::copy_rows::CopyRows;
use sidewinder_kernels::tensor::{Described, Spec};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that one call at a time changes. Elixir ensures that the rows of a value are written only once, so that
/// readers of older values are not affected.
pub struct Held {
    spec: Spec,
    device: Option<usize>,
    memory: Mutex<Memory>,
}

impl rustler::Resource for Held {}

/// The memory itself.
pub enum Memory {
    Host(Output),
    Device(Buffer),
}

impl Held {
    fn new(spec: Spec, device: Option<usize>) -> Result<Held> {
        let memory = match device {
            None => Memory::Host(Output::new(spec)?),
            Some(ordinal) => Memory::Device(Buffer::new(&Device::get(ordinal)?, spec)?),
        };
        Ok(Held { spec, device, memory: Mutex::new(memory) })
    }

    /// The ordinal of its device, or `None` on the host.
    pub fn device(&self) -> Option<usize> {
        self.device
    }

    /// The memory, locked against other calls.
    pub fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn into_term(self, env: Env) -> Term {
        let spec = self.spec;
        encode(env, spec, ResourceArc::new(self).encode(env))
    }
}

impl Described for Held {
    fn spec(&self) -> Spec {
        self.spec
    }
}

impl Memory {
    /// The memory on the host; fails if it is on a device.
    pub fn on_host(&mut self, name: &str) -> Result<&mut Output> {
        match self {
            Memory::Host(output) => Ok(output),
            Memory::Device(buffer) => Err(Error::new(Kind::Argument, name)
                .expected("a cache on the host, like the other tensors")
                .got(format_args!("one on {}", buffer.device()))),
        }
    }

    /// The memory on this device; fails if it is elsewhere.
    pub fn on_device(&self, name: &str, device: &Device) -> Result<&Buffer> {
        let wrong = |got: String| {
            Error::new(Kind::Argument, name)
                .expected(format_args!("a cache on {device}, like the other tensors"))
                .got(got)
        };
        match self {
            Memory::Device(buffer) if buffer.device() == device => Ok(buffer),
            Memory::Device(buffer) => Err(wrong(format!("one on {}", buffer.device()))),
            Memory::Host(_) => Err(wrong("one on the host".to_string())),
        }
    }
}

/// Allocates memory for a tensor, with undefined contents, on a device, or on the host if that is nil.
#[rustler::nif(schedule = "DirtyIo")]
fn held_new<'a>(env: Env<'a>, dtype: Term<'a>, dims: Vec<usize>, device: Option<usize>) -> Term<'a> {
    answer(env, || Ok(Held::new(Spec::new(decode_type(dtype)?, &dims)?, device)?.into_term(env)))
}

/// Copies `rows` rows of each head, from `first` on, to the front of new memory with a capacity of `room` rows.
#[rustler::nif(schedule = "DirtyIo")]
fn held_grow<'a>(env: Env<'a>, tensor: Term<'a>, first: usize, rows: usize, room: usize) -> Term<'a> {
    answer(env, || {
        let grown = part(tensor, first, rows, room)?;
        Ok(grown.into_term(env))
    })
}

/// Copies `rows` rows of each head, from `first` on, to a tensor on the same device or host.
#[rustler::nif(schedule = "DirtyIo")]
fn held_rows<'a>(env: Env<'a>, tensor: Term<'a>, first: usize, rows: usize) -> Term<'a> {
    answer(env, || {
        let part = part(tensor, first, rows, rows)?;
        Ok(match part.memory.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Memory::Host(output) => output.into_term(env),
            Memory::Device(buffer) => buffer_term(env, buffer),
        })
    })
}

/// Rows are the second to last axis; if there are four axes, the second one is heads.
fn part(tensor: Term, first: usize, rows: usize, room: usize) -> Result<Held> {
    let Tensor::Held(held) = Tensor::decode("cache", tensor)? else {
        return Err(Error::new(Kind::Argument, "cache").expected("memory of a cache").got(describe(tensor)));
    };
    let (spec, shape) = (held.spec, &held.spec.shape[..]);
    let (of_heads, had) = match *shape {
        [batch, heads, had, width] => ([batch, heads, had, width], had),
        [batch, had, width] => ([batch, 1, had, width], had),
        _ => return Err(Error::new(Kind::Shape, "cache").expected("three axes or four").got(spec.shape)),
    };
    if rows > room || first.checked_add(rows).is_none_or(|end| end > had) {
        let expected = format_args!("rows of {had} into {room}").to_string();
        return Err(Error::new(Kind::Size, "rows").expected(expected).got(format_args!("{rows} from {first}")));
    }
    let mut dims = shape.to_vec();
    dims[shape.len() - 2] = room;
    let part = Held::new(Spec::new(spec.dtype, &dims)?, held.device)?;
    let from = Spec::new(spec.dtype, &of_heads)?;
    let to = Spec::new(spec.dtype, &[of_heads[0], of_heads[1], room, of_heads[3]])?;
    copy(&CopyRows::grow(from, to, first, rows), &held.lock(), &mut part.lock())?;
    Ok(part)
}

fn copy(rows: &CopyRows, from: &Memory, to: &mut Memory) -> Result<()> {
    match (from, to) {
        (Memory::Host(from), Memory::Host(to)) => rows.cpu(&from.view()?, &mut to.view_mut()?),
        (Memory::Device(from), Memory::Device(to)) => {
            let lane = from.device().lane()?;
            rows.cuda(from, to, &lane)?;
            lane.synchronize()?;
        }
        _ => unreachable!("memory grows where it lies"),
    }
    Ok(())
}
