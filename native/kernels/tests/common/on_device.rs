//! Checks that the tests of every op on CUDA make: agreement with the f64 reference, and equal bits in repeated runs.

use super::check::{backward_inputs, noise};
use super::{bits, cast, reference, run_cuda, worst};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::tensor::{DType, Described, Owned};

/// Checks `O` on the device in every type against the reference, and two runs for equal bits. 16-bit results may be off
/// by `roundings` successive roundings.
pub fn agrees<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>, roundings: f64) {
    agrees_by::<O>(device, options, inputs, |_| roundings);
}

/// Like [`agrees`], with `roundings` by the names of the results.
pub fn agrees_by<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>, roundings: impl Fn(&str) -> f64) {
    for &dtype in O::STORAGE {
        agrees_in::<O>(device, options, &cast(op::about::<O>(), inputs, dtype), dtype, &roundings);
    }
}

/// Checks `O` on the device in one type.
fn agrees_in<O: Op>(
    device: &Device,
    options: &O::Options,
    inputs: &Named<Owned>,
    dtype: DType,
    roundings: impl Fn(&str) -> f64,
) {
    let expected = reference::<O>(options, inputs);
    let got = run_cuda::<O>(options, inputs, device).unwrap();
    let again = run_cuda::<O>(options, inputs, device).unwrap();
    assert_eq!(bits(&got), bits(&again), "{} {dtype}", O::NAME);
    for (name, expected) in expected.iter() {
        let off = off(got.get(name).unwrap(), expected, dtype, roundings(name));
        let specs = op::specs(inputs);
        assert!(off <= 1.0, "{} {name} is off by {off} times the tolerance: {dtype} {specs:?}", O::NAME);
    }
}

/// Like [`agrees`], for the gradient `B` of `F`, whose outputs are computed in each type.
pub fn gradients_agree<F: Op, B: Op<Options = F::Options>>(
    device: &Device,
    options: &F::Options,
    inputs: &Named<Owned>,
    roundings: f64,
) {
    for &dtype in F::STORAGE {
        let inputs = backward_inputs::<F, B>(options, &cast(op::about::<F>(), inputs, dtype));
        agrees_in::<B>(device, options, &inputs, dtype, |_| roundings);
    }
}

/// The error of an op's result in that storage type, in multiples of its tolerance.
pub fn off(got: &Owned, expected: &Owned, dtype: DType, roundings: f64) -> f64 {
    let (relative, of_largest) = match (got.spec().dtype, dtype) {
        (DType::F64, _) => (1e-10, 1e-11),
        (DType::F32, DType::F32) => (2e-5, 1e-5),
        (_, DType::Bf16) => (4e-3, 4e-3 * roundings + 1e-5),
        (_, _) => (5e-4, 5e-4 * roundings + 1e-5),
    };
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    worst(got, expected, relative, of_largest * largest)
}

/// Like [`agrees`], for an op and its gradient.
pub fn both<F: Op, B: Op>(device: &Device, options: (&F::Options, &B::Options), inputs: &Named<Owned>, roundings: f64) {
    agrees::<F>(device, options.0, inputs, roundings);
    agrees::<B>(device, options.1, &backward_inputs::<F, B>(options.0, inputs), roundings);
}

/// Noise, by name, shape and range.
pub fn named<const N: usize>(shapes: [(&'static str, &[usize], f64, f64); N]) -> Named<Owned> {
    shapes.iter().zip(1..).map(|(&(name, dims, low, high), seed)| (name, noise(seed, dims, low, high))).collect()
}
