//! Tensors of more than 2^31 elements, where 32-bit offsets would wrap. They need 14 GB of memory, 9 GB on the GPU, and
//! some seconds: `cargo test --release --test huge -- --ignored`.

mod common;

use half::bf16;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::scan::cumulative::{self, CumprodScan};
use sidewinder_kernels::ops::scan::selective_scan::{Options, SelectiveScan};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

const CHANNELS: usize = 16;

fn bf16_tensor(dims: &[usize], value: impl Fn(usize) -> f32) -> Owned {
    let mut tensor = Owned::poisoned(Spec::new(DType::Bf16, dims).unwrap());
    let values = tensor.view_mut().slice::<bf16>().unwrap();
    values.iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(value(i)));
    tensor
}

/// A scan of `length` steps whose values depend on the distance of a step from the end.
fn inputs(length: usize) -> Named<Owned> {
    let from_end = |i: usize, width: usize| (length * width - i) % 251;
    let value = |width: usize| move |i: usize| from_end(i, width) as f32 / 128.0 - 1.0;
    [
        ("x", bf16_tensor(&[1, length, CHANNELS], value(CHANNELS))),
        ("dt", bf16_tensor(&[1, length, CHANNELS], |_| 1.0)),
        // After 20 steps nothing remains of a state.
        ("A", Owned::from_fn(Spec::new(DType::F32, &[CHANNELS, 1]).unwrap(), |_| -5.0)),
        ("B", bf16_tensor(&[1, length, 1], value(1))),
        ("C", bf16_tensor(&[1, length, 1], value(1))),
    ]
    .into_iter()
    .collect()
}

fn last_rows(length: usize, rows: usize) -> Vec<bf16> {
    let outputs = common::run::<SelectiveScan>(&Options::default(), &inputs(length), &Exec::default()).unwrap();
    let y = outputs.get("y").unwrap().view();
    y.slice::<bf16>().unwrap()[(length - rows) * CHANNELS..].to_vec()
}

#[test]
#[ignore = "needs 14 GB of memory"]
fn the_end_of_a_huge_tensor_is_right() {
    let huge = (1 << 31) / CHANNELS + 5;
    assert_eq!(last_rows(huge, 64), last_rows(100, 64));
}

/// The last rows of a cumulative product in either direction. Factors are powers of 2 in these rows and 1 before, so
/// that products are exact in any order.
fn last_products(
    length: usize,
    rows: usize,
    run: impl Fn(&cumulative::Options, &Named<Owned>) -> Named<Owned>,
) -> Vec<Vec<bf16>> {
    let value = |i: usize| match (length * CHANNELS - 1 - i) / CHANNELS {
        from_end if from_end < rows => [0.5, 1.0, 2.0, 0.25, 1.0, 2.0, 0.5][(from_end + i % CHANNELS) % 7],
        _ => 1.0,
    };
    let inputs = [("gamma", bf16_tensor(&[1, 1, length, CHANNELS], value))].into_iter().collect();
    let last = |reverse| {
        let outputs = run(&cumulative::Options { reverse, return_state: false }, &inputs);
        let y = outputs.get("y").unwrap().view();
        y.slice::<bf16>().unwrap()[(length - rows) * CHANNELS..].to_vec()
    };
    vec![last(false), last(true)]
}

#[test]
#[ignore = "needs 14 GB of memory"]
fn the_end_of_a_huge_product_is_right() {
    let huge = (1 << 31) / CHANNELS + 5;
    let on_cpu = |options: &_, inputs: &_| common::run::<CumprodScan>(options, inputs, &Exec::default()).unwrap();
    let expected = last_products(100, 64, on_cpu);
    assert_eq!(last_products(huge, 64, on_cpu), expected);
    let Some(device) = common::gpu() else { return };
    let on_gpu = |options: &_, inputs: &_| common::run_cuda::<CumprodScan>(options, inputs, &device).unwrap();
    assert_eq!(last_products(huge, 64, on_gpu), last_products(100, 64, on_gpu));
}
