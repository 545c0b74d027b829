//! Dot products of rows of planes, column sums, proofs by them, and the largest element of a row.

use super::{Found, THREADS, at};
use crate::cuda::{Buffer, Lane, Source, grid_size, launch_each, params, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::cuda::text;
use crate::ops::products::ternary::problem::{Pairs, Proof, Rows, Weights, plane_bytes};
use crate::tensor::DType;

const SUMS: &str = text!([], "ternary/sums");
const DOT: Source<Sums> = Source::new("ternary_dot", SUMS);
const COLUMNS: Source<Sums> = Source::new("ternary_columns", SUMS);
const PROOF: Source<Sums> = Source::new("ternary_proof", SUMS);
const ARGMAX: Source<Sums> = Source::new("argmax", SUMS);

/// Rows of a column that one thread sums.
const PART: usize = 512;

params! {
    /// The parameters of `sums.cu`.
    #[derive(Default)]
    struct Sums {
        a: [u64; 2] as "const unsigned char*",
        b: [u64; 2] as "const unsigned char*",
        acc: u64 as "const int*",
        columns: u64 as "const int*",
        xq: u64 as "const signed char*",
        x: u64 as "const STORAGE*",
        to: u64 as "int*",
        difference: u64 as "i64*",
        bad: u64 as "unsigned long long*",
        rows: i64,
        n: i64,
        outs: i64,
        bytes: i64,
        part: i64,
    }
}

/// Queues `threads` threads.
fn each(source: &Source<Sums>, threads: usize, params: &Sums, dtype: DType, lane: &Lane) -> Result<()> {
    let kernel = lane.device().kernel(source, &types(dtype))?;
    // SAFETY: the ops' checks prove that all sizes fit the buffers.
    unsafe { launch_each(lane, &kernel, threads, params) }
}

/// Products of rows of planes.
pub fn dot(problem: &Pairs, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let of = |name| at(inputs, name, lane);
    let params = Sums {
        a: [of("a0")?, of("a1")?],
        b: [of("b0")?, of("b1")?],
        to: at(outputs, "dot", lane)?,
        rows: problem.rows as i64,
        bytes: problem.bytes as i64,
        ..Sums::default()
    };
    each(&DOT, problem.rows * 32, &params, DType::F32, lane)
}

/// Sums of columns.
pub fn column_sums(problem: &Weights, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Weights { rows, n } = *problem;
    let to = *outputs.get("column_sums")?;
    lane.fill(to, 0)?;
    if rows * n == 0 {
        return Ok(());
    }
    // The y size of a grid is limited to 65535.
    let part = rows.div_ceil(32768).max(PART.min(rows));
    let params = Sums {
        a: [at(inputs, "plane0", lane)?, at(inputs, "plane1", lane)?],
        to: lane.address(to)?,
        rows: rows as i64,
        n: n as i64,
        bytes: plane_bytes(n) as i64,
        part: part as i64,
        ..Sums::default()
    };
    let kernel = lane.device().kernel(&COLUMNS, &types(DType::F32))?;
    let grid = [grid_size(n.div_ceil(THREADS as usize))?, rows.div_ceil(part) as u32, 1];
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { lane.launch(&kernel, grid, THREADS, &params) }
}

/// Verifies sums, then reads back whether they are right.
pub fn verify_sums(problem: &Proof, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let found = Found::new(lane)?;
    let difference = *outputs.get("difference")?;
    let params = Sums {
        acc: at(inputs, "acc", lane)?,
        columns: at(inputs, "column_sums", lane)?,
        xq: at(inputs, "xq", lane)?,
        difference: lane.address(difference)?,
        bad: lane.address(&found.0)?,
        rows: problem.rows as i64,
        n: problem.n as i64,
        outs: problem.outs as i64,
        ..Sums::default()
    };
    each(&PROOF, problem.rows * 32, &params, DType::F32, lane)?;
    match found.read(lane)? {
        Some(row) => Err(problem.refuse(row, lane.downloaded(difference)?.view().slice::<i64>()?[row])),
        None => Ok(()),
    }
}

/// The index of the largest element of each row.
pub fn argmax(problem: &Rows, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let rows = problem.shape.elements() / problem.n;
    let params = Sums {
        x: at(inputs, "x", lane)?,
        to: at(outputs, "class", lane)?,
        rows: rows as i64,
        n: problem.n as i64,
        ..Sums::default()
    };
    each(&ARGMAX, rows, &params, problem.dtype, lane)
}
