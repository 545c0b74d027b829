// The gradients of attention of 16-bit storage without mask and bias on Hopper's tensor cores, after pipeline.cu,
// common.cu, mma.cu, wgmma.cu, specialised.cu, gradients.cu and parts_of_dq.cu: warps are specialised, and one pass
// computes all three gradients.
//   STAGES         tiles of queries in shared memory
//   VALUE_STAGES   tiles of dy in shared memory
//   SUMS_STAGES    tiles of dq in shared memory
//
// A block owns 128 keys, of which two warpgroups have 64 each: their dk and dv stay in registers. For each tile of
// queries the scores are K Q', so that P' and dS' are left operands without leaving registers. dS' also goes to shared
// memory, where both warpgroups multiply all of it with their part of K, or their queries of it with K: the block's part
// of dq. One thread copies tiles into shared memory, and one per stage adds tiles of dq to the sums in global memory.
//
// The order of these additions is fixed: that of the tiles of keys. `added` counts the additions to a tile of dq, and each
// block waits for its turn. Blocks take works in the same order from a counter `next`, and do theirs in that order: the
// first work that has not ended waits for none, so waiting ends however many blocks are resident. A turn costs about 5 us,
// so the works of many heads are interleaved.
//
// The shift of scores and delta are subtracted by the tensor cores: sums begin with their negatives. So computing P and dS
// need not read shared memory, where loads wait for products that were started earlier.
//
// History, bf16 on an H200, TFLOP/s (of five products) at 4x16x4096x64 and 2x32x8192x128, causal ones in brackets. Clocks
// vary by 10% from round to round; these are the ranges of three rounds, in each of which all kernels ran in turn:
//   wgmma_backward.cu, two passes            317-330 (289)       364-379 (346-362)
//   version 1: one pass, two stages each     410-468 (204)       454-463 (239)
//     two warps add halves of dq with fences between the proxies, and a turn costs 8 us; without turns 475 and 515,
//     without adding 477 and 556
//   version 2: three stages of queries       423-469 (396-410)   497-581 (479-517)
//     one thread adds a tile of dq; 64 heads interleaved when causal
//   version 3: scores of the next tile first 476-521 (423-427)   515-550 (484-498)
//     dk and dq overlap with computing P, sums begin with -shift and -delta, and warpgroups take turns
//   cuDNN, by PyTorch 2.11                   397-450 (340-372)   497-566 (450-557)
// Tried without gain in version 3: three stages of dy and one of dq, 454-518 and 423-442; two stages of queries at width
// 128, 432-522. Without turns of the warpgroups causal calls at width 128 have 443-449.

// racecheck reports that the next copy into a stage may overtake reads of shift and delta. It cannot: each lane reads before
// its warp meets in `release`, where one lane arrives for all, and the copying thread waits for every warp.

struct Stages {
    Barrier own, own_free, q[STAGES], q_free[STAGES], y[VALUE_STAGES], y_free[VALUE_STAGES], ds, ds_free, sums[SUMS_STAGES],
        sums_free[SUMS_STAGES];
    unsigned index;
};

// Shared memory.
struct Memory {
    STORAGE *k, *v, *q, *y, *ds;
    float *sums, *shift, *delta;
    Stages* stages;

    __device__ __forceinline__ Memory(unsigned char* first)
        : k((STORAGE*)first), v(k + OWN * WIDTH), q(v + OWN * VALUE_WIDTH), y(q + STAGES * OTHER * WIDTH),
          ds(y + VALUE_STAGES * OTHER * VALUE_WIDTH), sums((float*)(ds + OWN * OTHER)), shift(sums + SUMS_STAGES * 2 * PART),
          delta(shift + STAGES * OTHER), stages((Stages*)(delta + VALUE_STAGES * OTHER)) {}
};

// A tile of queries of a head. The last ones come first, so that masked scores come last.
struct Tile {
    int head, first, left;

    __device__ __forceinline__ Tile(const Work& work) : head(work.head), first(last(work)), left(work.items) {}

    static __device__ __forceinline__ int last(const Work& work) { return work.end - 1 - (work.end - 1 - work.begin) % OTHER; }

    // Whether there is a next one.
    __device__ __forceinline__ bool next(const Work& work) {
        first -= OTHER;
        if (first < work.begin) head++, first = last(work);
        return --left > 0;
    }
};

// Does `done(tile)` for each tile of queries that a part of the work reads.
template <class F>
__device__ __forceinline__ void each_tile(const Work& work, F done) {
    if (work.items == 0) return;
    Tile tile(work);
#pragma unroll 1
    do done(tile);
    while (tile.next(work));
}

