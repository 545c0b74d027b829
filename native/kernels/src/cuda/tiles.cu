// What products share that fetch pieces of weights and of x into STAGES stages of shared memory, and whose blocks of threads go
// on with other outputs, or are SPLIT neighbours, a cluster, that share the columns. The host gives STAGES and SPLIT, and
// to those who fetch weights STREAMED: whether these are more than the cache holds.

// What a block of threads does: its tile, as a column of tiles and a group of rows, and its first piece of columns and how many
// it has.
struct Place {
    int column, group, begin, count;
};

__device__ __forceinline__ int own_part() { return blockIdx.x % SPLIT; }

// Of a tile, of which so many `columns` have all outputs.
template <class P>
__device__ __forceinline__ Place place(const P& p, int tile) {
    i64 most = (pieces(p) + SPLIT - 1) / SPLIT, begin = own_part() * most, left = pieces(p) - begin;
    return {tile % p.columns, tile / p.columns, (int)begin, (int)(left < 0 ? 0 : left < most ? left : most)};
}

template <class P, class F>
__device__ __forceinline__ void each_place(const P& p, F done) {
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) done(place(p, tile));
}

// Whether a block of threads has no place.
template <class P>
__device__ __forceinline__ bool idle(const P& p) {
    if (SPLIT > 1 || blockIdx.x < p.tiles) return false;
    stay(pieces(p) >= 8);
    return true;
}

// Stages, and what they wait for: their being full, and being free again.
struct Stages {
    Barrier full[STAGES], free[STAGES];
};

// Whose turn it is, and the parity of its phase.
struct Turn {
    int stage, parity;

    __device__ __forceinline__ void skip(int count) {
        stage += count;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }

    // Any number.
    __device__ __forceinline__ void skip_all(int count) {
        stage += count;
        parity ^= stage / STAGES % 2;
        stage %= STAGES;
    }
};

#if __CUDA_ARCH__ >= 900
// Waits until nobody needs a stage any more, and tells what counts its bytes that it gets so many.
__device__ __forceinline__ Barrier* begin(Stages& stages, Turn turn, unsigned bytes) {
    // At first nobody has to leave.
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

// Fetches the pieces of all places: of the first one so many of weights, SOON at most, before x is ready, unless it is.
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

// The same number, which the compiler keeps, as it cannot know that it could compute it again in each turn.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(0xffffffff, value, threadIdx.x % 32); }

// Rows of 16 bytes in shared memory, whose addresses eight lanes give for each word: a word of each row for each lane.
__device__ __forceinline__ void deal(unsigned from, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
}

// Two words for each lane of rows whose addresses the first sixteen lanes give.
__device__ __forceinline__ void deal(unsigned from, unsigned& a, unsigned& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}

// Waits for so many threads, the first ones.
template <int THREADS>
__device__ __forceinline__ void meet_first() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Waits for all of the cluster.
__device__ __forceinline__ void meet() {
    __syncwarp();
    meet_in_cluster();
}

template <int THREADS>
__device__ __forceinline__ void meet_all() {
    if constexpr (SPLIT > 1) meet(); else meet_first<THREADS>();
}

// What a block of threads does of which the first ones multiply, and one of another warp fetches.
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
    // Nobody leaves whose sums are still read.
    __syncwarp();
    if constexpr (SPLIT > 1) wait_for_cluster();
}

template <class T>
__device__ __forceinline__ T of_part(const T* number, int part) {
    if constexpr (SPLIT > 1) return of_block(number, part);
    return *number;
}
