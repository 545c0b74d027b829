//! Prepares activations for the products, in scratch memory.

use super::rules::{BITS, MOST_PARTS, WIDE, cut, kernel};
use super::{CHUNK, Params, Rules, THREADS};
use crate::cuda::{Lane, Source, Together, grid_size};
use crate::error::Result;
use crate::ops::products::cuda::text;
use crate::ops::products::ternary::problem::{Form, Product, plane_bytes};

const PARTS: Source<Rules> = Source::new(
    "ternary_parts",
    text!(["early", "cluster", "pipeline"], "ternary/bytes", "ternary/rules", "ternary/parts"),
);

/// The order of activation bytes that products expect, as in `rules.cu` and `parts.cu`.
#[derive(Clone, Copy)]
pub enum Order {
    Rows,
    /// This number of tiles of 8 rows.
    Tiles(usize),
    /// Matrices of groups of this number of eights of rows.
    Matrices(usize),
}

/// Prepares activations for the products. Returns the parameters with their addresses.
pub fn prepare(problem: &Product, order: Order, params: &Params, lane: &Lane) -> Result<Params> {
    let Product { rows, n, dtype, .. } = *problem;
    match problem.form {
        Form::Ternary if !problem.planes => {
            let plane = (rows * plane_bytes(n)).next_multiple_of(256);
            let scratch = lane.scratch(2 * plane)?;
            let planes = [scratch, scratch + plane as u64];
            let rules = Rules { x: params.x, planes, rows: rows as i64, n: n as i64, parts: 1, ..Rules::default() };
            cut(&rules, dtype, lane)?;
            Ok(Params { x_planes: planes, ..*params })
        }
        Form::I8 => make_bits(problem, order, params, lane),
        _ => Ok(*params),
    }
}

/// Quantizes activations to bytes, in the order that products expect.
fn make_bits(problem: &Product, order: Order, params: &Params, lane: &Lane) -> Result<Params> {
    let Product { rows, n, .. } = *problem;
    // Rows are padded to four words of 32 cells, which are read at once.
    let (unit, all, [tiles, eights]) = match order {
        Order::Rows => (128, rows, [0, 0]),
        Order::Tiles(tiles) => (CHUNK, rows.max(8 * tiles), [tiles, 0]),
        Order::Matrices(eights) => (CHUNK, rows.next_multiple_of(8 * eights), [0, eights]),
    };
    let stride = n.next_multiple_of(unit);
    let (bytes, numbers) = ((all * stride).next_multiple_of(256), (rows * 4).next_multiple_of(256));
    let bits = lane.scratch(bytes + 2 * numbers)?;
    let totals = bits + bytes as u64;
    let x_scale = if params.x_scales == 0 { totals + numbers as u64 } else { params.x_scales };
    let rules = Rules {
        x: params.x,
        scales: x_scale,
        q: params.q,
        bits,
        totals,
        rows: rows as i64,
        n: n as i64,
        stride: stride as i64,
        tiles: tiles as i64,
        eights: eights as i64,
        floor: params.floor,
        ..Rules::default()
    };
    launch_bits(problem, all, &rules, lane)?;
    Ok(Params { bits, totals, x_scale, stride: stride as i64, ..*params })
}

/// Queues the kernel that prepares `all` rows, those after the last of x as zeros.
fn launch_bits(problem: &Product, all: usize, rules: &Rules, lane: &Lane) -> Result<()> {
    if problem.rows == 0 {
        return Ok(());
    }
    let source = if rules.eights > 0 { &PARTS } else { &BITS };
    // SAFETY: the kernel waits before it accesses memory that other kernels use.
    let kernel = unsafe { kernel(source, problem.dtype, lane)?.early() };
    // SAFETY: scratch has room for all rows.
    unsafe {
        if rules.eights == 0 {
            return lane.launch(&kernel, [grid_size(all)?, 1, 1], WIDE, rules);
        }
        let parts = (rules.stride as usize).div_ceil(8 * THREADS as usize).next_power_of_two().min(MOST_PARTS);
        let (cluster, blocks) = (Together::Cluster(parts as u32), grid_size(all * parts)?);
        lane.launch_together(&kernel, cluster, blocks, [THREADS, 0], &Rules { parts: parts as i64, ..*rules })
    }
}