__device__ __forceinline__ void produce(const Gradients& all, const Memory& memory) {
    const Params& p = all.of;
    Stages& stages = *memory.stages;
    Turn<STAGES> turn = {};
    Turn<VALUE_STAGES> value_turn = {};
    // In the first phase everything is free: waiting on the opposite parity returns at once.
    int parity = 1;
    unsigned index = atomicAdd(all.next, 1);
#pragma unroll 1
    for (; index < all.works; parity ^= 1) {
        Work work(p, index);
        wait(&stages.own_free, parity);
        stages.index = index;
        copy_tile<OWN, WIDTH>(memory.k, all.k, work.row, work.key_head, work.batch, &stages.own);
        copy_tile<OWN, VALUE_WIDTH>(memory.v, all.v, work.row, work.key_head, work.batch, &stages.own);
        index = atomicAdd(all.next, 1);
        each_tile(work, [&](const Tile& tile) {
            int i = turn.stage, j = value_turn.stage, head = tile.head, first = tile.first;
            i64 row = statistics(p, work.batch, head, first);
            wait(&stages.q_free[i], turn.parity ^ 1);
            copy_tile<OTHER, WIDTH>(memory.q + i * OTHER * WIDTH, all.q, first, head, work.batch, &stages.q[i]);
            expect(&stages.q[i], OTHER * 4);
            copy_bytes(memory.shift + i * OTHER, p.shift + row, OTHER * 4, &stages.q[i]);
            wait(&stages.y_free[j], value_turn.parity ^ 1);
            copy_tile<OTHER, VALUE_WIDTH>(memory.y + j * OTHER * VALUE_WIDTH, all.dy, first, head, work.batch, &stages.y[j]);
            expect(&stages.y[j], OTHER * 4);
            copy_bytes(memory.delta + j * OTHER, p.delta + row, OTHER * 4, &stages.y[j]);
            value_turn = value_turn.next();
            turn = turn.next();
        });
    }
    wait(&stages.own_free, parity);
    stages.index = index;
    arrive(&stages.own), arrive(&stages.own);
}

// The index that the producer announces. In a WARP it is read by the lane that frees it later.
template <bool WARP>
__device__ __forceinline__ unsigned announced(const Stages& stages) {
    unsigned index = WARP && threadIdx.x % 32 ? 0 : stages.index;
    return WARP ? __shfl_sync(0xffffffff, index, 0) : index;
}

// Does `done(work)` for each part of the block's work, by a WARP or by one thread.
template <bool WARP, class F>
__device__ __forceinline__ void each_work(const Gradients& all, Stages& stages, F done) {
#pragma unroll 1
    for (int parity = 0;; parity ^= 1) {
        wait(&stages.own, parity);
        unsigned index = announced<WARP>(stages);
        if (index >= all.works) return;
        done(Work(all.of, index));
    }
}

// Waits until `count` tiles have been added to a sum; and tells that `count` have been.
__device__ __forceinline__ void await_count(const unsigned* added, unsigned count) {
    unsigned now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(added) : "memory");
    while (now < count);
}
__device__ __forceinline__ void tell_count(unsigned* added, unsigned count) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(added), "r"(count) : "memory");
}

// Adds a tile to a sum, or begins the sum with it.
__device__ __forceinline__ void add_tile(float* to, const float* tile, bool begins) {
    if (begins)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(to), "r"(address(tile)), "n"(2 * PART * 4) : "memory");
    else
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     ::"l"(to), "r"(address(tile)), "n"(2 * PART * 4) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Adds the tiles of dq of a stage to the sums in global memory.
__device__ __forceinline__ void add_tiles(const Gradients& all, const Memory& memory, int stage) {
    const Params& p = all.of;
    Stages& stages = *memory.stages;
    Turn<SUMS_STAGES> turn = {};
    int tiles = (p.queries + OTHER - 1) / OTHER;
    each_work<false>(all, stages, [&](const Work& work) {
        unsigned count = work.row / OWN;
        arrive(&stages.own_free);
        each_tile(work, [&](const Tile& tile) {
            if (turn.stage == stage) {
                i64 id = ((i64)work.batch * p.heads + tile.head) * tiles + tile.first / OTHER;
                wait(&stages.sums[stage], turn.parity);
                await_count(all.added + id, count);
                add_tile(all.sums + id * 2 * PART, memory.sums + stage * 2 * PART, count == 0);
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                arrive(&stages.sums_free[stage]);
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                tell_count(all.added + id, count + 1);
            }
            turn = turn.next();
        });
    });
}

