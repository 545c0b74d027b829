//! Quantizers and conversions back.

use super::{even, types_and_format};
use crate::cuda::{Buffer, Lane, Source, launch_each, params};
use crate::error::Result;
use crate::ops::products::blocks::format::{BLOCK, Format};
use crate::ops::products::blocks::problem::Conversion;
use crate::ops::products::cuda::text;
use crate::tensor::{DType, Described, Spec};

const QUANTIZE: Source<Convert> = Source::new("blocks_quantize", text!([], "blocks/convert"));
const DEQUANTIZE: Source<Convert> = Source::new("blocks_dequantize", text!([], "blocks/convert"));

/// Threads of a block in the conversion back.
const QUARTERS: usize = 4;

params! {
    /// The parameters of `convert.cu`.
    #[derive(Default)]
    struct Convert {
        x: u64 as "const STORAGE*",
        q: u64 as "unsigned char*",
        back: u64 as "STORAGE*",
        first: u64 as "unsigned long long*", // the first value without a finite scale, or null
        blocks: i64,
    }
}

/// Queues a conversion, with `threads` for each block.
fn convert(
    lane: &Lane,
    source: &Source<Convert>,
    dtype: DType,
    format: Format,
    threads: usize,
    params: &Convert,
) -> Result<()> {
    let quantize = u32::from(source.name == QUANTIZE.name);
    let options = format!("{} -DQUANTIZE={quantize} -DLIMIT={:?}f", types_and_format(dtype, format), format.limit());
    let kernel = lane.device().kernel(source, &options)?;
    // SAFETY: the op's checks prove the number of blocks.
    unsafe { launch_each(lane, &kernel, params.blocks as usize * threads, params) }
}

/// Queues the quantizer. With checks, waits for their result.
pub fn quantize(problem: &Conversion, x: &Buffer, q: &Buffer, lane: &Lane) -> Result<()> {
    let count = problem.x.shape.elements();
    let first = lane.temporary(Spec::new(DType::I64, &[1])?)?;
    let mut params =
        Convert { x: lane.address(x)?, q: even("q", q, lane)?, blocks: (count / BLOCK) as i64, ..Convert::default() };
    if problem.unchecked {
        return convert(lane, &QUANTIZE, problem.x.dtype, problem.format, BLOCK, &params);
    }
    lane.fill(&first, 0xff)?;
    params.first = lane.address(&first)?;
    convert(lane, &QUANTIZE, problem.x.dtype, problem.format, BLOCK, &params)?;
    let at = lane.downloaded(&first)?.view().slice::<i64>()?[0];
    if at < 0 {
        return Ok(());
    }
    let value = x.reshape(&[count])?.rows(at as usize..at as usize + 1)?;
    let value = lane.downloaded(&value)?.view().to_f64().iter().fold(0.0, |_, &v| v as f32);
    Err(problem.format.refused(at as usize, value))
}

/// Queues the conversion back to floats of any type.
pub fn dequantize(format: Format, q: &Buffer, x: &Buffer, lane: &Lane) -> Result<()> {
    let blocks = (x.spec().shape.elements() / BLOCK) as i64;
    let params = Convert { q: even("q", q, lane)?, back: lane.address(x)?, blocks, ..Convert::default() };
    convert(lane, &DEQUANTIZE, x.spec().dtype, format, QUARTERS, &params)
}
