//! Products row by row of weights, for every form, size and device.

use super::Params;
use super::prepare::{Order, prepare};
use super::products::{aligned, common};
use crate::cuda::{Lane, Source, grid_size};
use crate::error::Result;
use crate::ops::products::cuda::{Route, text};
use crate::ops::products::ternary::problem::{Form, Product, plane_bytes};

const PRODUCT: Source<Params> =
    Source::new("ternary_product", text!(["activation", "early"], "epilogue", "ternary/ends", "ternary/products"));

/// Warps of a block.
const WARPS: usize = 8;

/// The most groups of rows in a launch: the y size of a grid is limited to 65535.
const MOST: usize = 32768;

/// The constants that `products.cu` is compiled with: rows of weights and of activations of a warp, and whether rows of
/// planes are whole units.
pub struct Walk {
    outs: usize,
    rows: usize,
    aligned: bool,
}

impl Walk {
    pub fn planned(problem: &Product, params: &Params, lane: &Lane) -> Walk {
        let rows = if problem.rows == 1 { 1 } else { 4 };
        let busy = WARPS * lane.device().facts().multiprocessors as usize;
        let outs = if problem.outs * problem.rows.div_ceil(rows) >= 4 * busy { 4 } else { 1 };
        Walk { outs, rows, aligned: aligned(problem, params) }
    }
}

impl Route<Product, Params> for Walk {
    fn launch(&self, problem: &Product, params: &Params, lane: &Lane) -> Result<()> {
        let Walk { outs, rows, aligned } = *self;
        let params = prepare(problem, Order::Rows, params, lane)?;
        let options = format!(
            "{} -DALIGNED={} -DOUTS={outs} -DROWS={rows} -DWARPS={WARPS}",
            common(problem),
            usize::from(aligned)
        );
        let kernel = lane.device().kernel(&PRODUCT, &options)?;
        // SAFETY: the kernel waits before it accesses anything but weights, which it only reads. Activations that are
        // given as planes come from no early kernel, so those products are not early.
        let kernel = if problem.form == Form::I8 { unsafe { kernel.early() } } else { kernel };
        let blocks = grid_size(problem.outs.div_ceil(WARPS * outs))?;
        for first in (0..problem.rows).step_by(MOST * rows) {
            let some = (problem.rows - first).min(MOST * rows);
            let grid = [blocks, some.div_ceil(rows) as u32, 1];
            let part = part(problem, &params, first, some);
            // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
            unsafe { lane.launch(&kernel, grid, 32 * WARPS as u32, &part)? };
        }
        Ok(())
    }
}

/// The parameters for `some` rows from `first` on.
fn part(problem: &Product, params: &Params, first: usize, some: usize) -> Params {
    let skip = |at: u64, bytes: usize| if at == 0 { 0 } else { at + (first * bytes) as u64 };
    let Product { n, outs, dtype, .. } = *problem;
    Params {
        x: skip(params.x, n * dtype.size()),
        x_planes: params.x_planes.map(|at| skip(at, plane_bytes(n))),
        bits: skip(params.bits, params.stride as usize),
        totals: skip(params.totals, 4),
        x_scale: skip(params.x_scale, 4),
        acc: skip(params.acc, 4 * outs),
        y: skip(params.y, outs * dtype.size()),
        rows: some as i64,
        ..*params
    }
}
