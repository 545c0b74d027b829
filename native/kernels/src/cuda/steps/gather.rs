//! Gathers rows of a table, such as an embedding.

use crate::cuda::runtime::buffer::Buffer;
use crate::cuda::runtime::kernel::Source;
use crate::cuda::runtime::lane::Lane;
use crate::cuda::{launch_each, params};
use crate::error::Result;
use crate::tensor::{DType, Described, Spec};

const GATHER: Source<Params> = Source::new("gather", include_str!("gather.cu"));

params! {
    /// The kernel's parameters.
    struct Params {
        table: u64 as "const WORD*",
        rows: u64 as "const unsigned*",
        to: u64 as "WORD*",
        // Rows, and words of each.
        count: i64,
        words: i64,
    }
}

/// Queues copies of the rows with these indices, which the caller has checked against the table.
pub fn gather(table: &Buffer, rows: &[u32], to: &Buffer, lane: &Lane) -> Result<()> {
    let bytes = to.spec().bytes() / rows.len().max(1);
    // The widest word that divides a row.
    let (word, type_name) = [(16, "int4"), (4, "int"), (2, "short")]
        .into_iter()
        .find(|(word, _)| bytes.is_multiple_of(*word))
        .unwrap_or((1, "char"));
    let numbers = lane.temporary(Spec::new(DType::U8, &[size_of_val(rows)])?)?;
    lane.upload(bytemuck::cast_slice(rows), &numbers)?;
    let params = Params {
        table: lane.address(table)?,
        rows: lane.address(&numbers)?,
        to: lane.address(to)?,
        count: rows.len() as i64,
        words: (bytes / word) as i64,
    };
    let kernel = lane.device().kernel(&GATHER, &format!("-DWORD={type_name} -DSTORAGE=float -DREAL=float"))?;
    // SAFETY: the caller has checked that the rows exist.
    unsafe { launch_each(lane, &kernel, rows.len() * (bytes / word), &params) }
}
