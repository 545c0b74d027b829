//! Ternary numbers on CUDA.
//!
//! Conversions handle one byte of the target per thread. Products read planes as words of 32 cells, whose codes are
//! made in registers and multiplied with four activations per instruction (`dp4a`). For many rows they run on tensor
//! cores, in teams of warps or warp by warp. Others count bits, by words (`popc`) or on tensor cores. Kernels detect
//! data that must be refused, and the host reads their finding back. So conversions, quantized activations and proofs
//! wait for the device; products do not.

mod boxes;
mod cells;
mod counts;
mod prepare;
mod products;
mod rules;
mod sums;
mod tile;
mod walk;

pub use cells::{convert, stats};
pub use products::matmul;
pub use rules::{activations, quantize};
pub use sums::{argmax, column_sums, dot, verify_sums};

use crate::cuda::{Buffer, Lane, params};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};

/// Threads of a block that handles one row.
const THREADS: u32 = 256;

/// Up to this number of rows, products of bytes count bits. With more rows, multiplying them on tensor cores is faster,
/// and signs are counted there.
const FEW: usize = 4;

/// Columns per chunk.
const CHUNK: usize = 512;

params! {
    /// The parameters of all products.
    #[derive(Default)]
    struct Params {
        planes: [u64; 2] as "const unsigned char*",
        x: u64 as "const STORAGE*",
        x_planes: [u64; 2] as "const unsigned char*",
        bits: u64 as "const signed char*",
        totals: u64 as "const int*",
        x_scale: u64 as "const float*",
        w_scale: u64 as "const float*",
        bias: u64 as "const float*",
        acc: u64 as "int*",
        y: u64 as "STORAGE*",
        // Quantized x in storage order, and its scales, if they are requested.
        q: u64 as "signed char*",
        x_scales: u64 as "float*",
        rows: i64,
        n: i64,
        outs: i64,
        stride: i64,
        scales: i64,
        floor: f32,
    }
}

params! {
    /// The parameters of `rules.cu`.
    #[derive(Default)]
    struct Rules {
        x: u64 as "const STORAGE*",
        sums: u64 as "double*", // of each row: sum of magnitudes, and their number
        thresholds: u64 as "float*", // one, or one for each row
        scales: u64 as "float*",
        planes: [u64; 2] as "unsigned char*",
        q: u64 as "signed char*", // in storage order
        // In product order: rows of `stride`, `tiles` tiles of 8 rows, or groups of `eights` eights.
        bits: u64 as "signed char*",
        totals: u64 as "int*", // sums of q
        bad: u64 as "unsigned long long*",
        rows: i64,
        n: i64,
        stride: i64,
        parts: i64,
        tiles: i64,
        eights: i64,
        floor: f32,
        stage: i32,
    }
}

fn at(tensors: &Named<&Buffer>, name: &str, lane: &Lane) -> Result<u64> {
    tensors.find(name).map_or(Ok(0), |buffer| lane.address(buffer))
}

/// A position reported by a kernel; all bits are set if there is none.
struct Found(Buffer);

impl Found {
    fn new(lane: &Lane) -> Result<Found> {
        let buffer = lane.temporary(Spec::new(DType::I64, &[1])?)?;
        lane.fill(&buffer, 0xff)?;
        Ok(Found(buffer))
    }

    /// The position, if any. Waits for the lane.
    fn read(&self, lane: &Lane) -> Result<Option<usize>> {
        let value = lane.downloaded(&self.0)?.view().slice::<i64>()?[0];
        Ok(usize::try_from(value).ok())
    }
}
