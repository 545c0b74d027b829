//! What the integration tests share.

#![allow(dead_code)]

use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::cuda::{self, Device};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::tensor::{DType, Owned, View, ViewMut};

/// Runs an op on the CPU into poisoned outputs.
pub fn run<O: Op>(options: &O::Options, inputs: &Named<Owned>, exec: &Exec) -> Result<Named<Owned>> {
    into_poisoned::<O>(options, inputs, |views, outputs| op::run_cpu::<O>(options, views, outputs, exec))
}

/// Runs an op on a CUDA device, from host memory into poisoned outputs.
pub fn run_cuda<O: Op>(options: &O::Options, inputs: &Named<Owned>, device: &Device) -> Result<Named<Owned>> {
    into_poisoned::<O>(options, inputs, |views, outputs| cuda::run_host::<O>(device, options, views, outputs))
}

fn into_poisoned<O: Op>(
    options: &O::Options,
    inputs: &Named<Owned>,
    run: impl FnOnce(&Named<View>, Named<ViewMut>) -> Result<()>,
) -> Result<Named<Owned>> {
    let call = op::Call::<O>::new(op::specs(inputs), options)?;
    let mut outputs = call.outputs().map(|spec| Owned::poisoned(*spec));
    let views_mut = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
    run(&inputs.map(Owned::view), views_mut)?;
    Ok(outputs)
}

/// The inputs in another storage type, each in the precision that its slot asks for.
pub fn cast<O: Op>(inputs: &Named<Owned>, storage: DType) -> Named<Owned> {
    let slot = |name: &str| O::INPUTS.iter().find(|slot| slot.name == name).expect("a known input");
    inputs.iter().map(|(name, t)| (name.clone(), t.cast(slot(name).precision.dtype(storage)))).collect()
}

/// How far `got` is from `expected`, where `atol + rtol * |expected|` is allowed: the largest
/// quotient, so that 1 or less passes. NaN for a finite value, or a wrong infinity, is infinite.
pub fn worst(got: &Owned, expected: &Owned, rtol: f64, atol: f64) -> f64 {
    let (got, expected) = (got.view().to_f64(), expected.view().to_f64());
    assert_eq!(got.shape(), expected.shape());
    let quotient = |(&got, &expected): (&f64, &f64)| match (got - expected).abs() {
        _ if got == expected || (got.is_nan() && expected.is_nan()) => 0.0,
        difference if difference.is_finite() => difference / (atol + rtol * expected.abs()),
        _ => f64::INFINITY,
    };
    got.iter().zip(&expected).map(quotient).fold(0.0, f64::max)
}

/// The first GPU, or none with a loud word about it.
pub fn gpu() -> Option<Device> {
    let found = cuda::devices().and_then(|devices| match devices.len() {
        0 => Ok(None),
        _ => Device::get(0).map(Some),
    });
    let required = std::env::var_os("SIDEWINDER_REQUIRE_CUDA").is_some_and(|value| value == "1");
    match found {
        Ok(Some(device)) => Some(device),
        other => {
            assert!(!required, "SIDEWINDER_REQUIRE_CUDA=1, but there is no CUDA device: {other:?}");
            println!("SKIPPED for want of a CUDA device: {}", other.map_or_else(|e| e.to_string(), |_| "none".into()));
            None
        }
    }
}
