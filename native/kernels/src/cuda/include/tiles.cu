// The common part of products that fetch pieces of weights and of x into STAGES stages of shared memory. Either each
// block continues with further tiles, or SPLIT blocks, a cluster, share the columns of one tile. The host gives STAGES
// and SPLIT, and for kernels that fetch weights STREAMED: whether the weights exceed the cache.

// The work of a block: its tile, as a column of tiles and a group of rows, then its first piece of columns and their
// count.
struct Place {
    int column, group, begin, count;
};

__device__ __forceinline__ int own_part() { return blockIdx.x % SPLIT; }

// The place of this block in a tile. There are `p.columns` tiles per group of rows.
template <class P>
__device__ __forceinline__ Place place(const P& p, int tile) {
    i64 most = (pieces(p) + SPLIT - 1) / SPLIT, begin = own_part() * most, left = pieces(p) - begin;
    return {tile % p.columns, tile / p.columns, (int)begin, (int)(left < 0 ? 0 : left < most ? left : most)};
}

template <class P, class F>
__device__ __forceinline__ void each_place(const P& p, F done) {
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) done(place(p, tile));
}

// Whether this block has no tile.
template <class P>
__device__ __forceinline__ bool idle(const P& p) {
    if (SPLIT > 1 || blockIdx.x < p.tiles) return false;
    stay(pieces(p) >= 8);
    return true;
}

// The barriers of the stages: one for a full stage, one for a free one.
struct Stages {
    Barrier full[STAGES], free[STAGES];
};

// The current stage, and the parity of its phase.
struct Turn {
    int stage, parity;

    __device__ __forceinline__ void skip(int count) {
        stage += count;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }

    // Like `skip`, for any `count`.
    __device__ __forceinline__ void skip_all(int count) {
        stage += count;
        parity ^= stage / STAGES % 2;
        stage %= STAGES;
    }
};

#if __CUDA_ARCH__ >= 900
// Waits until the consumers have freed a stage, then makes its barrier expect `bytes` bytes.
__device__ __forceinline__ Barrier* begin(Stages& stages, Turn turn, unsigned bytes) {
    // In the first phase every stage is free: waiting on the opposite parity returns at once.
    wait(&stages.free[turn.stage], turn.parity ^ 1);
    expect(&stages.full[turn.stage], bytes);
    return &stages.full[turn.stage];
}
#endif

__device__ __forceinline__ void open(Stages& stages, int producers, int consumers) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            open(&stages.full[i], producers);
            open(&stages.free[i], consumers);
        }
        opened();
    }
    __syncthreads();
}

// Fetches the pieces of all places. Before x is ready it fetches up to SOON pieces of weights of the first place.
template <int SOON, class Producer>
__device__ __forceinline__ void fetch_all(const Producer& from, bool ready) {
    Turn turn = {};
    each_place(from.p, [&](const Place& at) {
        int soon = ready ? 0 : at.count < SOON ? at.count : SOON;
        Turn ahead = turn;
        for (int i = 0; i < soon; ++i, ahead.skip(1)) from.weights(at, i, ahead);
        if (!ready) wait_for_others();
        ready = true;
        for (int i = 0; i < soon; ++i, turn.skip(1)) from.x(at, i, turn);
        for (int i = soon; i < at.count; ++i, turn.skip(1)) {
            from.weights(at, i, turn);
            from.x(at, i, turn);
        }
    });
}

// Returns `value` unchanged, but opaque to the compiler, which then keeps it in a register and does not recompute it in
// each turn.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(0xffffffff, value, threadIdx.x % 32); }

// Loads rows of 16 bytes from shared memory (ldmatrix). Eight lanes give the addresses for each word, and each lane
// gets one word of a row.
__device__ __forceinline__ void deal(unsigned from, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
}

// Loads two words per lane, from rows whose addresses the first sixteen lanes give (ldmatrix).
__device__ __forceinline__ void deal(unsigned from, unsigned& a, unsigned& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}

// Barrier for the first THREADS threads of the block.
template <int THREADS>
__device__ __forceinline__ void meet_first() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Barrier for the whole cluster.
__device__ __forceinline__ void meet() {
    __syncwarp();
    meet_in_cluster();
}

template <int THREADS>
__device__ __forceinline__ void meet_all() {
    if constexpr (SPLIT > 1) meet(); else meet_first<THREADS>();
}

// Runs a block with specialised warps: the first THREADS threads multiply, and one thread of a further warp fetches.
template <int THREADS, class F, class G>
__device__ __forceinline__ void fetch_and_multiply(Stages& stages, int consumers, F fetch, G multiply) {
    open(stages, 1, consumers);
    if (threadIdx.x >= THREADS) {
        let_others_begin();
        if (threadIdx.x == THREADS) fetch();
        __syncwarp();
        if constexpr (SPLIT > 1) meet_in_cluster(), done_in_cluster();
    } else {
        multiply();
    }
    // A block must not exit while other blocks still read its sums.
    __syncwarp();
    if constexpr (SPLIT > 1) wait_for_cluster();
}

template <class T>
__device__ __forceinline__ T of_part(const T* number, int part) {
    if constexpr (SPLIT > 1) return of_block(number, part);
    return *number;
}
