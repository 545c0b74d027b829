// Attention of 16-bit storage without mask and bias on Hopper's tensor cores, after pipeline.cu, common.cu, mma.cu,
// softmax.cu, wgmma.cu and specialised.cu: warps are specialised. One thread copies tiles of keys and values into STAGES
// stages of shared memory, and warpgroups of 64 queries each consume them.
//
// The softmax of a tile overlaps with the product of the previous tile's values, and the products of a warpgroup with
// the softmax of others: warpgroups issue products in turn. Tiles with masked keys come first, so that the main loop has
// no masks. The grid has one block per tile of queries, or fewer blocks that go through all of them: then the copies of
// the next tile overlap with the end of this one.
//
// History, bf16 on an H200, TFLOP/s at 4x16x4096x64 and 2x32x8192x128, causal ones in brackets; the best of two or
// three rounds, in each of which the kernels ran in this order:
//   wgmma_forward.cu                   343 (321)   413 (399)
//   version 1, one tile per block      533 (479)   705 (660)
//   version 2, several tiles           535 (488)   623 (575)
//   cuDNN, by PyTorch 2.11             481 (417)   675 (634)
// Several tiles per block matter where there are few keys: from 158 (90) to 188 (123) at 64x16x256x64, and from 137 (70)
// to 180 (91) at 64x16x128x128. At 1x32x4096x128 both versions reach 667. Long causal tiles lose by them: 435 instead of
// 551 there, so each causal tile has its block.
// Tried without gain, not causal, when version 1 had 499 and 663: no turns, 423 and 544; two warpgroups of queries at
// width 64, 457; three stages there, 493; 64 keys a tile and three warpgroups, 374 and 552.

// Registers of a thread: those that producers give away are what consumers get.
constexpr int FEW = WARPS == 8 ? 24 : 32, MANY = WARPS == 8 ? 240 : 160;

struct Stages { Barrier q, q_free, k[STAGES], v[STAGES], k_free[STAGES], v_free[STAGES]; };

// Shared memory.
struct Memory {
    STORAGE *q, *k, *v;
    Stages* stages;

    __device__ __forceinline__ Memory(unsigned char* first)
        : q((STORAGE*)first), k(q + OWN * WIDTH), v(k + STAGES * OTHER * WIDTH),
          stages((Stages*)(v + STAGES * OTHER * VALUE_WIDTH)) {}
};

// A tile of queries: its place, first and last row, and number of tiles of visible keys.
struct Work {
    Place at;
    int row, last, tiles;

    __device__ __forceinline__ Work(const Params& p, unsigned index)
        : at(place(p, index, p.heads, true)), row(at.tile * OWN), last(least(row + OWN, p.queries) - 1),
          tiles((visible(p, last) + OTHER - 1) / OTHER) {}
};

template <class F>
__device__ __forceinline__ void each_work(const Params& p, F done) {
    unsigned all = (unsigned)p.tiles * p.batch * p.heads;
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < all; index += gridDim.x) done(Work(p, index));
}

__device__ __forceinline__ void produce(const Tensors& all, const Memory& memory) {
    Stages& stages = *memory.stages;
    Turn<STAGES> turn = {};
    int parity = 0;
    // In the first phase everything is free: waiting on the opposite parity returns at once.
    each_work(all.of, [&](const Work& work) {
        int head = work.at.head, batch = work.at.batch, key_head = head / (all.of.heads / all.of.key_heads);
#pragma unroll 1
        for (int tile = work.tiles - 1; tile >= 0; --tile, turn = turn.next()) {
            int i = turn.stage, row = tile * OTHER;
            wait(&stages.k_free[i], turn.parity ^ 1);
            copy_tile<OTHER, WIDTH>(memory.k + i * OTHER * WIDTH, all.k, row, key_head, batch, &stages.k[i]);
            if (tile == work.tiles - 1) {
                wait(&stages.q_free, parity ^ 1);
                copy_tile<OWN, WIDTH>(memory.q, all.q, work.row, head, batch, &stages.q);
                parity ^= 1;
            }
            wait(&stages.v_free[i], turn.parity ^ 1);
            copy_tile<OTHER, VALUE_WIDTH>(memory.v + i * OTHER * VALUE_WIDTH, all.v, row, key_head, batch, &stages.v[i]);
        }
    });
}

struct Consumer {
    const Params& p;
    const Memory& memory;
    // Addresses of tiles in shared memory.
    unsigned q, k, v;
    // The warpgroup, the one whose turn comes after, and the warp's first row.
    int group, next_group, row;
    Turn<STAGES> turn;
    Softmax state;
    Sums sums[TILES][VALUE_WIDTH / 8], s[TILES][OTHER / 8];
    Left x[TILES][OTHER / 16];

