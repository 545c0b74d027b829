//! The machine's CPU and GPUs, device memory, and hooks for tests.

use crate::answer::answer;
use crate::tensor::{Output, Tensor, buffer_term};
use rustler::{Encoder, Env, NifMap, Term};
use sidewinder_kernels::cpu::{Exec, Level};
use sidewinder_kernels::cuda::{self, Buffer, Device};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::tensor::Described;

#[derive(NifMap)]
#[rustler(encode)]
struct CpuInfo {
    levels: Vec<&'static str>,
    best: &'static str,
    threads: usize,
}

/// The CPU's levels, slowest first, and the default number of threads.
#[rustler::nif]
fn cpu_info(env: Env) -> Term {
    answer(env, || {
        let default = Exec::default();
        let levels = Level::available().iter().map(|level| level.name()).collect();
        Ok(CpuInfo { levels, best: default.level.name(), threads: default.threads })
    })
}

#[derive(NifMap)]
#[rustler(encode)]
struct GpuInfo {
    ordinal: usize,
    name: String,
    capability: (u32, u32),
    multiprocessors: u32,
    memory: usize,
    memory_free: Option<usize>,
    driver: (u32, u32),
    compiler: Option<(u32, u32)>,
    why_no_compiler: Option<String>,
    lost: Option<String>,
}

/// The CUDA devices, or why there are none.
#[rustler::nif(schedule = "DirtyIo")]
fn cuda_info(env: Env) -> Term {
    answer(env, || {
        let device = |d: cuda::DeviceInfo| GpuInfo {
            ordinal: d.ordinal,
            name: d.name,
            capability: d.capability,
            multiprocessors: d.multiprocessors,
            memory: d.memory,
            memory_free: d.memory_free,
            driver: d.driver,
            why_no_compiler: d.compiler.as_ref().err().map(|e| e.to_string()),
            compiler: d.compiler.ok(),
            lost: d.lost.map(|e| e.to_string()),
        };
        Ok(cuda::devices()?.into_iter().map(device).collect::<Vec<_>>())
    })
}

/// Copies a host tensor to a device.
#[rustler::nif(schedule = "DirtyIo")]
fn buffer_from_host<'a>(env: Env<'a>, tensor: Term<'a>, ordinal: usize) -> Term<'a> {
    answer(env, || {
        let tensor = Tensor::decode("tensor", tensor)?;
        let device = Device::get(ordinal)?;
        let buffer = Buffer::new(&device, tensor.spec())?;
        let lane = device.lane()?;
        lane.upload(tensor.view()?.bytes(), &buffer)?;
        lane.synchronize()?;
        Ok(buffer_term(env, buffer))
    })
}

/// Copies a device tensor to the host.
#[rustler::nif(schedule = "DirtyIo")]
fn buffer_to_host<'a>(env: Env<'a>, tensor: Term<'a>) -> Term<'a> {
    answer(env, || match Tensor::decode("tensor", tensor)? {
        Tensor::Device(buffer) => download(env, &buffer.0),
        _ => Ok(tensor),
    })
}

fn download<'a>(env: Env<'a>, buffer: &Buffer) -> Result<Term<'a>> {
    let mut output = Output::new(buffer.spec())?;
    let lane = buffer.device().lane()?;
    lane.download(buffer, output.view_mut()?.bytes())?;
    lane.synchronize()?;
    Ok(output.into_term(env))
}

/// The ordinal of a tensor's device, or nil on the host.
#[rustler::nif]
fn buffer_device<'a>(env: Env<'a>, tensor: Term<'a>) -> Term<'a> {
    answer(env, || match Tensor::decode("tensor", tensor)? {
        Tensor::Device(buffer) => Ok(Some(buffer.0.device().ordinal())),
        Tensor::Held(held) => Ok(held.device()),
        _ => Ok(None),
    })
}

/// A device tensor under another shape of equal size, in the same memory.
#[rustler::nif]
fn buffer_reshape<'a>(env: Env<'a>, tensor: Term<'a>, dims: Vec<usize>) -> Term<'a> {
    answer(env, || match Tensor::decode("tensor", tensor)? {
        Tensor::Device(buffer) => Ok(buffer_term(env, buffer.0.reshape(&dims)?)),
        _ => Err(Error::new(Kind::Argument, "tensor")
            .expected("a tensor on a device")
            .got("one on the host")
            .hint("Move it there with to_device")),
    })
}

/// For tests: the bytes of a device's memory that are in use.
#[rustler::nif(schedule = "DirtyIo")]
fn debug_device_bytes(env: Env, ordinal: usize) -> Term {
    answer(env, || Ok(Device::get(ordinal)?.live_bytes()))
}

/// For tests: a panic.
#[rustler::nif]
fn debug_panic(env: Env, text: String) -> Term {
    answer(env, || -> Result<()> { panic!("{text}") })
}

/// For tests: a panic while the answer is encoded.
#[rustler::nif]
fn debug_panic_in_encode(env: Env) -> Term {
    struct Bomb;
    impl Encoder for Bomb {
        fn encode<'a>(&self, _env: Env<'a>) -> Term<'a> {
            panic!("in encode")
        }
    }
    answer(env, || Ok(Bomb))
}

/// For tests: marks a device lost, as an illegal address would.
#[rustler::nif(schedule = "DirtyIo")]
fn debug_lose_device(env: Env, ordinal: usize) -> Term {
    answer(env, || {
        Device::get(ordinal)?.lose("a test");
        Ok(())
    })
}
