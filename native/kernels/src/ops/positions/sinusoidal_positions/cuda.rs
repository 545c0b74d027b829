//! Sinusoidal positions on CUDA.

use super::Problem;
use crate::cuda::{Buffer, Lane, Source, THREADS, pack, params, types};
use crate::error::Result;
use crate::ops::positions::rope::cuda::grid;

const ADD: Source<Params> = Source::new(
    "sinusoidal_positions",
    concat!(include_str!("../../../cuda/include/pack.cu"), include_str!("../rope/angle.cu"), include_str!("add.cu")),
);

params! {
    /// The kernel's parameters.
    struct Params {
        x: u64 as "const STORAGE*",
        y: u64 as "STORAGE*",
        rates: u64 as "const double*",
        batch: i64,
        length: i64,
        width: i64,
        first_position: f64,
    }
}

/// Queues the addition of sines and cosines.
pub fn add(problem: &Problem, x: &Buffer, y: &Buffer, lane: &Lane) -> Result<()> {
    let &Problem { batch, length, width, ref angles, .. } = problem;
    if batch * length * width == 0 {
        return Ok(());
    }
    let rates = lane.device().table(&angles.rates)?;
    let (x, y) = (lane.address(x)?, lane.address(y)?);
    let size = problem.x.dtype.size();
    let vec = pack(size, &[x, y, (width * size) as u64]);
    let params = Params {
        x,
        y,
        rates: lane.address(&rates)?,
        batch: batch as i64,
        length: length as i64,
        width: width as i64,
        first_position: angles.first_position,
    };
    let options = format!("{} -DVEC={vec}", types(problem.x.dtype));
    let kernel = lane.device().kernel(&ADD, &options)?;
    let grid = grid(width / vec * length, batch, problem.x.dtype)?;
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}
