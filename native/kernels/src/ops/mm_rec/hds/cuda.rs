//! The hierarchy on CUDA: one launch per level, one thread per element. Each level is computed from unrounded values.

use super::{Levels, NAMES, Problem};
use crate::cuda::{Buffer, Declared, Lane, Source, THREADS, grid_size, params, type_names, types};
use crate::error::Result;
use crate::op::Named;
use crate::tensor::{DType, Spec};

const POOL: Source<Pool> = Source::new("hds_pool", concat!(include_str!("window.cu"), include_str!("pool.cu")));
const SPREAD: Source<Spread> = Source::new("hds_spread", concat!(include_str!("window.cu"), include_str!("spread.cu")));

/// Addresses for keys and for values.
type Both = [u64; 2];

params! {
    /// The kernel's parameters.
    struct Pool {
        from: [u64; 2] as "const FROM*",
        to: [u64; 2] as "STORAGE*",
        wide: [u64; 2] as "REAL*", // the unrounded level; either `to` or `wide` may be null
        batch: i64,
        below: i64,
        slots: i64,
        width: i64,
        first: i64,
    }
}

params! {
    /// The kernel's parameters.
    struct Spread {
        given: [u64; 2] as "const STORAGE*",
        above: [u64; 2] as "const REAL*",
        to: [u64; 2] as "TO*",
        batch: i64,
        slots: i64,
        of_above: i64,
        width: i64,
        first: i64,
    }
}

/// Buffers for unrounded levels of keys and values, and their addresses.
fn wide(levels: &Levels, level: usize, banks: usize, dtype: DType, lane: &Lane) -> Result<(Buffer, Both)> {
    let spec = Spec::new(dtype.wide(), &[banks, levels.batch, levels.sizes[level], levels.width])?;
    let buffer = lane.temporary(spec)?;
    let at = lane.address(&buffer)?;
    let second = if banks == 2 { at + (spec.bytes() / 2) as u64 } else { 0 };
    Ok((buffer, [at, second]))
}

/// Queues a kernel with a thread for each of the `elements` of a level, for each of `banks` banks.
///
/// # Safety
/// As for [`Lane::launch`].
unsafe fn launch<P: Declared>(
    source: &Source<P::Any>,
    options: &str,
    elements: usize,
    banks: usize,
    params: &P,
    lane: &Lane,
) -> Result<()> {
    if elements == 0 {
        return Ok(());
    }
    let kernel = lane.device().kernel(source, options)?;
    let grid = [grid_size(elements.div_ceil(THREADS as usize))?, banks as u32, 1];
    // SAFETY: the caller's promise.
    unsafe { lane.launch(&kernel, grid, THREADS, params) }
}

/// Queues the levels.
pub fn forward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Problem { ref levels, dtype } = *problem;
    let at = |of: &Named<&Buffer>, name: &str| lane.address(of.get(name)?);
    let mut from = [at(inputs, "k")?, at(inputs, "v")?];
    let mut kept = None;
    for (level, [k, v, ..]) in (1..levels.sizes.len()).zip(NAMES) {
        let to = [at(outputs, k)?, at(outputs, v)?];
        let last = level + 1 == levels.sizes.len();
        let unrounded = match dtype == dtype.wide() || last {
            true => None,
            false => Some(wide(levels, level, 2, dtype, lane)?),
        };
        let wide = unrounded.as_ref().map_or([0; 2], |(_, at)| *at);
        pool(levels, level, (dtype, kept.is_some()), [from, to, wide], 2, lane)?;
        from = if unrounded.is_some() { wide } else { to };
        kept = unrounded;
    }
    Ok(())
}

/// Queues one level of `banks` banks, from `from` to `to`, and unrounded to `wide` if there is such a buffer.
fn pool(
    levels: &Levels,
    level: usize,
    (dtype, from_wide): (DType, bool),
    [from, to, wide]: [Both; 3],
    banks: usize,
    lane: &Lane,
) -> Result<()> {
    let (storage, real) = type_names(dtype);
    let options = format!("{} -DFROM={}", types(dtype), if from_wide { real } else { storage });
    let (below, slots) = (levels.sizes[level - 1], levels.sizes[level]);
    let params = Pool {
        from,
        to,
        wide,
        batch: levels.batch as i64,
        below: below as i64,
        slots: slots as i64,
        width: levels.width as i64,
        first: if level == 1 { levels.first as i64 } else { 0 },
    };
    // SAFETY: the op's checks prove that the buffers have these sizes, and the temporary ones were allocated with them.
    unsafe { launch(&POOL, &options, levels.batch * slots * levels.width, banks, &params, lane) }
}

/// Queues the unrounded levels above a single bank.
pub fn unrounded(levels: &Levels, dtype: DType, bank: &Buffer, lane: &Lane) -> Result<Vec<Buffer>> {
    let mut made = Vec::new();
    let mut from = [lane.address(bank)?, 0];
    for level in 1..levels.sizes.len() {
        let (buffer, at) = wide(levels, level, 1, dtype, lane)?;
        pool(levels, level, (dtype, level > 1), [from, [0; 2], at], 1, lane)?;
        made.push(buffer);
        from = at;
    }
    Ok(made)
}

/// Queues the gradients.
pub fn backward(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
    let Problem { ref levels, dtype } = *problem;
    let (_, real) = type_names(dtype);
    let given = |name| inputs.find(name).map_or(Ok(0), |buffer| lane.address(buffer));
    let (mut above, mut kept) = ([0; 2], Vec::new());
    for level in (0..levels.sizes.len()).rev() {
        let [given, to] = match level {
            0 => [[0; 2], [lane.address(outputs.get("dk")?)?, lane.address(outputs.get("dv")?)?]],
            _ => {
                let [_, _, dk, dv] = NAMES[level - 1];
                let (buffer, to) = wide(levels, level, 2, dtype, lane)?;
                kept.push(buffer);
                [[given(dk)?, given(dv)?], to]
            }
        };
        let params = Spread {
            given,
            above,
            to,
            batch: levels.batch as i64,
            slots: levels.sizes[level] as i64,
            of_above: levels.sizes.get(level + 1).map_or(0, |&size| size as i64),
            width: levels.width as i64,
            first: if level == 0 { levels.first as i64 } else { 0 },
        };
        let options = if level == 0 { types(dtype) + " -DTO=STORAGE" } else { format!("{} -DTO={real}", types(dtype)) };
        let elements = levels.batch * levels.sizes[level] * levels.width;
        // SAFETY: as above, with the parameters of the other kernel.
        unsafe { launch(&SPREAD, &options, elements, 2, &params, lane)? };
        above = to;
    }
    Ok(())
}