// Makes the compiler compute what depends on a value where it is used: ahead of the loop there are no registers for it.
__device__ __forceinline__ unsigned here(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

// COUNT columns of an array, from `first` on.
template <int COUNT, class T, int COLUMNS>
__device__ __forceinline__ T (&part(T (&all)[TILES][COLUMNS], int first))[TILES][COUNT] {
    return reinterpret_cast<T(&)[TILES][COUNT]>(all[0][first % COLUMNS]);
}

struct Consumer {
    const Gradients& all;
    const Memory& memory;
    // Addresses of tiles in shared memory.
    unsigned k, v, q, y, ds;
    int group;
    Turn<STAGES> turn;
    Turn<VALUE_STAGES> value_turn;
    Turn<SUMS_STAGES> sums_turn;
    Turn<1> ds_turn;
    // The stage of the tile of queries whose product dk is in flight.
    int held;
    Sums dk[TILES][WIDTH / 8], dv[TILES][VALUE_WIDTH / 8], s[TILES][OTHER / 8];
    Left ds_left[TILES][OTHER / 16];

    // Sets sums to a row of numbers for their columns.
    __device__ __forceinline__ void preset(Sums (&sums)[TILES][OTHER / 8], const float* row) {
#pragma unroll
        for (int n = 0; n < OTHER / 8; ++n) {
            float2 two = *(const float2*)(row + sum_column(n));
            sums[0][n][0] = sums[0][n][2] = two.x, sums[0][n][1] = sums[0][n][3] = two.y;
        }
    }

    // The scores, less their shift.
    __device__ __forceinline__ void start_scores() {
        start_products<OWN, OTHER, WIDTH, true>(s, here(k + group * 64 * 128), q + turn.stage * OTHER * WIDTH * 2);
    }

    // P' of some columns, which begin with the query `first`.
    template <bool EDGE>
    __device__ __forceinline__ void weigh(Sums (&s)[TILES][8], int row, int first) {
        const Params& p = all.of;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float power = exp2_fast(s[0][n][e] * p.scale);
                bool out = EDGE && row + sum_row(0, e / 2) >= visible(p, first + sum_column(n) + e % 2);
                s[0][n][e] = out ? 0.0f : power;
            }
    }
    __device__ __forceinline__ void weigh(Sums (&s)[TILES][8], int row, int first) {
        if (row + 16 > visible(all.of, first)) weigh<true>(s, row, first);
        else weigh<false>(s, row, first);
    }

    // dS', where dP already is less delta.
    __device__ __forceinline__ void times(Sums (&s)[TILES][8], const Sums (&dp)[TILES][8]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[0][n][e] *= dp[0][n][e];
    }

    // Stores the warpgroup's rows of dS' for both.
    __device__ __forceinline__ void share_slopes() {
        unsigned lane = here(threadIdx.x) % 32, row = threadIdx.x / 32 * 16 + lane % 16;
        unsigned at = ds + row * 128;
        wait(&memory.stages->ds_free, ds_turn.parity ^ 1);
#pragma unroll
        for (int n = 0; n < OTHER / 16; ++n)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(at + n / 4 * OWN * 128 + ((n % 4 * 2 ^ lane / 16 ^ lane % 8) * 16)), "r"(ds_left[0][n][0]),
                         "r"(ds_left[0][n][1]), "r"(ds_left[0][n][2]), "r"(ds_left[0][n][3]) : "memory");
        publish(&memory.stages->ds);
    }

    // dq = dS K: the warpgroup's 64 queries or 64 columns.
    __device__ __forceinline__ void start_sums(Sums (&dq)[TILES][8]) {
        unsigned left = half_described(ds + QUERY_PART * group * OWN * 128, 16);
        unsigned right = half_described(k + KEY_PART * group * OWN * 128, 16);
        registers_ready();
#pragma unroll
        for (int n = 0; n < OWN; n += 16) multiply_add_turned(dq[0], described(left + n * 8), described(right + n * 8), n);
        end_products();
    }

    __device__ __forceinline__ void store_sums(const Sums (&dq)[TILES][8]) {
        int i = sums_turn.stage;
        float4* to = (float4*)(memory.sums + (i * 2 + group) * PART) + threadIdx.x % 128;
        wait(&memory.stages->sums_free[i], sums_turn.parity ^ 1);
#pragma unroll
        for (int n = 0; n < 8; ++n) to[n * 128] = {dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]};
    }

    // Starts dk and dq of the tile whose dS' is known.
    __device__ __forceinline__ void start_rest(Sums (&dq)[TILES][8]) {
        wait(&memory.stages->ds, ds_turn.parity);
        ds_turn = ds_turn.next();
        start_sums(dq);
    }

    __device__ __forceinline__ void end_rest(Sums (&dq)[TILES][8]) {
        settle<0>();
        touch(dk);
        touch(ds_left);
        touch(dq);
        release(&memory.stages->q_free[held]);
        release(&memory.stages->ds_free);
        store_sums(dq);
    }

    // Computes P', dS' and dv of a tile of queries; and dk and dq of the previous tile, unless this one is the FIRST.
    template <bool FIRST>
    __device__ __forceinline__ void step(int row, int first) {
        Stages& stages = *memory.stages;
        int i = turn.stage, j = value_turn.stage;
        Sums dp[TILES][OTHER / 8], dq[TILES][8];
        Left x[TILES][OTHER / 16];
        wait(&stages.q[i], turn.parity);
        preset(s, memory.shift + i * OTHER);
        await_turn(group);
        start_scores();
        if (!FIRST) start_weighted<WIDTH, OTHER>(dk, ds_left, q + held * OTHER * WIDTH * 2);
        give_turn(group ^ 1);
        if (!FIRST) start_rest(dq);
        settle<FIRST ? 0 : 2>();
        touch(s);
        weigh(part<8>(s, 0), row, first);
        if (!FIRST) end_rest(dq);
        held = i;
        turn = turn.next();

        wait(&stages.y[j], value_turn.parity);
        preset(dp, memory.delta + j * OTHER);
        start_products<OWN, OTHER, VALUE_WIDTH, true>(dp, v + group * 64 * 128, y + j * OTHER * VALUE_WIDTH * 2);
        if (!FIRST) {
            publish(&stages.sums[sums_turn.stage]);
            sums_turn = sums_turn.next();
        }
        if (OTHER == 128) weigh(part<8>(s, 8), row, first + 64);
        // By parts of 64 queries, which need fewer registers than all at once.
#pragma unroll
        for (int from = 0; from < OTHER; from += 64) {
            round<64>(part<4>(x, from / 16), part<8>(s, from / 8));
            start_weighted<VALUE_WIDTH, 64>(dv, part<4>(x, from / 16), y + j * OTHER * VALUE_WIDTH * 2 + from * 128);
            if (from == 0) {
                settle<1>();
                touch(dp);
            }
            times(part<8>(s, from / 8), part<8>(dp, from / 8));
            round<64>(part<4>(ds_left, from / 16), part<8>(s, from / 8));
        }
        share_slopes();
        settle<0>();
        touch(dv);
        touch(x);
        release(&stages.y_free[j]);
        value_turn = value_turn.next();
    }

    // Computes dk and dq of the last tile.
    __device__ __forceinline__ void end() {
        Sums dq[TILES][8];
        start_weighted<WIDTH, OTHER>(dk, ds_left, q + held * OTHER * WIDTH * 2);
        start_rest(dq);
        end_rest(dq);
        publish(&memory.stages->sums[sums_turn.stage]);
        sums_turn = sums_turn.next();
    }

    __device__ __forceinline__ void keys(const Work& work) {
        int row = work.row + (int)threadIdx.x / 32 * 16;
        clear(dk);
        clear(dv);
        if (work.items) {
            Tile tile(work);
            step<true>(row, tile.first);
#pragma unroll 1
            while (tile.next(work)) step<false>(row, tile.first);
            end();
        }
        release(&memory.stages->own_free);
        finish(all.of, work, row, dk, dv);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, 1)
    attention_specialised_backward(const __grid_constant__ Gradients all) {
    extern __shared__ __align__(1024) unsigned char first[];
    Memory memory(first);
    if (threadIdx.x == 0) {
        Stages& stages = *memory.stages;
        open(&stages.own, 2), open(&stages.own_free, WARPS + SUMS_STAGES), open(&stages.ds, WARPS), open(&stages.ds_free, WARPS);
        for (int i = 0; i < STAGES; ++i) open(&stages.q[i], 2), open(&stages.q_free[i], WARPS);
        for (int i = 0; i < VALUE_STAGES; ++i) open(&stages.y[i], 2), open(&stages.y_free[i], WARPS);
        for (int i = 0; i < SUMS_STAGES; ++i) open(&stages.sums[i], WARPS), open(&stages.sums_free[i], 1);
        opened();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
        int warp = (threadIdx.x - THREADS) / 32;
        if (threadIdx.x % 32 == 0) {
            if (warp == 0) produce(all, memory);
            else if (warp <= SUMS_STAGES) add_tiles(all, memory, warp - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
        // The shuffle tells the compiler that all lanes hold the same value.
        int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
        Consumer consumer = {all, memory, address(memory.k), address(memory.v), address(memory.q), address(memory.y),
                             address(memory.ds), group};
        if (group == 0) give_turn(0);
        each_work<true>(all, *memory.stages, [&](const Work& work) { consumer.keys(work); });
    }
}
