//! The ops of memories on CUDA: against their f64 references, and with equal bits in repeated runs. Without a GPU each
//! test says so and passes, unless `SIDEWINDER_REQUIRE_CUDA=1`.

use crate::common;
use crate::common::check::{backward_inputs, noise};
use crate::common::{cast, gpu, reference, worst};
use sidewinder_kernels::cuda::Device;
use sidewinder_kernels::op::{self, Named, Op};
use sidewinder_kernels::ops::mm_rec::hds::query::{self, HdsQueryTopk};
use sidewinder_kernels::ops::mm_rec::hds::{self, HdsConstruct, HdsConstructBackward};
use sidewinder_kernels::ops::mm_rec::memory::write_long::{self, Policy, WriteLong};
use sidewinder_kernels::ops::mm_rec::memory::write_short::{self, Mode, WriteShort};
use sidewinder_kernels::ops::mm_rec::multi_memory_attention::{
    self, MultiMemoryAttention, MultiMemoryAttentionBackward,
};
use sidewinder_kernels::tensor::{DType, Described, Owned, Spec};

/// Checks `O` on the device in every type against the reference, and two runs for equal bits. 16-bit results may be off
/// by `roundings` successive roundings.
fn agrees<O: Op>(device: &Device, options: &O::Options, inputs: &Named<Owned>, roundings: f64) {
    for dtype in DType::FLOATS {
        let inputs = cast(op::about::<O>(), inputs, dtype);
        let expected = reference::<O>(options, &inputs);
        let got = common::run_cuda::<O>(options, &inputs, device).unwrap();
        let again = common::run_cuda::<O>(options, &inputs, device).unwrap();
        assert_eq!(common::bits(&got), common::bits(&again), "{} {dtype}", O::NAME);
        for (name, expected) in expected.iter() {
            let off = off(got.get(name).unwrap(), expected, dtype, roundings);
            let specs = op::specs(&inputs);
            assert!(off <= 1.0, "{} {name} is off by {off} times the tolerance: {dtype} {specs:?}", O::NAME);
        }
    }
}

/// The error of an op's result in that storage type, in multiples of its tolerance.
fn off(got: &Owned, expected: &Owned, dtype: DType, roundings: f64) -> f64 {
    let (relative, of_largest) = match (got.spec().dtype, dtype) {
        (DType::I32, _) => (0.0, 0.0),
        (DType::F64, _) => (1e-10, 1e-11),
        (DType::F32, DType::F32) => (2e-5, 2e-5),
        (_, DType::Bf16) => (4e-3, 4e-3 * roundings + 1e-5),
        (_, _) => (5e-4, 5e-4 * roundings + 1e-5),
    };
    let largest = expected.view().to_f64().fold(0.0f64, |m, v| m.max(v.abs()));
    // Where results cancel completely, only rounding errors remain.
    let floor = if roundings > 0.0 { 1e-2 * of_largest } else { 0.0 };
    worst(got, expected, relative, of_largest * largest + floor)
}

fn both<F: Op, B: Op<Options = F::Options>>(
    device: &Device,
    options: &F::Options,
    inputs: &Named<Owned>,
    roundings: f64,
) {
    agrees::<F>(device, options, inputs, roundings);
    agrees::<B>(device, options, &backward_inputs::<F, B>(options, inputs), roundings);
}

