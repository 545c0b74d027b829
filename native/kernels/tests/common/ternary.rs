//! Ternary numbers for tests.

use super::Random;
use super::check::noise;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

/// Pseudorandom values of -1, 0 and 1.
pub fn values(seed: u64, dims: &[usize]) -> Owned {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Owned::from_fn(Spec::new(DType::I8, dims).unwrap(), |_| (3.0 * random.next()).floor() - 1.0)
}

/// Pseudorandom bytes: planes with sentinels among their cells, and with bits set past the end of rows.
pub fn bytes(seed: u64, dims: &[usize]) -> Owned {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Owned::from_fn(Spec::new(DType::U8, dims).unwrap(), |_| (256.0 * random.next()).floor())
}

/// Tensors by name.
pub fn named<const N: usize>(tensors: [(&'static str, Owned); N]) -> Named<Owned> {
    tensors.into_iter().collect()
}

/// The inputs of products: activations, weights in planes, a scale for each row, a bias.
pub fn product(rows: usize, n: usize, outs: usize) -> Named<Owned> {
    named([
        ("x", noise(1, &[rows, n], -2.0, 2.0)),
        ("plane0", bytes(2, &[outs, n.div_ceil(8)])),
        ("plane1", bytes(3, &[outs, n.div_ceil(8)])),
        ("w_scale", noise(4, &[outs], 0.1, 1.0)),
        ("bias", noise(5, &[outs], -1.0, 1.0)),
    ])
}
