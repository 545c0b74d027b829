//! Elementwise operations.

use crate::base::activation::Activation;
use crate::base::elementwise::{DECAY_ENDS, Map};
use crate::cuda::runtime::buffer::Buffer;
use crate::cuda::runtime::kernel::Source;
use crate::cuda::runtime::lane::Lane;
use crate::cuda::{grid_size, params, types};
use crate::error::Result;
use crate::tensor::Described;

const ELEMENTWISE: Source<Params> = Source::new(
    "elementwise",
    concat!(
        include_str!("../include/activation.cu"),
        include_str!("../include/pack.cu"),
        include_str!("elementwise.cu")
    ),
);

/// The largest number of inputs.
const MOST: usize = 4;

/// Threads in a block.
const THREADS: usize = 256;

/// Bytes of one vector load or store; addresses must be aligned to it.
pub const PACK: usize = 16;

params! {
    /// The kernel's parameters.
    #[derive(Default)]
    struct Params {
        inputs: [u64; MOST] as "const STORAGE*",
        to: u64 as "STORAGE*",
        count: i64,
        factor: f64,
    }
}

/// Queues a map over tensors of equal type and shape.
pub fn map(map: Map, inputs: &[&Buffer], to: &Buffer, lane: &Lane) -> Result<()> {
    assert!(inputs.len() <= MOST && inputs.iter().all(|input| input.spec() == to.spec()), "inputs like the output");
    let count = to.spec().shape.elements();
    if count == 0 {
        return Ok(());
    }
    let mut params = Params { to: lane.address(to)?, count: count as i64, factor: map.factor(), ..Params::default() };
    for (at, input) in params.inputs.iter_mut().zip(inputs) {
        *at = lane.address(input)?;
    }
    let (number, function) = numbers(map);
    let dtype = to.spec().dtype;
    let vec = pack(dtype.size(), &[&params.inputs[..], &[params.to]].concat());
    // Keeps as many bytes in flight as one input with four packs.
    let together = 4 / inputs.len().next_power_of_two();
    let [low, high] = DECAY_ENDS;
    let options = format!(
        "{} -DMAP={number} -DFN={function} -DINPUTS={} -DMOST={MOST} -DVEC={vec} -DTOGETHER={together} \
         -DLOW={low:?} -DHIGH={high:?}",
        types(dtype),
        inputs.len()
    );
    let kernel = lane.device().kernel(&ELEMENTWISE, &options)?;
    let grid = grid_size(count.div_ceil(THREADS * vec * together))?;
    // SAFETY: the addresses are valid on this lane for `count` elements each.
    unsafe { lane.launch(&kernel, [grid, 1, 1], THREADS as u32, &params) }
}

/// Elements of `size` bytes per vector access: a whole pack if all `addresses` are aligned to it, else 1. Strides in
/// bytes can be passed as addresses too.
pub fn pack(size: usize, addresses: &[u64]) -> usize {
    if addresses.iter().all(|address| address.is_multiple_of(PACK as u64)) { PACK / size } else { 1 }
}

/// The index of a function in `activation.cu`; -1 is none.
pub fn function(activation: Option<Activation>) -> i32 {
    let at = Activation::ALL.iter().position(|&one| Some(one) == activation);
    at.map_or(-1, |at| at as i32)
}

fn numbers(map: Map) -> (u32, i32) {
    match map {
        Map::NegExp => (0, -1),
        Map::Product => (1, -1),
        Map::Sum => (2, -1),
        Map::Activate(f) => (3, function(Some(f))),
        Map::Slope(f) => (4, function(Some(f))),
        Map::SlopeTimes(f) => (5, function(Some(f))),
        Map::Gate(f) => (6, function(Some(f))),
        Map::GateSlope(f) => (7, function(Some(f))),
        Map::Decay => (8, -1),
        Map::DecaySlope => (9, -1),
        Map::Integrate => (10, -1),
        Map::Carry => (11, -1),
        Map::DifferenceTimes => (12, -1),
        Map::Scaled(_) => (13, -1),
        Map::PlusScaled(_) => (14, -1),
    }
}
