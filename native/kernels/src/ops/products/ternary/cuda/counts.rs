//! Products by counting bits on tensor cores.

use super::prepare::{Order, prepare};
use super::products::{aligned, common};
use super::{CHUNK, FEW, Params};
use crate::cuda::tiles::eights;
use crate::cuda::{Lane, Source, grid_size};
use crate::error::Result;
use crate::ops::products::cuda::{Route, text};
use crate::ops::products::ternary::problem::{Form, Product};

const COUNTS: Source<Params> = Source::new(
    "ternary_counts",
    text!(["activation", "early", "copies"], "epilogue", "ternary/ends", "ternary/bytes", "ternary/counts"),
);

/// Warps of a block.
const WARPS: usize = 16;

/// Rows of weights of a warp.
const SIDE: usize = 16;

/// Pieces of 16 bytes of weights per thread in a chunk.
const PIECES: usize = 4;

/// Bytes of a stage.
const STAGE: usize = PIECES * 16 * 32 * WARPS;

/// The constants that `counts.cu` is compiled with: rows of activations per block, groups of 16 rows of weights, and
/// chunks in flight.
pub struct Counts {
    rows: usize,
    sides: usize,
    stages: usize,
    /// Whether two blocks fit on a multiprocessor, so that one fetches weights while another is still working.
    ahead: bool,
}

impl Counts {
    /// For few rows of bytes or many of signs, where tensor cores count bits and shared memory holds the activations.
    pub fn planned(problem: &Product, params: &Params, lane: &Lane) -> Option<Counts> {
        let facts = lane.device().facts();
        let processors = facts.multiprocessors as usize;
        let most = match problem.form {
            Form::I8 if (1..=FEW).contains(&problem.rows) => problem.rows.next_power_of_two(),
            Form::Ternary if problem.rows > FEW => 8 * eights(problem.rows),
            _ => return None,
        };
        // Devices of other generations count bits one after the other. The y size of a grid is limited to 65535.
        let possible = matches!(facts.capability.0, 8 | 9) && problem.rows <= 8 * 65535 && aligned(problem, params);
        if !possible {
            return None;
        }
        let sides = [1, 2].into_iter().find(|sides| problem.outs <= SIDE * sides * processors).unwrap_or(4);
        let fits = |rows: usize| {
            let blocks = problem.outs.div_ceil(SIDE * sides) * problem.rows.div_ceil(rows);
            let steps = problem.n.div_ceil(CHUNK).div_ceil(WARPS / sides).max(1);
            // With more blocks than multiprocessors, two run on each, if registers allow it.
            let most = steps.min(if blocks > processors && matches!(rows, 1 | 8) { 2 } else { 6 });
            let find = |least, ahead, room| {
                let counts = |stages| Counts { rows, sides, stages, ahead };
                (least..=most).rev().map(counts).find(|counts| counts.shared(problem) + 128 <= room)
            };
            let room = facts.shared as usize;
            let alone = || find(1, false, room);
            // The device reserves 1 KiB of shared memory per block.
            let beside = || find(steps.min(3), true, (room + 1024) / 2 - 1024);
            // A kernel can begin early only from capability 9 on.
            let early = facts.capability.0 == 9 && rows == 1 && blocks <= processors;
            if early { beside().or_else(alone) } else { alone() }
        };
        match problem.form {
            Form::I8 => fits(most),
            _ => [32, 16, 8].into_iter().filter(|&rows| rows <= most).find_map(fits),
        }
    }

    /// Bytes of shared memory: chunks of weights, and rows of bits.
    fn shared(&self, problem: &Product) -> usize {
        let bits = if problem.form == Form::I8 { 8 } else { 2 };
        self.stages * STAGE + bits * self.rows * pitch(problem)
    }
}

/// Bytes of a row of bits; must equal `pitch_of` in `counts.cu`.
fn pitch(problem: &Product) -> usize {
    (problem.n.div_ceil(CHUNK) | 1) * (CHUNK / 8)
}

impl Route<Product, Params> for Counts {
    fn launch(&self, problem: &Product, params: &Params, lane: &Lane) -> Result<()> {
        let Counts { rows, sides, stages, ahead } = *self;
        // The kernel makes the bits of bytes itself.
        let params = if problem.form == Form::I8 { *params } else { prepare(problem, Order::Rows, params, lane)? };
        let options = format!(
            "{} -DROWS={rows} -DSIDE={SIDE} -DSIDES={sides} -DSTAGES={stages} -DSTAGE={STAGE} \
             -DPIECES={PIECES} -DAHEAD={} -DWARPS={WARPS} -DCHUNK={CHUNK}",
            common(problem),
            usize::from(ahead)
        );
        // SAFETY: the kernel waits before it accesses anything but weights, which it only reads.
        let kernel = unsafe { lane.device().kernel(&COUNTS, &options)?.early() };
        let busy = if ahead { lane.device().facts().multiprocessors } else { 0 };
        let blocks = grid_size(problem.outs.div_ceil(SIDE * sides))?.max(busy);
        let grid = [blocks, problem.rows.div_ceil(rows) as u32, 1];
        // SAFETY: the op's checks prove that all sizes fit the buffers, and scratch memory has what was prepared.
        unsafe { lane.launch_with(&kernel, grid, 32 * WARPS as u32, self.shared(problem) as u32, &params) }
    }
}
