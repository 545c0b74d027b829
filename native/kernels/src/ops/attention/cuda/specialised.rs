//! Attention in 16-bit storage on Hopper, where one thread of a block copies tiles and warpgroups consume them.

use super::mma::{self, text};
use super::{At, Call, Launch, Own};
use crate::base::heads::Strides;
use crate::cuda::{Source, Swizzle, TensorMap, params};
use crate::error::Result;
use crate::ops::attention::Problem;

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

/// Describes a tensor of heads; a copy transfers 64 columns of `rows` rows.
fn map(call: &Call<f32>, address: u64, strides: Strides, head: [usize; 3], rows: usize) -> Result<TensorMap> {
    let Strides { batch, head: apart, row } = strides;
    let [heads, all, width] = head;
    let sizes = [call.problem.batch, heads, all, width];
    call.lane.device().map(address, sizes, [batch, apart, row, 1], [1, 1, rows, 64], Swizzle::Bytes128)
}
