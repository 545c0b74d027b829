//! Rotation on CUDA.

use super::angles::Angles;
use super::{Pairing, Problem};
use crate::cuda::{Buffer, Lane, Source, THREADS, grid_size, types};
use crate::error::Result;
use crate::tensor::{DType, Spec};

const ROTATE: Source = Source { name: "rope", text: include_str!("rotate.cu") };

/// Threads that fill any GPU.
const FILLS: usize = 1 << 19;

/// Blocks for angles, each of which is computed once for as many rows as leave enough threads to fill a GPU.
pub fn grid(angles: usize, rows: usize) -> Result<[u32; 3]> {
    let shares = FILLS.div_ceil(angles).min(rows).min(65535);
    Ok([grid_size(angles.div_ceil(THREADS as usize))?, shares as u32, 1])
}

impl Angles {
    /// The rates where a lane's kernels can read them.
    pub fn rates_on(&self, lane: &Lane) -> Result<Buffer> {
        let rates = lane.temporary(Spec::new(DType::F64, &[self.rates.len()])?)?;
        lane.upload(bytemuck::cast_slice(&self.rates), &rates)?;
        Ok(rates)
    }
}

/// The kernel's parameters; the same struct is declared in `rotate.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    y: u64,
    rates: u64,
    inner: i64,
    length: i64,
    rows: i64,
    width: i64,
    first_position: f64,
    sign: f64,
}

/// Queues the rotation by the angles times `sign`.
pub fn rotate(problem: &Problem, sign: f64, x: &Buffer, y: &Buffer, lane: &Lane) -> Result<()> {
    let Problem { inner, length, outer, width, .. } = *problem;
    let (pairs, rows) = (width / 2, outer * inner);
    if pairs * length * rows == 0 {
        return Ok(());
    }
    let rates = problem.angles.rates_on(lane)?;
    let params = Params {
        x: lane.address(x)?,
        y: lane.address(y)?,
        rates: lane.address(&rates)?,
        inner: inner as i64,
        length: length as i64,
        rows: rows as i64,
        width: width as i64,
        first_position: problem.angles.first_position,
        sign,
    };
    let interleaved = u32::from(problem.pairing == Pairing::Interleaved);
    let kernel = lane.device().kernel(&ROTATE, &format!("{} -DINTERLEAVED={interleaved}", types(problem.x.dtype)))?;
    let grid = grid(pairs * length, rows)?;
    // SAFETY: Params is the struct that the kernel declares; the op's checks prove that the buffers have
    // these sizes.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}
