//! Rotation on CUDA.

use super::{Pairing, Problem};
use crate::cuda::{Buffer, Lane, Source, THREADS, grid_size, pack, params, types};
use crate::error::Result;
use crate::tensor::DType;

const ROTATE: Source<Params> = Source::new(
    "rope",
    concat!(include_str!("../../../cuda/include/pack.cu"), include_str!("angle.cu"), include_str!("rotate.cu")),
);

/// A grid in which `threads` threads cover all positions, and the y axis divides the `rows` at each position: a thread
/// computes its angles once for several rows. The total number of threads is the fastest one on an H200. 16-bit
/// elements take more work per byte and so more threads; for other types more threads would only access memory in a
/// worse order.
pub fn grid(threads: usize, rows: usize, dtype: DType) -> Result<[u32; 3]> {
    let most: usize = if dtype.size() == 2 { 1 << 19 } else { 1 << 16 };
    let shares = most.div_ceil(threads).min(rows).min(65535);
    Ok([grid_size(threads.div_ceil(THREADS as usize))?, shares as u32, 1])
}

params! {
    /// The kernel's parameters.
    struct Params {
        x: u64 as "const STORAGE*",
        y: u64 as "STORAGE*",
        rates: u64 as "const double*",
        inner: i64,
        length: i64,
        rows: i64,
        width: i64,
        first_position: f64,
        sign: f64,
    }
}

/// Queues the rotation by the angles times `sign`.
pub fn rotate(problem: &Problem, sign: f64, x: &Buffer, y: &Buffer, lane: &Lane) -> Result<()> {
    let Problem { inner, length, outer, width, .. } = *problem;
    let (pairs, rows) = (width / 2, outer * inner);
    if pairs * length * rows == 0 {
        return Ok(());
    }
    let rates = lane.device().table(&problem.angles.rates)?;
    let (x, y) = (lane.address(x)?, lane.address(y)?);
    let size = problem.x.dtype.size();
    let vec = pack(size, &[x, y, (pairs * size) as u64]);
    let params = Params {
        x,
        y,
        rates: lane.address(&rates)?,
        inner: inner as i64,
        length: length as i64,
        rows: rows as i64,
        width: width as i64,
        first_position: problem.angles.first_position,
        sign,
    };
    let interleaved = u32::from(problem.pairing == Pairing::Interleaved);
    let options = format!("{} -DINTERLEAVED={interleaved} -DVEC={vec}", types(problem.x.dtype));
    let kernel = lane.device().kernel(&ROTATE, &options)?;
    let grid = grid(pairs / vec * length, rows, problem.x.dtype)?;
    // SAFETY: the op's checks prove that the buffers have these sizes.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}
