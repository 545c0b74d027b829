//! Sinusoidal positions on CUDA.

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, THREADS, types};
use crate::error::Result;
use crate::rope::cuda::grid;

const ADD: Source = Source { name: "sinusoidal_positions", text: include_str!("add.cu") };

/// The kernel's parameters; the same struct is declared in `add.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    y: u64,
    rates: u64,
    batch: i64,
    length: i64,
    width: i64,
    first_position: f64,
}

/// Queues the sum with sines and cosines.
pub fn add(problem: &Problem, x: &Buffer, y: &Buffer, lane: &Lane) -> Result<()> {
    let &Problem { batch, length, width, ref angles, .. } = problem;
    if batch * length * width == 0 {
        return Ok(());
    }
    let rates = angles.rates_on(lane)?;
    let params = Params {
        x: lane.address(x)?,
        y: lane.address(y)?,
        rates: lane.address(&rates)?,
        batch: batch as i64,
        length: length as i64,
        width: width as i64,
        first_position: angles.first_position,
    };
    let kernel = lane.device().kernel(&ADD, &types(problem.x.dtype))?;
    let grid = grid(angles.rates.len() * length, batch)?;
    // SAFETY: Params is the struct that the kernel declares; the op's checks prove that the buffers have
    // these sizes.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}
