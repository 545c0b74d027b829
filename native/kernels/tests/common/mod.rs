//! What the integration tests share.

#![allow(dead_code)]

use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::tensor::{DType, Owned};

/// Runs an op on the CPU into poisoned outputs.
pub fn run<O: Op>(options: &O::Options, inputs: &Named<Owned>, exec: &Exec) -> Result<Named<Owned>> {
    let views = inputs.map(Owned::view);
    let problem = op::check::<O>(&op::specs(&views), options)?;
    let specs: Vec<_> = O::outputs(&problem)?.into_iter().collect();
    let mut outputs: Vec<_> = specs.into_iter().map(|(name, spec)| (name, Owned::poisoned(spec))).collect();
    let views_mut = outputs.iter_mut().map(|(name, tensor)| (name.clone(), tensor.view_mut())).collect();
    op::run_cpu::<O>(options, &views, views_mut, exec)?;
    Ok(outputs.into_iter().collect())
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
