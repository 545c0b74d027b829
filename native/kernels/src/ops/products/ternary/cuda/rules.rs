//! Quantizers to ternary numbers and to bytes.

use super::{Found, Rules, THREADS, at};
use crate::cuda::{Buffer, Kernel, Lane, Source, grid_size, launch_each, types};
use crate::error::Result;
use crate::op::Named;
use crate::ops::products::cuda::{constants, text};
use crate::ops::products::ternary::problem::{Activations, LEAST_SCALE, Quantization, Rule, TWN, plane_bytes};
use crate::tensor::{DType, Described};
use std::sync::LazyLock;

const TEXT: &str = text!(["early"], "ternary/bytes", "ternary/rules");
const SIZES: Source<Rules> = Source::new("ternary_sizes", TEXT);
const THRESHOLD: Source<Rules> = Source::new("ternary_threshold", TEXT);
const CUT: Source<Rules> = Source::new("ternary_cut", TEXT);
const BYTES: Source<Rules> = Source::new("ternary_bytes", TEXT);
pub(super) const BITS: Source<Rules> = Source::new("ternary_bits", TEXT);

/// Threads of a block that prepares a row for products.
pub(super) const WIDE: u32 = 1024;

/// The most blocks of threads that prepare a row together.
pub(super) const MOST_PARTS: usize = 8;

/// What a kernel computes next: for absmean its threshold and scale; for twn its threshold, then its scale; or the
/// scale for a threshold given as `floor`.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Absmean,
    TwnThreshold,
    TwnScale,
    Given,
}

impl Stage {
    const ALL: [Stage; 4] = [Stage::Absmean, Stage::TwnThreshold, Stage::TwnScale, Stage::Given];
}

/// The numbers of stages as compiler options, made once.
static STAGES: LazyLock<String> = LazyLock::new(|| constants(&Stage::ALL));

/// The kernel of a source, with the options that all kernels with these parameters need.
pub(super) fn kernel(source: &Source<Rules>, dtype: DType, lane: &Lane) -> Result<Kernel<Rules>> {
    let options = format!(
        "{} {} -DLEAST_SCALE={LEAST_SCALE:?} -DTWN={TWN:?}f -DTHREADS={THREADS} -DWIDE={WIDE} -DMOST_PARTS={MOST_PARTS}",
        types(dtype),
        *STAGES
    );
    lane.device().kernel(source, &options)
}

/// Queues one block per row or part.
fn blocks(source: &Source<Rules>, count: usize, params: &Rules, dtype: DType, lane: &Lane) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let kernel = kernel(source, dtype, lane)?;
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { lane.launch(&kernel, [grid_size(count)?, 1, 1], THREADS, params) }
}

/// Queues the planes by thresholds, or by signs if there are none.
pub(super) fn cut(params: &Rules, dtype: DType, lane: &Lane) -> Result<()> {
    let kernel = kernel(&CUT, dtype, lane)?;
    // SAFETY: the op's checks prove that all sizes fit the buffers.
    unsafe { launch_each(lane, &kernel, params.rows as usize * plane_bytes(params.n as usize), params) }
}

/// Quantizes by a rule.
pub fn quantize(problem: &Quantization, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let (rows, parts) = (problem.rows, problem.scales());
    let sums = (rows * 16).next_multiple_of(256);
    let scratch = lane.scratch(sums + parts * 4)?;
    let mut params = Rules {
        x: at(inputs, "w", lane)?,
        sums: scratch,
        thresholds: scratch + sums as u64,
        scales: at(outputs, "scale", lane)?,
        planes: [at(outputs, "plane0", lane)?, at(outputs, "plane1", lane)?],
        rows: rows as i64,
        n: problem.n as i64,
        parts: parts as i64,
        floor: problem.options.threshold.unwrap_or_default() as f32,
        ..Rules::default()
    };
    let mut run = |source, count, stage| {
        params.stage = stage as i32;
        blocks(source, count, &params, problem.dtype, lane)
    };
    match problem.options.rule {
        Rule::Threshold => run(&THRESHOLD, parts, Stage::Given)?,
        Rule::Absmean => {
            run(&SIZES, rows, Stage::Absmean)?;
            run(&THRESHOLD, parts, Stage::Absmean)?;
        }
        Rule::Twn => {
            run(&SIZES, rows, Stage::Absmean)?;
            run(&THRESHOLD, parts, Stage::TwnThreshold)?;
            run(&SIZES, rows, Stage::TwnScale)?;
            run(&THRESHOLD, parts, Stage::TwnScale)?;
        }
    }
    cut(&params, problem.dtype, lane)
}

/// Quantizes activations, then reads back whether they were finite.
pub fn activations(
    problem: &Activations,
    inputs: &Named<&Buffer>,
    outputs: &Named<&Buffer>,
    lane: &Lane,
) -> Result<()> {
    let found = Found::new(lane)?;
    let x = *inputs.get("x")?;
    let params = Rules {
        x: lane.address(x)?,
        scales: at(outputs, "scale", lane)?,
        q: at(outputs, "q", lane)?,
        bad: lane.address(&found.0)?,
        rows: problem.rows as i64,
        n: problem.n as i64,
        floor: problem.floor,
        ..Rules::default()
    };
    blocks(&BYTES, problem.rows, &params, problem.dtype, lane)?;
    match found.read(lane)? {
        Some(at) => Err(problem.refuse(at, value(x, at, lane)?)),
        None => Ok(()),
    }
}

/// One element of a tensor, read back.
fn value(x: &Buffer, at: usize, lane: &Lane) -> Result<f32> {
    let one = x.reshape(&[x.spec().shape.elements()])?.rows(at..at + 1)?;
    Ok(lane.downloaded(&one)?.view().to_f64()[[0]] as f32)
}
