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
    let (name, activation) = names(map);
    let dtype = to.spec().dtype;
    let vec = pack(dtype.size(), &[&params.inputs[..], &[params.to]].concat());
    // Keeps the bytes in flight constant: as many packs as for one input with four of them.
    let together = 4 / inputs.len().next_power_of_two();
    let [low, high] = DECAY_ENDS;
    let options = format!(
        "{} -DMAP={name} -DFN={} -DINPUTS={} -DMOST={MOST} -DVEC={vec} -DTOGETHER={together} \
         -DLOW={low:?} -DHIGH={high:?}",
        types(dtype),
        function(activation),
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

/// The function's name in `activation.cu`.
pub fn function(activation: Option<Activation>) -> &'static str {
    match activation {
        None => "Activation::None",
        Some(Activation::Sigmoid) => "Activation::Sigmoid",
        Some(Activation::Silu) => "Activation::Silu",
        Some(Activation::GeluTanh) => "Activation::GeluTanh",
        Some(Activation::GeluErf) => "Activation::GeluErf",
        Some(Activation::Softplus) => "Activation::Softplus",
        Some(Activation::Relu) => "Activation::Relu",
    }
}

/// The map's name in `elementwise.cu`, and the function that it applies.
fn names(map: Map) -> (&'static str, Option<Activation>) {
    match map {
        Map::NegExp => ("negated_exp", None),
        Map::Product => ("product", None),
        Map::Sum => ("sum", None),
        Map::Scaled(_) => ("scaled", None),
        Map::PlusScaled(_) => ("plus_scaled", None),
        Map::Activate(f) => ("activated", Some(f)),
        Map::Slope(f) => ("slope_of", Some(f)),
        Map::SlopeTimes(f) => ("slope_times", Some(f)),
        Map::Gate(f) => ("gated", Some(f)),
        Map::GateSlope(f) => ("gate_slope", Some(f)),
        Map::Decay => ("decay", None),
        Map::DecaySlope => ("decay_slope", None),
        Map::Integrate => ("integrated", None),
        Map::Carry => ("carried", None),
        Map::DifferenceTimes => ("difference_times", None),
    }
}
