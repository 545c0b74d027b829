//! Inputs of the cumulative scans.

use super::check::noise;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::tensor::{Described, Owned, Spec};

/// Sizes that are odd, prime, empty or wide, and sizes with few channels, for which time is cut into chunks.
pub const SIZES: [[usize; 4]; 13] = [
    [1, 1, 1, 1],
    [2, 3, 5, 3],
    [1, 2, 17, 16],
    [3, 1, 33, 31],
    [2, 2, 8, 97],
    [1, 1, 3, 2051],
    [5, 9, 12, 64],
    [1, 2, 230, 300],
    [1, 1, 70, 1000],
    [0, 3, 4, 5],
    [2, 0, 4, 5],
    [2, 3, 0, 5],
    [2, 3, 4, 0],
];

/// A sequence of that name with values in `low` to `high`, one in eight of which is 0 or another `special` number, and
/// an initial state if its size is given.
pub fn inputs(
    name: &'static str,
    sizes: [usize; 4],
    range: (f64, f64),
    special: f64,
    start: Option<f64>,
) -> Named<Owned> {
    let [b, h, _, w] = sizes;
    let (values, choice) = (noise(1, &sizes, range.0, range.1), noise(2, &sizes, 0.0, 1.0));
    let mut chosen = values.view().to_f64().into_iter().zip(choice.view().to_f64());
    let value = |_| chosen.next().map_or(0.0, |(value, choice)| if choice < 0.125 { special } else { value });
    let mut inputs: Named<Owned> = [(name, Owned::from_fn(values.spec(), value))].into_iter().collect();
    if let Some(size) = start {
        inputs.push("initial_state", noise(3, &[b, h, w], -size, size));
    }
    inputs
}

/// The tensor with time reversed.
pub fn flipped(of: &Owned) -> Owned {
    let values = of.view().to_f64();
    let flipped = values.slice_each_axis(|axis| {
        let step = if axis.axis.index() == 2 { -1 } else { 1 };
        ndarray::Slice::new(0, None, step)
    });
    let mut values = flipped.iter().copied();
    Owned::from_fn(of.spec(), |_| values.next().unwrap())
}

/// A sequence of one channel.
pub fn column(spec: Spec, values: &[f64]) -> Owned {
    Owned::from_fn(spec, |i| values[i % values.len()])
}