fn named<const N: usize>(shapes: [(&'static str, &[usize]); N]) -> Named<Owned> {
    shapes.iter().zip(1..).map(|(&(name, dims), seed)| (name, noise(seed, dims, -1.0, 1.0))).collect()
}

#[test]
fn the_hierarchy_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for ([batch, slots, width], levels, ratio, cursor) in [
        ([1, 1, 1], 3, 4, 0),
        ([2, 10, 17], 3, 4, 7),
        ([1, 1023, 31], 4, 4, 1000),
        ([3, 37, 97], 3, 2, 38),
        ([2, 64, 300], 2, 7, 0),
        ([2, 1024, 512], 3, 4, 77),
        ([0, 5, 3], 3, 4, 0),
        ([2, 5, 0], 3, 4, 1),
    ] {
        let bank: &[usize] = &[batch, slots, width];
        let options = hds::Options { levels, ratio, cursor };
        both::<HdsConstruct, HdsConstructBackward>(&device, &options, &named([("k", bank), ("v", bank)]), 0.0);
    }
}

#[test]
fn attention_over_a_memory_and_its_gradient_agree() {
    let Some(device) = gpu() else { return };
    for ([batch, length, width], of_memory, slots, heads) in [
        ([1, 1, 2], 1, 1, 1),
        ([2, 5, 6], 2, 4, 2),
        ([3, 7, 20], 1, 13, 5),
        ([2, 100, 64], 1, 64, 4),
        ([2, 65, 128], 2, 37, 2),
        ([0, 3, 4], 1, 2, 2),
        ([2, 0, 4], 1, 2, 2),
    ] {
        let bound = 1.0 / (width as f64).sqrt();
        let (row, memory): (&[usize], &[usize]) = (&[batch, length, width], &[of_memory, slots, width]);
        let mut inputs = named([("h", row), ("k_mem", memory), ("v_mem", memory)]);
        inputs.push("waq", noise(4, &[width; 2], -bound, bound));
        inputs.push("wao", noise(5, &[width; 2], -bound, bound));
        let options = multi_memory_attention::Options { heads };
        both::<MultiMemoryAttention, MultiMemoryAttentionBackward>(&device, &options, &inputs, 16.0);
        inputs.push("baq", noise(6, &[width], -1.0, 1.0));
        inputs.push("bao", noise(7, &[width], -1.0, 1.0));
        inputs.push("q_in", noise(8, row, -1.0, 1.0));
        both::<MultiMemoryAttention, MultiMemoryAttentionBackward>(&device, &options, &inputs, 16.0);
    }
}

#[test]
fn walks_down_the_hierarchy_agree() {
    let Some(device) = gpu() else { return };
    for (q, of_memory, slots, levels, ratio, top_k) in [
        ([1, 3, 4], 1, 16, 3, 4, 1),
        ([2, 5, 17], 2, 64, 3, 4, 2),
        ([2, 3, 31], 1, 48, 3, 4, 100),
        ([1, 9, 33], 1, 1024, 5, 4, 7),
        ([3, 1, 8], 3, 7, 1, 4, 1),
        ([2, 700, 5], 1, 3000, 2, 2, 600),
        ([0, 2, 4], 1, 16, 3, 4, 1),
        ([2, 3, 0], 2, 16, 3, 4, 1),
    ] {
        let memory: &[usize] = &[of_memory, slots, q[2]];
        let inputs = named([("q", &q), ("k", memory), ("v", memory)]);
        let options = query::Options { levels, ratio, top_k };
        // The order of nearly equal scores would depend on rounding; these inputs have none.
        agrees::<HdsQueryTopk>(&device, &options, &inputs, 0.0);
    }
}

/// Where scores are equal or NaN, the device selects the slots that the CPU selects.
#[test]
fn ties_and_nan_are_taken_as_on_the_cpu() {
    let Some(device) = gpu() else { return };
    let (nan, none) = (f64::NAN, f64::NEG_INFINITY);
    for keys in [
        vec![1.0; 64],
        vec![nan, 1.0, none, none, 0.0, 0.0, -0.0, -0.0],
        vec![nan; 8],
        vec![none, none, nan, nan, none, none, nan, 5.0],
        (0..1024).map(|i| f64::from(i / 2 % 3)).collect(),
    ] {
        for top_k in [1, 2, 3, 50] {
            let bank = Owned::from_fn(Spec::new(DType::F32, &[1, keys.len(), 1]).unwrap(), |i| keys[i]);
            let q = Owned::from_fn(Spec::new(DType::F32, &[1, 1, 1]).unwrap(), |_| 1.0);
            let inputs: Named<Owned> = [("q", q), ("k", bank.clone()), ("v", bank)].into_iter().collect();
            let options = query::Options { levels: 2, ratio: 2, top_k };
            let got = common::run_cuda::<HdsQueryTopk>(&options, &inputs, &device).unwrap();
            let expected = reference::<HdsQueryTopk>(&options, &inputs);
            for (name, expected) in expected.iter() {
                assert!(worst(got.get(name).unwrap(), expected, 1e-5, 1e-6) <= 1.0, "{name} {top_k} of {keys:?}");
            }
        }
    }
}

#[test]
fn writes_into_banks_agree() {
    let Some(device) = gpu() else { return };
    for [batch, slots, rows, width] in
        [[1, 1, 1, 1], [2, 4, 6, 5], [3, 10, 3, 17], [1, 5, 23, 31], [2, 1023, 2, 16], [0, 3, 2, 4], [2, 3, 0, 4]]
    {
        let inputs = named([("bank", &[batch, slots, width]), ("rows", &[batch, rows, width])]);
        for start in [0, slots - 1, usize::MAX] {
            let options = write_short::Options { start, mode: Mode::Ring };
            agrees::<WriteShort>(&device, &options, &inputs, 0.0);
        }
        let inputs = named([("bank", &[batch, slots, width]), ("summary", &[batch, width])]);
        for policy in [Policy::Ring, Policy::Ema, Policy::Broadcast] {
            let options = write_long::Options { policy, cursor: slots + 1, decay: 0.9 };
            agrees::<WriteLong>(&device, &options, &inputs, 0.0);
        }
    }
}
