//! Few queries over many keys, as in decoding.

use super::super::Problem;
use super::{Call, Params, Real, grid, mma};
use crate::cuda::{Source, Together, pack};
use crate::error::Result;
use crate::tensor::DType;

const FEW: Source<Params<()>> = Source::new(
    "attention_few",
    concat!(
        include_str!("../common.cu"),
        include_str!("../score.cu"),
        include_str!("../../../cuda/include/pack.cu"),
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("../parts.cu"),
        include_str!("../few.cu")
    ),
);
const FEW_MMA: Source<Params<()>> = Source::new(
    "attention_few_mma",
    concat!(
        include_str!("../../../cuda/include/mma.cu"),
        include_str!("../common.cu"),
        include_str!("../mma.cu"),
        include_str!("../softmax.cu"),
        include_str!("../../../cuda/include/cluster.cu"),
        include_str!("../parts.cu"),
        include_str!("../few_mma.cu")
    ),
);
const JOIN: Source<Params<()>> =
    Source::new("attention_join", concat!(include_str!("../common.cu"), include_str!("../join.cu")));

/// The most queries per head for these kernels: with more, tiles have enough work.
const QUERIES: usize = 4;
/// The most packs of a key or a value per lane.
const PACKS: usize = 4;
/// The most elements per lane, over all rows of queries and of sums.
const HELD: usize = 32;
/// Warps per block.
const WARPS: usize = 4;
/// Packs of keys that a lane loads at a time, and the most packs of values.
const TOGETHER: usize = 4;
/// Pipeline stages in shared memory, including the one being processed.
const STAGES: usize = 3;
/// The most parts into which the keys of a head are divided.
const MOST_PARTS: usize = 1024;
/// Blocks per multiprocessor that keep it busy.
const BUSY: usize = 4;
/// The most parts that the blocks of a cluster join by themselves, and bytes of keys and values.
const CLUSTER: usize = 8;
const SMALL: usize = 24 << 20;

/// A kernel that processes a part of the keys, for the queries of all heads that read them.
struct Way {
    source: &'static Source<Params<()>>,
    options: String,
    /// Query rows of a block, and keys that it processes at a time.
    rows: usize,
    keys: usize,
    /// Bytes of shared memory.
    shared: usize,
    /// Blocks that are resident on a multiprocessor at once.
    resident: usize,
    /// The scale of the scores.
    scale: f64,
}

impl Way {
    /// Lanes share rows of keys, with plain multiply-adds: for all types, masks and biases.
    fn by_lanes<R: Real>(call: &Call<R>) -> Way {
        let Problem { dtype, mask, bias, scale, .. } = *call.problem;
        let Layout { vec, lanes, packs, value_packs, rows, together } = Layout::new(call);
        let bytes = vec * dtype.size();
        let copy = if bytes >= 4 && call.lane.device().facts().capability.0 >= 8 { bytes } else { 0 };
        let options = format!(
            "{} -DCOPY={copy} -DVEC={vec} -DLANES={lanes} -DPACKS={packs} -DVALUE_PACKS={value_packs} -DROWS={rows} \
             -DTOGETHER={together} -DWARPS={WARPS} -DSTAGES={STAGES} -DHAS_MASK={} -DHAS_BIAS={}",
            call.options(),
            u32::from(mask.is_some()),
            u32::from(bias.is_some()),
        );
        // Shared memory holds keys and values first, and later the sums of each warp.
        let kept = STAGES * together * (packs + value_packs) * 32 * WARPS * bytes;
        let sums = WARPS * rows * (value_packs * vec * lanes + 2) * dtype.wide().size();
        let keys = 32 / lanes * WARPS * together;
        Way { source: &FEW, options, rows, keys, shared: kept.max(sums), resident: BUSY, scale }
    }

    /// By tensor cores, if all keys are visible to all queries. A masked key would have weight 0, which tensor cores
    /// would multiply by its value even if that is NaN.
    fn on_tensor_cores<R: Real>(call: &Call<R>) -> Option<Way> {
        const OTHER: usize = 16;
        let Problem { queries, causal, width, value_width, dtype, .. } = *call.problem;
        if !mma::fits(call.problem, call.lane) || causal.is_some() && queries > 1 {
            return None;
        }
        let [width, value_width] = [width, value_width].map(mma::whole);
        let stage = OTHER * (width + value_width + 16);
        let shared = |stages: usize| dtype.size() * (16 * (width + 8) + WARPS * stages * stage);
        let sums = WARPS * 16 * (value_width + 2) * size_of::<f32>();
        let limit = call.lane.device().facts().shared as usize;
        let stages = (2..=STAGES).rev().find(|&stages| shared(stages).max(sums) <= limit)?;
        let shared = shared(stages).max(sums);
        let resident = (limit / shared).min(3);
        let options = format!(
            "{} -DCOPY={} -DWIDTH={width} -DVALUE_WIDTH={value_width} -DTILES=1 -DOTHER={OTHER} -DWARPS={WARPS} \
             -DSTAGES={stages} -DMIN={resident} -DHALF={}",
            call.options(),
            call.copy,
            u32::from(dtype == DType::F16),
        );
        let (keys, scale) = (WARPS * OTHER, mma::scale(call.problem).into());
        Some(Way { source: &FEW_MMA, options, rows: 16, keys, shared, resident, scale })
    }
}

