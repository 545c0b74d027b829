//! Inputs of the MM-Rec block.

use super::check::noise;
use sidewinder_kernels::op::Named;
use sidewinder_kernels::tensor::Owned;

/// The sizes of a block.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub batch: usize,
    pub length: usize,
    pub width: usize,
    pub inner: usize,
    pub hidden: usize,
    pub of_memory: usize,
    pub slots: usize,
}

/// Sizes for quick tests.
pub const SMALL: Sizes = Sizes { batch: 2, length: 5, width: 6, inner: 2, hidden: 7, of_memory: 2, slots: 9 };

/// Batch, length and width; inner and feed-forward width; batch and slots of the memory.
pub fn sizes([batch, length, width]: [usize; 3], [inner, hidden]: [usize; 2], [of_memory, slots]: [usize; 2]) -> Sizes {
    Sizes { batch, length, width, inner, hidden, of_memory, slots }
}

/// Inputs with weights as at initialisation; decay coefficients start small, so that states stay small.
pub fn inputs(sizes: Sizes, initial_state: bool) -> Named<Owned> {
    let Sizes { batch: b, length: l, width: d, inner: i, hidden: f, of_memory, slots: m } = sizes;
    let mut shapes: Vec<(&'static str, Vec<usize>)> = vec![
        ("x", vec![b, l, d]),
        ("k_mem", vec![of_memory, m, d]),
        ("v_mem", vec![of_memory, m, d]),
        ("n1", vec![d]),
        ("n2", vec![d]),
        ("wg1", vec![i, d]),
        ("bg1", vec![i]),
        ("wg2", vec![d, i]),
        ("bg2", vec![d]),
        ("wc1", vec![i, d]),
        ("bc1", vec![i]),
        ("wc2", vec![d, i]),
        ("bc2", vec![d]),
        ("wm", vec![d, 2 * d]),
        ("wf1", vec![f, d]),
        ("bf1", vec![f]),
        ("wf2", vec![d, f]),
    ];
    shapes.extend(["wq", "wk", "wv", "wz", "wgate", "waq", "wao"].map(|name| (name, vec![d, d])));
    shapes.extend(["bq", "bk", "bv", "bz", "bgate", "bm", "baq", "bao", "bf2"].map(|name| (name, vec![d])));
    if initial_state {
        shapes.push(("initial_state", vec![b, d]));
    }
    let tensor = |((name, dims), seed): (&(&'static str, Vec<usize>), u64)| {
        let (low, high) = match (*name, &dims[..]) {
            ("n1" | "n2", _) => (0.5, 1.5),
            ("bg2", _) => (-2.0, 0.0),
            (name, [_, inputs]) if name != "initial_state" => {
                let bound = 1.0 / (*inputs.max(&1) as f64).sqrt();
                (-bound, bound)
            }
            (_, [_]) => (-0.5, 0.5),
            _ => (-1.0, 1.0),
        };
        (*name, noise(seed, dims, low, high))
    };
    shapes.iter().zip(1..).map(tensor).collect()
}
