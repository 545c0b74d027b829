// Attention of 16-bit storage without mask and bias on Hopper's tensor cores, after pipeline.cu, common.cu, mma.cu,
// softmax.cu and wgmma.cu: warps are specialised. One thread copies tiles of keys and values into STAGES stages of
// shared memory, and warpgroups of 64 queries each consume them.
//
// The softmax of a tile overlaps with the product of the previous tile's values, and the products of a warpgroup with
// the softmax of others: warpgroups issue products in turn. Tiles with masked keys come first, so that the main loop has
// no masks.

constexpr int PRODUCERS = 128;
// Registers of a thread: those that producers give away are what consumers get.
constexpr int FEW = WARPS == 8 ? 24 : 32, MANY = WARPS == 8 ? 240 : 160;

struct Stages { Barrier q, k[STAGES], v[STAGES], k_free[STAGES], v_free[STAGES]; };

// Shared memory.
struct Memory {
    STORAGE *q, *k, *v;
    Stages* stages;

    __device__ __forceinline__ Memory(unsigned char* first)
        : q((STORAGE*)first), k(q + OWN * WIDTH), v(k + STAGES * OTHER * WIDTH),
          stages((Stages*)(v + STAGES * OTHER * VALUE_WIDTH)) {}
};

// The stage of a tile, and the parity of its phase.
struct Turn {
    int stage, parity;

    __device__ __forceinline__ Turn next() const {
        return stage + 1 == STAGES ? Turn{0, parity ^ 1} : Turn{stage + 1, parity};
    }
};

// Copies TALL rows of a head from `row` on, of which COLUMNS columns. The map fills up with zeros.
template <int TALL, int COLUMNS>
__device__ __forceinline__ void copy_tile(STORAGE* to, const TensorMap& from, int row, int head, int batch, Barrier* full) {
    expect(full, TALL * COLUMNS * 2);
#pragma unroll
    for (int column = 0; column < COLUMNS; column += 64)
        copy_box(to + column * TALL, &from, column, row, head, batch, full);
}

__device__ __forceinline__ void produce(const Tensors& all, const Memory& memory, const Place& at, int tiles) {
    int key_head = at.head / (all.of.heads / all.of.key_heads);
    Stages& stages = *memory.stages;
    copy_tile<OWN, WIDTH>(memory.q, all.q, at.tile * OWN, at.head, at.batch, &stages.q);
    Turn turn = {};
#pragma unroll 1
    for (int tile = tiles - 1; tile >= 0; --tile, turn = turn.next()) {
        int i = turn.stage;
        // In the first phase every stage is free: waiting on the opposite parity returns at once.
        wait(&stages.k_free[i], turn.parity ^ 1);
        copy_tile<OTHER, WIDTH>(memory.k + i * OTHER * WIDTH, all.k, tile * OTHER, key_head, at.batch, &stages.k[i]);
        wait(&stages.v_free[i], turn.parity ^ 1);
        copy_tile<OTHER, VALUE_WIDTH>(memory.v + i * OTHER * VALUE_WIDTH, all.v, tile * OTHER, key_head, at.batch,
                                      &stages.v[i]);
    }
}

// Barriers by which warpgroups take turns: a warpgroup waits at its own, and arrives at that of the next one.
__device__ __forceinline__ void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

// Each warp frees a stage by itself, once its products have been waited for.
__device__ __forceinline__ void release(Barrier* free) {
    if (threadIdx.x % 32 == 0) arrive(free);
}

struct Consumer {
    const Params& p;
    const Memory& memory;
    // Addresses of tiles in shared memory.
    unsigned q, k, v;
    // The warpgroup, the one whose turn comes after, and the warp's first row.
    int group, next_group, row;
    Turn turn;
    Softmax state;
    Sums sums[TILES][VALUE_WIDTH / 8], s[TILES][OTHER / 8];
    Left x[TILES][OTHER / 16];

    __device__ __forceinline__ void start_scores(Turn turn) {
        wait(&memory.stages->k[turn.stage], turn.parity);
        start_products<OWN, OTHER, WIDTH>(s, q + group * 64 * 128, k + turn.stage * OTHER * WIDTH * 2);
    }

    __device__ __forceinline__ void start_values() {
        wait(&memory.stages->v[turn.stage], turn.parity);
        start_weighted<VALUE_WIDTH, OTHER>(sums, x, v + turn.stage * OTHER * VALUE_WIDTH * 2);
    }

    // Leaves out the last tile, none of whose keys the warpgroup sees.
    __device__ __forceinline__ void skip() {
        release(&memory.stages->k_free[turn.stage]);
        release(&memory.stages->v_free[turn.stage]);
        turn = turn.next();
        await_turn(group);
        give_turn(next_group);
    }

    // Weighs the first tile.
    __device__ __forceinline__ void begin_at(int tile) {
        wait(&memory.stages->q, 0);
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
        Turn next = turn.next();
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

    __device__ __forceinline__ void end() {
        start_values();
        settle<0>();
        touch(sums);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, 1)
    attention_specialised(const __grid_constant__ Tensors all) {
    extern __shared__ __align__(1024) unsigned char first[];
    Memory memory(first);
    const Params& p = all.of;
    Place at = place(p, blockIdx.x, p.heads, true);
    int row = at.tile * OWN, last = least(row + OWN, p.queries) - 1;
    int tiles = (visible(p, last) + OTHER - 1) / OTHER, groups = (last - row) / 64 + 1;
    if (threadIdx.x == 0) {
        Stages& stages = *memory.stages;
        open(&stages.q, 1);
        for (int i = 0; i < STAGES; ++i) {
            open(&stages.k[i], 1), open(&stages.k_free[i], 4 * groups);
            open(&stages.v[i], 1), open(&stages.v_free[i], 4 * groups);
        }
        opened();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
        if (threadIdx.x == THREADS && tiles) produce(all, memory, at, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
        // The shuffle tells the compiler that all lanes hold the same value.
        int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
        if (group >= groups) return;
        unsigned q = shared_address(memory.q), k = shared_address(memory.k), v = shared_address(memory.v);
        Consumer consumer = {p, memory, q, k, v, group, group + 1 == groups ? 0 : group + 1, row + (int)threadIdx.x / 32 * 16};
        clear(consumer.sums);
        begin(consumer.state);
        if (group == 0) give_turn(0);
        row += 64 * group;
        int tile = tiles - 1, whole = visible(p, row) / OTHER;
        if (CAUSAL && tile >= 0 && visible(p, least(row + 63, last)) <= tile * OTHER) consumer.skip(), --tile;
        if (tile >= 0) {
            consumer.begin_at(tile--);
            if (CAUSAL) {
#pragma unroll 1
                for (; tile >= whole; --tile) consumer.step<true>(tile);
            }
#pragma unroll 1
            for (; tile >= 0; --tile) consumer.step<false>(tile);
            consumer.end();
        }
        finish(p, at, consumer.row, consumer.sums, consumer.state);
    }
}
