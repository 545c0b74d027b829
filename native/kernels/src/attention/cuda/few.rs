//! Few queries over many keys, as decoding has them.

use super::super::Problem;
use super::{Call, Params, Real, grid};
use crate::cuda::{Source, pack};
use crate::error::Result;
use crate::tensor::Spec;

const FEW: Source = Source {
    name: "attention_few",
    text: concat!(
        include_str!("../common.cu"),
        include_str!("../score.cu"),
        include_str!("../../cuda/pack.cu"),
        include_str!("../few.cu")
    ),
};
const JOIN: Source =
    Source { name: "attention_join", text: concat!(include_str!("../common.cu"), include_str!("../join.cu")) };

/// Queries of a head at most: more have work enough for tiles.
const QUERIES: usize = 4;
/// Packs of a key or a value that a lane may hold.
const PACKS: usize = 4;
/// Elements of all rows that a lane may hold, of queries and of sums.
const HELD: usize = 32;
/// Warps in a block of either kernel, and keys whose loads a crew of lanes has under way; as in `few.cu` and `join.cu`.
const WARPS: usize = 4;
const TOGETHER: usize = 4;
/// Parts at most, as in `join.cu`.
const MOST_PARTS: usize = 1024;
/// Blocks that keep a multiprocessor busy.
const BUSY: usize = 4;

/// How a block's lanes share rows; the names are those of the macros in `few.cu`.
struct Layout {
    vec: usize,
    lanes: usize,
    packs: usize,
    value_packs: usize,
    rows: usize,
}

impl Layout {
    fn new(problem: &Problem, vec: usize) -> Layout {
        let Problem { heads, key_heads, queries, width, value_width, .. } = *problem;
        let lanes = width.max(value_width).div_ceil(vec).next_power_of_two().min(32);
        let [packs, value_packs] = [width, value_width].map(|width| width.div_ceil(vec * lanes).max(1));
        let together = heads / key_heads * queries;
        let most = (HELD / (packs.max(value_packs) * vec)).max(1);
        let rows = together.next_power_of_two().min(most.next_power_of_two()).min(4);
        Layout { vec, lanes, packs, value_packs, rows }
    }

    /// Keys that a block has under way.
    fn keys(&self) -> usize {
        32 / self.lanes * WARPS * TOGETHER
    }
}

/// Whether there are so few queries that this is faster than tiles, of rows that lanes can hold.
pub(super) fn fits<R: Real>(call: &Call<R>) -> bool {
    let layout = Layout::new(call.problem, vec(call));
    call.problem.queries <= QUERIES && layout.packs.max(layout.value_packs) <= PACKS
}

/// Queues attention.
pub(super) fn forward<R: Real>(call: &Call<R>) -> Result<()> {
    let Problem { batch, heads, key_heads, queries, keys, value_width, dtype, mask, bias, .. } = *call.problem;
    let layout = Layout::new(call.problem, vec(call));
    let chunks = (heads / key_heads * queries).div_ceil(layout.rows);
    let heads_of_keys = batch * key_heads * chunks;
    let busy = BUSY * call.lane.device().facts().multiprocessors as usize;
    // A part is worth its sums if it is read in more than one go.
    let parts = busy.div_ceil(heads_of_keys).min(keys.div_ceil(2 * layout.keys())).clamp(1, MOST_PARTS);
    let sums = call.lane.temporary(Spec::new(dtype.wide(), &[batch * heads * queries, parts, value_width + 2])?)?;
    let delta = call.lane.address(&sums)?;
    let params = Params { delta, tiles: chunks as i32, parts: parts as i32, ..call.params };
    let options = format!(
        "{} -DCOPY=0 -DVEC={} -DLANES={} -DPACKS={} -DVALUE_PACKS={} -DROWS={} -DHAS_MASK={} -DHAS_BIAS={}",
        call.options(),
        layout.vec,
        layout.lanes,
        layout.packs,
        layout.value_packs,
        layout.rows,
        u32::from(mask.is_some()),
        u32::from(bias.is_some()),
    );
    let kernel = call.lane.device().kernel(&FEW, &options)?;
    // SAFETY: as for all launches; there are sums for every part of every query.
    unsafe { call.lane.launch(&kernel, [grid(heads_of_keys * parts)?, 1, 1], 32 * WARPS as u32, &params)? };
    let join = call.lane.device().kernel(&JOIN, &format!("{} -DCOPY=0", call.options()))?;
    // SAFETY: as above; a block a query.
    unsafe { call.lane.launch(&join, [grid(batch * heads * queries)?, 1, 1], 32 * WARPS as u32, &params) }
}

/// Elements that are moved at once: as many as 16 bytes have, if all rows begin at such addresses.
fn vec<R: Real>(call: &Call<R>) -> usize {
    let Problem { q, k, v, dtype, .. } = *call.problem;
    let strides = [q, k, v].map(|at| [at.batch, at.head, at.row]);
    let strides = strides.as_flattened().iter().map(|&stride| (stride * dtype.size()) as u64);
    let addresses = [call.params.q, call.params.k, call.params.v];
    pack(dtype.size(), &addresses.into_iter().chain(strides).collect::<Vec<_>>())
}
