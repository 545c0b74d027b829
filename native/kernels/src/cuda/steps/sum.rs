//! Sums over rows, in an order that depends on the sizes alone.

use crate::cuda::runtime::buffer::Buffer;
use crate::cuda::runtime::kernel::Source;
use crate::cuda::runtime::lane::Lane;
use crate::cuda::{launch_each, params, type_names};
use crate::error::Result;
use crate::tensor::{DType, Described};

const COLUMN_SUMS: Source<Params> = Source::new("column_sums", include_str!("column_sums.cu"));

/// Rows that one thread sums.
const TOGETHER: usize = 64;

params! {
    /// The kernel's parameters.
    struct Params {
        values: u64 as "const IN*",
        sums: u64 as "OUT*",
        rows: i64,
        columns: i64,
        chunk: i64,
        chunks: i64,
    }
}

/// Queues the column sums of a matrix of `rows` rows as long as `sums`. Sums are accumulated in the type of the
/// arithmetic and rounded once. Uses the lane's scratch memory.
pub fn columns(values: &Buffer, rows: usize, sums: &Buffer, lane: &Lane) -> Result<()> {
    let dtype = values.spec().dtype;
    let columns = sums.spec().shape.elements();
    let chunks = rows.div_ceil(TOGETHER);
    let partial = lane.scratch((chunks * columns * dtype.wide().size()).max(1))?;
    let ends = (lane.address(values)?, lane.address(sums)?);
    pass(lane, [dtype, dtype.wide()], [ends.0, partial], [rows, columns, TOGETHER, chunks])?;
    pass(lane, [dtype.wide(), sums.spec().dtype], [partial, ends.1], [chunks, columns, chunks, 1])
}

fn pass(lane: &Lane, types: [DType; 2], [values, sums]: [u64; 2], sizes: [usize; 4]) -> Result<()> {
    let [from, to] = types.map(|dtype| type_names(dtype).0);
    let options = format!("-DIN={from} -DOUT={to} -DREAL={}", type_names(types[0]).1);
    let kernel = lane.device().kernel(&COLUMN_SUMS, &options)?;
    let count = sizes[1] * sizes[3];
    let [rows, columns, chunk, chunks] = sizes.map(|size| size as i64);
    let params = Params { values, sums, rows, columns, chunk, chunks };
    // SAFETY: the matrices have these sizes.
    unsafe { launch_each(lane, &kernel, count, &params) }
}
