// What products share that fetch pieces of weights and of x into STAGES stages of shared memory, and whose blocks of threads go
// on with other outputs, or are SPLIT neighbours, a cluster, that share the columns. The host gives STAGES and SPLIT.

// What a block of threads does: its first output, its group of rows, and its first piece of columns and how many it has.
struct Place {
    i64 first, group, begin;
    int count;
};

__device__ __forceinline__ int own_part() { return blockIdx.x % SPLIT; }

// Of a tile, of which so many `columns` have all outputs, OUTPUTS each.
template <int OUTPUTS, class P>
__device__ __forceinline__ Place place(const P& p, int tile) {
    i64 most = (pieces(p) + SPLIT - 1) / SPLIT, begin = own_part() * most, left = pieces(p) - begin;
    return {tile % p.columns * (i64)OUTPUTS, tile / p.columns, begin, (int)(left < 0 ? 0 : left < most ? left : most)};
}

template <int OUTPUTS, class P, class F>
__device__ __forceinline__ void each_place(const P& p, F done) {
    for (int tile = blockIdx.x / SPLIT; tile < p.tiles; tile += gridDim.x / SPLIT) done(place<OUTPUTS>(p, tile));
}

// Blocks of threads without a place nap for up to two microseconds where products take longer. Blocks of the kernel that makes
// the next x ready begin meanwhile: they would crowd on an empty multiprocessor, but beside another block there is room for one.
template <class P>
__device__ __forceinline__ bool idle(const P& p) {
    if (SPLIT > 1 || blockIdx.x < p.tiles) return false;
    wait_for_others();
    let_others_begin();
    for (int i = 0; i < 2 && 8 * (i + 1) <= pieces(p); ++i) __nanosleep(1000);
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

// Fetches a place's pieces: of the first place so many of weights, SOON at most, before x is ready.
template <int SOON, class Producer>
__device__ __forceinline__ void fetch_all(const Producer& from, const Place& at, bool& waited, Turn& turn) {
    int soon = waited ? 0 : at.count < SOON ? at.count : SOON;
    Turn ahead = turn;
    for (int i = 0; i < soon; ++i, ahead.skip(1)) from.weights(at, i, ahead);
    if (!waited) wait_for_others();
    waited = true;
    for (int i = 0; i < soon; ++i, turn.skip(1)) from.x(at, i, turn);
    for (int i = soon; i < at.count; ++i, turn.skip(1)) {
        from.weights(at, i, turn);
        from.x(at, i, turn);
    }
}

// The same number, which the compiler keeps, as it cannot know that it could compute it again in each turn.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(0xffffffff, value, threadIdx.x % 32); }

// Rows of 16 bytes in shared memory, whose addresses eight lanes give for each word: a word of each row for each lane.
__device__ __forceinline__ void deal(unsigned from, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
}

// Waits for so many threads, the first ones.
template <int THREADS>
__device__ __forceinline__ void meet_first() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Waits for all of the cluster.
__device__ __forceinline__ void meet() {
    __syncwarp();
    meet_in_cluster();
}

template <class T>
__device__ __forceinline__ T of_part(const T* number, int part) {
    if constexpr (SPLIT > 1) return of_block(number, part);
    return *number;
}
