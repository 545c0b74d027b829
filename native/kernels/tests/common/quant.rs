//! Inputs for the block formats: difficult rows to quantize, and weights of arbitrary bytes.

use super::Random;
use super::check::noise;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::products::blocks::Format;
use sidewinder_kernels::tensor::{DType, Owned, Spec};

/// Rows of blocks, each of another kind: all magnitudes of f32, ties, zeros, subnormal numbers.
pub fn hard_rows(seed: u64, rows: usize, blocks: usize) -> Owned {
    let mut random = Random(seed);
    let spec = Spec::new(DType::F32, &[rows, blocks * 32]).unwrap();
    Owned::from_fn(spec, |at| {
        let v = 2.0 * random.next() - 1.0;
        match at / 32 % 7 {
            0 => v,
            // Integer and half-integer multiples of the scale.
            1 => [127.0, -127.0, 0.5, 63.5, -1.5, 2.5, 3.0, -0.5][at % 8],
            2 => [8.0, -8.0, 0.5, 1.5, -1.5, 2.5, 3.0, -0.5][at % 8],
            3 => v * 2f64.powi((at / 224 % 60) as i32 - 40),
            4 => [0.0, -0.0][at % 2],
            5 => v * 1e-39,
            _ => {
                if at % 32 == 7 {
                    -1e5
                } else {
                    v
                }
            }
        }
    })
}

/// Weights of arbitrary bytes, with small scales of either sign.
pub fn weights(seed: u64, format: Format, outputs: usize, inputs: usize) -> Owned {
    let mut random = Random(seed);
    let spec = Spec::new(DType::U8, &[outputs, format.row_bytes(inputs)]).unwrap();
    let scales = [0x1c, 0xa2, 0x25, 0x02];
    Owned::from_fn(spec, |at| match at % format.bytes() {
        1 => scales[(4.0 * random.next()) as usize] as f64,
        // -128, which our quantizer never writes in Q8_0.
        j if j % 11 == 3 => 128.0,
        _ => (256.0 * random.next()).floor(),
    })
}

/// Inputs of a product, with or without a bias.
pub fn product(format: Format, dims: &[usize], outputs: usize, bias: bool) -> Named<Owned> {
    let inputs = *dims.last().unwrap();
    let mut all: Named<Owned> =
        [("x", noise(5, dims, -2.0, 2.0)), ("w", weights(9, format, outputs, inputs))].into_iter().collect();
    all.extend_with("b", bias.then(|| noise(6, &[outputs], -1.0, 1.0)));
    all
}

/// Rows of x, outputs, and blocks per row: empty sizes, 1, primes, and sizes just above those of vectors and tiles.
pub const SIZES: [(usize, usize, usize); 14] = [
    (0, 2, 3),
    (2, 0, 3),
    (2, 3, 0),
    (1, 1, 1),
    (1, 37, 67),
    (2, 2, 33),
    (3, 5, 16),
    (4, 4, 17),
    (7, 3, 130),
    (33, 9, 31),
    (65, 2, 5),
    (17, 0, 3),
    (17, 35, 40),
    (48, 16, 18),
];
