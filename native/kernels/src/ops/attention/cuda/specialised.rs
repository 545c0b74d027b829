//! Attention in 16-bit storage and its gradients on Hopper, where one thread of a block copies tiles and warpgroups consume
//! them.

use super::mma::{self, text};
use super::{At, Call, Launch, Own, Statistics, grid};
use crate::base::heads::Strides;
use crate::cuda::{Source, Swizzle, TensorMap, params};
use crate::error::Result;
use crate::ops::attention::Problem;
use crate::tensor::{DType, Spec};

type Params = super::Params<f32>;

const SOURCE: Source<Tensors> = Source::new(
    "attention_specialised",
    text!(
        "../softmax.cu",
        "../wgmma.cu",
        "../../../cuda/include/pipeline.cu",
        "../specialised.cu",
        "../specialised_forward.cu"
    ),
);

const BACKWARD: Source<Gradients> = Source::new(
    "attention_specialised_backward",
    text!(
        "../wgmma.cu",
        "../../../cuda/include/pipeline.cu",
        "../specialised.cu",
        "../gradients.cu",
        "../parts_of_dq.cu",
        "../specialised_backward.cu"
    ),
);

const DQ: Source<Gradients> = Source::new("attention_dq", text!("../parts_of_dq.cu", "../dq.cu"));

/// Threads of the warpgroup that copies. They are one more warpgroup, since registers are moved between warpgroups.
const PRODUCERS: usize = 128;

/// Stages of a pair of tiles in shared memory.
const STAGES: usize = 2;

/// The fewest keys of narrow rows: with fewer, the more and smaller blocks of `wgmma_forward.cu` compute them.
const LEAST: usize = 512;

/// Keys of a tile.
const OTHER: usize = 128;

params! {
    /// The parameters of `specialised_forward.cu`.
    struct Tensors with TensorMap, At, Params {
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        of: Params,
    }
}

/// The sizes of a block's tiles; the names are those of the macros in `mma.cu`.
pub(super) struct Tile {
    width: usize,
    value_width: usize,
    warps: usize,
}

impl Tile {
    /// The fastest tile. `None` for calls that this kernel cannot compute, or that have too little work for it.
    pub(super) fn choose(call: &Call<f32>) -> Option<Tile> {
        let Problem { queries, keys, width, value_width, .. } = *call.problem;
        let [width, value_width] = mma::hopper_widths([width, value_width])?;
        // Rows beyond a packed sequence belong to the next one, but a map would copy them.
        let narrow = width + value_width == 128;
        let fits = call.steps.is_none() && queries > 64 && keys >= if narrow { LEAST } else { 1 };
        fits.then_some(Tile { width, value_width, warps: if narrow { 12 } else { 8 } })
    }

    fn own(&self) -> usize {
        16 * self.warps
    }

    /// The most blocks. As many as there are multiprocessors start a tile of queries while the last one ends; but causal
    /// tiles differ too much in their work to be dealt out in turn, so that each becomes a block.
    fn most(&self, call: &Call<f32>) -> u32 {
        if call.problem.causal.is_some() { u32::MAX } else { call.lane.device().facts().multiprocessors }
    }

    /// Bytes of shared memory, as the kernel computes them.
    fn shared(&self) -> usize {
        let barriers = (2 + 4 * STAGES) * size_of::<u64>();
        2 * (self.own() * self.width + STAGES * OTHER * (self.width + self.value_width)) + barriers
    }

    /// Queues the kernel.
    pub(super) fn launch(&self, call: &Call<f32>) -> Result<()> {
        let Tile { width, value_width, warps } = *self;
        let options = format!(
            "{} -DWIDTH={width} -DVALUE_WIDTH={value_width} -DTILES=1 -DOTHER={OTHER} -DWARPS={warps} \
             -DSTAGES={STAGES}",
            mma::options(call)
        );
        let problem = call.problem;
        let q = map(call, call.params.q, problem.q, [problem.heads, problem.queries, problem.width], self.own())?;
        let k = map(call, call.params.k, problem.k, [problem.key_heads, problem.keys, problem.width], OTHER)?;
        let v = map(call, call.params.v, problem.v, [problem.key_heads, problem.keys, problem.value_width], OTHER)?;
        let launch = Launch {
            source: &SOURCE,
            options,
            threads: 32 * warps + PRODUCERS,
            shared: self.shared(),
            own: Own::Queries,
            rows: self.own(),
            slices: 1,
            most: self.most(call),
        };
        mma::scaled(call).launch_with(&launch, |of| Tensors { q, k, v, of })
    }
}

params! {
    /// The parameters of `specialised_backward.cu` and `dq.cu`.
    struct Gradients with TensorMap, At, Params {
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        dy: TensorMap,
        // The sums of dq, tile by tile.
        sums: u64 as "float*",
        // The number of additions to each tile of sums.
        added: u64 as "unsigned*",
        // The next work that a block takes, of `works`.
        next: u64 as "unsigned*",
        works: u32,
        of: Params,
    }
}

/// The sizes of a block's tiles for the gradients.
pub(super) struct BackwardTile {
    width: usize,
    value_width: usize,
    /// Queries.
    other: usize,
}

impl BackwardTile {
    const WARPS: usize = 8;
    const KEYS: usize = 16 * Self::WARPS;

    /// Tiles of q, dy and dq in shared memory.
    const STAGES: [usize; 3] = [3, 2, 2];

    /// Rows to which the statistics of a head are padded, since they are copied by whole tiles.
    const PADDED: usize = 128;

