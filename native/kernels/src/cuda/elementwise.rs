//! What is done element by element between the ops of a larger one.

use super::buffer::Buffer;
use super::kernel::Source;
use super::lane::Lane;
use super::{launch_each, types};
use crate::error::Result;
use crate::place::Map;
use crate::tensor::Described;

const ELEMENTWISE: Source = Source { name: "elementwise", text: include_str!("elementwise.cu") };

/// The most inputs there can be.
const MOST: usize = 4;

/// The kernel's parameters; the same struct is declared in `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    inputs: [u64; MOST],
    to: u64,
    count: i64,
    columns: i64,
    terms: i64,
}

/// Queues a map, from tensors of one type and shape to another of them.
pub fn map(map: Map, inputs: &[&Buffer], to: &Buffer, lane: &Lane) -> Result<()> {
    assert!(inputs.len() <= MOST && inputs.iter().all(|input| input.spec() == to.spec()), "inputs like the output");
    let number = match map {
        Map::NegExp => 0,
        Map::Product => 1,
        Map::Sum => 2,
    };
    run(number, inputs, to, 1, lane)
}

/// Queues adding the same row to all rows of a tensor in the type of the arithmetic, rounded to the type
/// of `to`, which may be that tensor.
pub fn add_row(wide: &Buffer, row: &Buffer, to: &Buffer, lane: &Lane) -> Result<()> {
    assert!(wide.spec().dtype == to.spec().dtype.wide() && wide.spec().shape == to.spec().shape);
    run(3, &[wide, row], to, row.spec().shape.elements(), lane)
}

fn run(map: u32, inputs: &[&Buffer], to: &Buffer, columns: usize, lane: &Lane) -> Result<()> {
    let count = to.spec().shape.elements();
    if count == 0 {
        return Ok(());
    }
    let options = format!("{} -DMAP={map}", types(to.spec().dtype));
    let kernel = lane.device().kernel(&ELEMENTWISE, &options)?;
    let (count, columns, terms) = (count as i64, columns as i64, inputs.len() as i64);
    let mut params = Params { to: lane.address(to)?, count, columns, terms, ..Params::default() };
    for (at, input) in params.inputs.iter_mut().zip(inputs) {
        *at = lane.address(input)?;
    }
    // SAFETY: Params is the struct that the kernel declares; the addresses are this lane's and of as
    // many elements.
    unsafe { launch_each(lane, &kernel, count as usize, &params) }
}