/// How lanes share rows; the names are those of the macros in `few.cu`.
struct Layout {
    vec: usize,
    lanes: usize,
    packs: usize,
    value_packs: usize,
    rows: usize,
    together: usize,
}

impl Layout {
    fn new<R: Real>(call: &Call<R>) -> Layout {
        let (vec, Problem { heads, key_heads, queries, width, value_width, .. }) = (vec(call), *call.problem);
        let lanes = width.max(value_width).div_ceil(vec).next_power_of_two().min(32);
        let [packs, value_packs] = [width, value_width].map(|width| width.div_ceil(vec * lanes).max(1));
        let (sharing, larger) = (heads / key_heads * queries, packs.max(value_packs));
        let most = (HELD / (larger * vec)).max(1);
        let rows = sharing.next_power_of_two().min(most.next_power_of_two()).min(4);
        Layout { vec, lanes, packs, value_packs, rows, together: (TOGETHER / larger).max(1) }
    }
}

/// Whether there are few enough queries for this to be faster than tiles, with rows that lanes can hold.
pub(super) fn fits<R: Real>(call: &Call<R>) -> bool {
    let layout = Layout::new(call);
    call.steps.is_none() && call.problem.queries <= QUERIES && layout.packs.max(layout.value_packs) <= PACKS
}

/// Queues attention.
pub(super) fn forward<R: Real>(call: &Call<R>) -> Result<()> {
    let Problem { batch, heads, key_heads, queries, keys, value_width, dtype, .. } = *call.problem;
    let way = Way::on_tensor_cores(call).unwrap_or_else(|| Way::by_lanes(call));
    let chunks = (heads / key_heads * queries).div_ceil(way.rows);
    let heads_of_keys = batch * key_heads * chunks;
    let facts = call.lane.device().facts();
    // A part must take more than one stage to be worth combining. All blocks should run in one wave.
    let most = way.resident * facts.multiprocessors as usize / heads_of_keys;
    let wanted = most.min(keys.div_ceil(2 * way.keys)).clamp(1, MOST_PARTS);
    let (of_row, kept) = ((value_width + 2) * dtype.wide().size(), way.shared.next_multiple_of(16));
    let with_results = kept + way.rows * of_row;
    let joined = joined(call, wanted, heads_of_keys).filter(|_| with_results <= facts.shared as usize);
    let parts = joined.unwrap_or(wanted);
    let (shared, sums) = match joined {
        Some(_) => (with_results, 0),
        None => (way.shared, batch * heads * queries * parts * of_row),
    };
    let (delta, scale) = (call.lane.scratch(sums)?, R::of(way.scale));
    let params = Params { delta, scale, tiles: chunks as i32, parts: parts as i32, ..call.params };
    let options = format!("{} -DJOINED={} -DKEPT={kept}", way.options, u32::from(joined.is_some()));
    let (kernel, blocks) = (call.lane.device().kernel(way.source, &options)?, grid(heads_of_keys * parts)?);
    let [threads, shared] = [32 * WARPS as u32, shared as u32];
    // SAFETY: as for all launches; the scratch memory, or shared memory, has sums for every part of every query.
    unsafe {
        match joined {
            Some(2..) => {
                let cluster = Together::Cluster(parts as u32);
                call.lane.launch_together(&kernel, cluster, blocks, [threads, shared], &params)?
            }
            _ => call.lane.launch_with(&kernel, [blocks, 1, 1], threads, shared, &params)?,
        }
    }
    if joined.is_some() {
        return Ok(());
    }
    let options = format!("{} -DCOPY=0 -DWARPS={WARPS} -DMOST_PARTS={MOST_PARTS}", call.options());
    let join = call.lane.device().kernel(&JOIN, &options)?;
    // SAFETY: as above; there is one block per query.
    unsafe { call.lane.launch(&join, [grid(batch * heads * queries)?, 1, 1], threads, &params) }
}

/// The parts that the blocks of a cluster have and join by themselves: as many as are wanted, or fewer that still occupy
/// most multiprocessors. `None` where a second kernel must join more of them, or where it takes little time beside the read
/// of keys and values, for which blocks outside of clusters spread better over multiprocessors.
fn joined<R: Real>(call: &Call<R>, wanted: usize, heads_of_keys: usize) -> Option<usize> {
    let Problem { batch, key_heads, keys, width, value_width, dtype, .. } = *call.problem;
    let facts = call.lane.device().facts();
    let small = batch * key_heads * keys * (width + value_width) * dtype.size() <= SMALL;
    let clusters = small && facts.capability >= (9, 0) && dtype != DType::F64;
    match wanted {
        1 => Some(1),
        ..=CLUSTER if clusters => Some(wanted),
        _ if clusters && 10 * heads_of_keys * CLUSTER >= 9 * facts.multiprocessors as usize => Some(CLUSTER),
        _ => None,
    }
}

/// Elements per access: 16 bytes if all rows are aligned to that, otherwise one.
fn vec<R: Real>(call: &Call<R>) -> usize {
    let Problem { q, k, v, dtype, .. } = *call.problem;
    let strides = [q, k, v].map(|at| [at.batch, at.head, at.row]);
    let strides = strides.as_flattened().iter().map(|&stride| (stride * dtype.size()) as u64);
    let addresses = [call.params.q, call.params.k, call.params.v];
    pack(dtype.size(), &addresses.into_iter().chain(strides).collect::<Vec<_>>())
}