    __device__ __forceinline__ void start_scores(Turn<STAGES> turn) {
        wait(&memory.stages->k[turn.stage], turn.parity);
        start_products<OWN, OTHER, WIDTH>(s, q + group * 64 * 128, k + turn.stage * OTHER * WIDTH * 2);
    }

    __device__ __forceinline__ void start_values() {
        wait(&memory.stages->v[turn.stage], turn.parity);
        start_weighted<VALUE_WIDTH, OTHER>(sums, x, v + turn.stage * OTHER * VALUE_WIDTH * 2);
    }

    // Leaves out a tile, none of whose keys the warpgroup sees.
    __device__ __forceinline__ void skip() {
        Stages& stages = *memory.stages;
        wait(&stages.k[turn.stage], turn.parity);
        release(&stages.k_free[turn.stage]);
        wait(&stages.v[turn.stage], turn.parity);
        release(&stages.v_free[turn.stage]);
        turn = turn.next();
    }

    // Weighs the first tile.
    __device__ __forceinline__ void begin_at(int tile) {
        start_scores(turn);
        settle<0>();
        touch(s);
        release(&memory.stages->k_free[turn.stage]);
        weigh<true>(s, state, p, row, tile * OTHER);
        round<OTHER>(x, s);
    }

    // Weighs a further tile, and adds the values of the one before.
    template <bool EDGE>
    __device__ __forceinline__ void step(int tile) {
        Turn<STAGES> next = turn.next();
        await_turn(group);
        start_scores(next);
        start_values();
        give_turn(next_group);
        settle<1>();
        touch(s);
        release(&memory.stages->k_free[next.stage]);
        weigh<EDGE>(s, state, p, row, tile * OTHER);
        settle<0>();
        touch(sums);
        touch(x);
        release(&memory.stages->v_free[turn.stage]);
        fade(sums, state);
        round<OTHER>(x, s);
        turn = next;
    }

    // Adds the values of the last tile.
    __device__ __forceinline__ void end() {
        start_values();
        settle<0>();
        touch(sums);
        release(&memory.stages->v_free[turn.stage]);
        turn = turn.next();
    }

    // Computes the warpgroup's rows of a tile of queries.
    __device__ __forceinline__ void rows(const Work& work, int parity) {
        int first = work.row + 64 * group, groups = (work.last - work.row) / 64 + 1;
        int tile = work.tiles - 1, whole = visible(p, first) / OTHER;
        next_group = group + 1 < groups ? group + 1 : 0;
        row = work.row + (int)threadIdx.x / 32 * 16;
        clear(sums);
        begin(state);
        if (CAUSAL && tile >= 0 && visible(p, least(first + 63, work.last)) <= tile * OTHER) {
            skip();
            if (tile--) await_turn(group), give_turn(next_group);
        }
        if (tile >= 0) {
            wait(&memory.stages->q, parity);
            begin_at(tile--);
            if (CAUSAL) {
#pragma unroll 1
                for (; tile >= whole; --tile) step<true>(tile);
            }
#pragma unroll 1
            for (; tile >= 0; --tile) step<false>(tile);
            release(&memory.stages->q_free);
            end();
        } else if (work.tiles) {
            wait(&memory.stages->q, parity);
            release(&memory.stages->q_free);
        }
        finish(p, work.at, row, sums, state);
    }

    // Follows the tiles of a block in which the warpgroup has no rows.
    __device__ __forceinline__ void pass(const Work& work, int parity) {
        wait(&memory.stages->q, parity);
        release(&memory.stages->q_free);
#pragma unroll 1
        for (int tile = 0; tile < work.tiles; ++tile) skip();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, 1)
    attention_specialised(const __grid_constant__ Tensors all) {
    extern __shared__ __align__(1024) unsigned char first[];
    Memory memory(first);
    const Params& p = all.of;
    if (threadIdx.x == 0) {
        Stages& stages = *memory.stages;
        open(&stages.q, 1), open(&stages.q_free, WARPS);
        for (int i = 0; i < STAGES; ++i) {
            open(&stages.k[i], 1), open(&stages.k_free[i], WARPS);
            open(&stages.v[i], 1), open(&stages.v_free[i], WARPS);
        }
        opened();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
        if (threadIdx.x == THREADS) produce(all, memory);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
        // The shuffle tells the compiler that all lanes hold the same value.
        int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0), parity = 0;
        unsigned q = shared_address(memory.q), k = shared_address(memory.k), v = shared_address(memory.v);
        Consumer consumer = {p, memory, q, k, v, group};
        if (group == 0) give_turn(0);
        each_work(p, [&](const Work& work) {
            if (work.row + 64 * group <= work.last) consumer.rows(work, parity);
            else if (work.tiles) consumer.pass(work, parity);
            if (work.tiles) parity ^= 1;
        });
    }
}