    /// The tile of a call. `None` for calls that this kernel cannot compute, and for those with many more keys than
    /// queries: each tile of dq then has long chains of additions, and blocks have little else to do meanwhile.
    pub(super) fn choose(call: &Call<f32>) -> Option<BackwardTile> {
        let Problem { queries, keys, width, value_width, scale, .. } = *call.problem;
        let [width, value_width] = mma::hopper_widths([width, value_width])?;
        // Sums begin with lse / scale, which must be finite.
        let fits = call.steps.is_none() && width >= value_width && scale > 1e-20;
        (fits && queries > 64 && keys > 64 && keys <= 4 * queries).then(|| {
            let other = if width == 64 { 128 } else { 64 };
            BackwardTile { width, value_width, other }
        })
    }

    /// Heads whose works are interleaved, so that blocks seldom wait for turns. With more heads than that, fewer blocks
    /// share the tiles of a head in the cache.
    fn together(&self, problem: &Problem) -> usize {
        let Problem { batch, heads, key_heads, queries, causal, .. } = *problem;
        let share = heads / key_heads;
        let tiles = queries.div_ceil(self.other) * share;
        let most = if causal.is_some() { (self.other / 2).div_ceil(share) } else { (512 / tiles).clamp(8, 32) };
        most.min(batch * key_heads)
    }

    /// Bytes of shared memory, as the kernel computes them.
    fn shared(&self) -> usize {
        let BackwardTile { width, value_width, other } = *self;
        let [stages, value_stages, sums_stages] = Self::STAGES;
        let own = 2 * Self::KEYS * (width + value_width);
        let copied = stages * other * (2 * width + 4) + value_stages * other * (2 * value_width + 4);
        let barriers = 4 + 2 * (stages + value_stages + sums_stages);
        own + copied + 2 * Self::KEYS * other + sums_stages * other * width * 4 + (barriers + 1) * size_of::<u64>()
    }

    /// Queues the kernels: statistics, the gradients, and the rounding of dq.
    pub(super) fn launch(&self, call: &Call<f32>) -> Result<()> {
        call.backward(Statistics::Preset { rows: Self::PADDED }, |call| self.launch_with(call))
    }

    fn launch_with(&self, call: &Call<f32>) -> Result<()> {
        let BackwardTile { width, value_width, other } = *self;
        let Problem { batch, heads, key_heads, queries, keys, .. } = *call.problem;
        let [stages, value_stages, sums_stages] = Self::STAGES;
        let options = format!(
            "{} -DWIDTH={width} -DVALUE_WIDTH={value_width} -DTILES=1 -DOTHER={other} -DWARPS={} -DROLE=DKV \
             -DSTAGES={stages} -DVALUE_STAGES={value_stages} -DSUMS_STAGES={sums_stages}",
            mma::options(call),
            Self::WARPS
        );
        let tiles = batch * heads * queries.div_ceil(other);
        let sums = call.lane.temporary(Spec::new(DType::F32, &[tiles, other, width])?)?;
        // One more number is the counter of works.
        let counts = call.lane.temporary(Spec::new(DType::I32, &[tiles + 1])?)?;
        call.lane.fill(&counts, 0)?;
        let added = call.lane.address(&counts)?;
        let maps = self.maps(call)?;
        let (sums, next) = (call.lane.address(&sums)?, added + (tiles * size_of::<u32>()) as u64);
        let works = grid(batch * key_heads * keys.div_ceil(Self::KEYS))?;
        let together = self.together(call.problem) as i32;
        let params = |of: Params| {
            let [q, k, v, dy] = maps;
            Gradients { q, k, v, dy, sums, added, next, works, of: Params { together, ..of } }
        };
        let gradients = Launch {
            source: &BACKWARD,
            options,
            threads: 32 * Self::WARPS + PRODUCERS,
            shared: self.shared(),
            own: Own::Keys,
            rows: Self::KEYS,
            slices: 1,
            most: call.lane.device().facts().multiprocessors,
        };
        let call = mma::scaled(call);
        call.launch_with(&gradients, params)?;
        let dq = Launch {
            source: &DQ,
            threads: 128,
            shared: 0,
            own: Own::Queries,
            rows: other,
            slices: 2,
            most: u32::MAX,
            ..gradients
        };
        call.launch_with(&dq, params)
    }

    fn maps(&self, call: &Call<f32>) -> Result<[TensorMap; 4]> {
        let Problem { heads, key_heads, queries, keys, width, value_width, .. } = *call.problem;
        let (problem, params) = (call.problem, &call.params);
        Ok([
            map(call, params.q, problem.q, [heads, queries, width], self.other)?,
            map(call, params.k, problem.k, [key_heads, keys, width], Self::KEYS)?,
            map(call, params.v, problem.v, [key_heads, keys, value_width], Self::KEYS)?,
            map(call, params.dy, problem.y, [heads, queries, value_width], self.other)?,
        ])
    }
}

/// Describes a tensor of heads; a copy transfers 64 columns of `rows` rows.
fn map(call: &Call<f32>, address: u64, strides: Strides, head: [usize; 3], rows: usize) -> Result<TensorMap> {
    let Strides { batch, head: apart, row } = strides;
    let [heads, all, width] = head;
    let sizes = [call.problem.batch, heads, all, width];
    call.lane.device().map(address, sizes, [batch, apart, row, 1], [1, 1, rows, 64], Swizzle::Bytes128)
}
