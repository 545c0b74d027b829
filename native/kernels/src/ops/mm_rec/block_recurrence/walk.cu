// A walk through time by a group of blocks that share the matrices: each block keeps some rows in registers and shared
// memory, and in each step multiplies them with vectors that it gathers from all blocks of the group.
//
// The group is a cluster of BLOCKS blocks, which write into each other's shared memory, or with CLUSTER 0 the grid,
// which exchanges vectors through global memory; there is one barrier per step, two with NORM. A group walks BATCH
// sequences at once.
//
// A block has WR * WK warps. A warp multiplies ROWS rows with every WK-th chunk of 128 columns, a lane four columns of
// it. Of a thread's chunks, REGS are in registers, SHARED in shared memory, and the rest, FAR, in global memory.
// Forward, the rows are those of all gates for OWN columns of the state, and the vectors are states of WIDTH elements;
// backward, the rows are for OWN columns of the gradient of the state, and the vectors are those of all gates'
// pre-activations.

constexpr int ROWS = 8, THREADS = 32 * WR * WK, CHUNKS_TOTAL = CHUNKS, PADDED = CHUNKS * WK * 128;
constexpr int ALL_ROWS = WR * ROWS, ITEMS = OWN * BATCH, EACH = (ITEMS + THREADS - 1) / THREADS;
constexpr int FAR = CHUNKS - REGS - SHARED;

template <class T>
struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) Four { T of[4]; };

// A block's shared memory, except for its weights.
struct alignas(16) State {
    // The gathered vectors; double-buffered in a cluster, since blocks write those of the next step early.
    REAL vectors[CLUSTER ? 2 : 1][BATCH][PADDED];
    // Partial sums of the warps that share rows.
    REAL sums[WK][ALL_ROWS][BATCH];
    // Values that this block sends to the others: for each part of a vector, a column of a sequence.
    REAL fresh[BACKWARD ? GATES : 1][ITEMS];
    REAL carry[ITEMS];
#if NORM
    // Each block's partial sum for the norm; then the totals, from which the norm's divisors follow.
    REAL parts[CLUSTER ? 2 : 1][BLOCKS][BATCH];
    REAL norm[BATCH];
#endif
};

extern __shared__ __align__(16) unsigned char memory[];

__device__ __forceinline__ State& state() { return *(State*)memory; }
__device__ __forceinline__ Four<STORAGE>* shared_weights() { return (Four<STORAGE>*)(memory + sizeof(State)); }

#if CLUSTER
__device__ __forceinline__ int own_rank() { return rank_in_cluster(); }
__device__ __forceinline__ i64 first_sequence(const Params&) { return (i64)(blockIdx.x / BLOCKS) * BATCH; }

// Writes to the address of block `rank` that corresponds to `at`.
__device__ __forceinline__ void write_to(int rank, REAL* at, REAL value) {
    unsigned there = in_block(address(at), rank);
    if constexpr (sizeof(REAL) == 4)
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"((float)value) : "memory");
    else
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"((double)value) : "memory");
}

__device__ __forceinline__ void meet(const Params&, unsigned&) { meet_in_cluster(); }
#else
__device__ __forceinline__ int own_rank() { return blockIdx.x; }
__device__ __forceinline__ i64 first_sequence(const Params& p) { return p.first_batch; }

__device__ __forceinline__ void meet(const Params& p, unsigned& meetings) {
    ++meetings;
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrived) : "memory");
        unsigned arrived;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(p.arrived) : "memory");
        } while (arrived < meetings * BLOCKS);
    }
    __syncthreads();
}
#endif

// A thread's position, and the columns and sequences of its block.
struct Place {
    int lane, rows, columns, rank;
    i64 first, sequence;
    int sequences;

    __device__ __forceinline__ Place(const Params& p) {
        lane = threadIdx.x % 32;
        rows = threadIdx.x / 32 % WR;
        columns = threadIdx.x / 32 / WR;
        rank = own_rank();
        first = (i64)rank * OWN;
        sequence = first_sequence(p);
        i64 left = p.batch - sequence;
        sequences = left < BATCH ? left : BATCH;
    }
    // The group of four columns of a chunk that this thread multiplies.
    __device__ __forceinline__ int four(int chunk) const { return (chunk * WK + columns) * 32 + lane; }
};

// An item is one column of the state of one sequence.
struct Item {
    int own, batch;
    i64 column;
    bool there;

    __device__ __forceinline__ Item(const Params& p, const Place& place, int i) {
        own = i % OWN;
        batch = i / OWN;
        column = place.first + own;
        there = i < ITEMS && batch < place.sequences && column < p.width;
    }
    __device__ __forceinline__ i64 at(const Params& p, const Place& place, i64 t) const {
        return ((place.sequence + batch) * p.length + t) * p.width + column;
    }
    __device__ __forceinline__ i64 of_state(const Params& p, const Place& place) const {
        return (place.sequence + batch) * p.width + column;
    }
};

// An element of the matrix, by row of this block and column.
__device__ __forceinline__ STORAGE weight(const Params& p, const Place& place, int row, i64 column) {
    i64 gate = BACKWARD ? column / p.width : row % GATES;
    i64 out = BACKWARD ? column % p.width : place.first + row / GATES;
    i64 in = BACKWARD ? place.first + row : column;
    STORAGE none = {};
    if (out >= p.width || in >= p.width || gate >= GATES) return none;
    return gate == 0 ? p.w_gate[out * p.width + in] : p.w_mix[(2 * out + 1) * p.width + in];
}

struct Weights {
    REAL near[REGS > 0 ? REGS : 1][ROWS][4];
    Four<STORAGE>* far;

    __device__ __forceinline__ Weights(const Params& p, const Place& place) {
        far = (Four<STORAGE>*)p.far + (i64)blockIdx.x * FAR * ROWS * THREADS;
#pragma unroll
        for (int chunk = 0; chunk < REGS; ++chunk)
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    near[chunk][row][e] =
                        widen(weight(p, place, place.rows * ROWS + row, place.four(chunk) * (i64)4 + e));
        for (int chunk = REGS; chunk < CHUNKS; ++chunk)
            for (int row = 0; row < ROWS; ++row) {
                Four<STORAGE> four;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    four.of[e] = weight(p, place, place.rows * ROWS + row, place.four(chunk) * (i64)4 + e);
                *at(chunk, row) = four;
            }
    }
    // The address of a thread's four elements that are not in registers.
    __device__ __forceinline__ Four<STORAGE>* at(int chunk, int row) {
        int stored = chunk - REGS;
        return stored < SHARED ? shared_weights() + (stored * ROWS + row) * THREADS + threadIdx.x
                               : far + ((stored - SHARED) * ROWS + row) * THREADS + threadIdx.x;
    }
};

__device__ __forceinline__ void multiply(const REAL (&w)[ROWS][4], int four, int buffer, REAL (&sums)[ROWS * BATCH]) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        Four<REAL> v = *(const Four<REAL>*)&state().vectors[buffer][b][four * 4];
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[row * BATCH + b] = fma(w[row][e], v.of[e], sums[row * BATCH + b]);
    }
}

// Reduces COUNT sums over the lanes of a warp: lane l gets the totals from l * COUNT / 32 on. If COUNT is less than 32,
// several lanes get the same one.
template <int COUNT>
__device__ __forceinline__ void add_up(REAL (&sums)[COUNT], int lane) {
    int left = COUNT;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        if (left > 1) {
            left /= 2;
            bool upper = lane & distance;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i)
                if (i < left) {
                    REAL give = upper ? sums[i] : sums[i + left], keep = upper ? sums[i + left] : sums[i];
                    sums[i] = keep + __shfl_xor_sync(~0u, give, distance);
                }
        } else {
            sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
        }
    }
}

// The products of all rows with the vectors, as partial sums of each warp.
__device__ __forceinline__ void product(Weights& weights, const Place& place, int buffer) {
    constexpr int COUNT = ROWS * BATCH, LEFT = COUNT > 32 ? COUNT / 32 : 1;
    REAL sums[COUNT] = {};
#pragma unroll
    for (int chunk = 0; chunk < REGS; ++chunk) multiply(weights.near[chunk], place.four(chunk), buffer, sums);
#pragma unroll 1
    for (int chunk = REGS; chunk < CHUNKS; ++chunk) {
        REAL w[ROWS][4];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            Four<STORAGE> four = *weights.at(chunk, row);
            widen(four.of, w[row][0], w[row][1]);
            widen(four.of + 2, w[row][2], w[row][3]);
        }
        multiply(w, place.four(chunk), buffer, sums);
    }
    add_up<COUNT>(sums, place.lane);
    REAL* to = &state().sums[place.columns][place.rows * ROWS][0];
    constexpr int SAME = COUNT < 32 ? 32 / COUNT : 1;
    if (place.lane % SAME == 0)
#pragma unroll
        for (int i = 0; i < LEFT; ++i) to[place.lane / SAME * LEFT + i] = sums[i];
}

// A row's product with a vector, summed over warps.
__device__ __forceinline__ REAL total(int row, int batch) {
    REAL sum = 0;
#pragma unroll
    for (int columns = 0; columns < WK; ++columns) sum += state().sums[columns][row][batch];
    return sum;
}

// Sends `fresh` to all blocks, as a part of the next vectors.
__device__ __forceinline__ void give(const Params& p, const Place& place, int next) {
    constexpr int PARTS = BACKWARD ? GATES : 1;
#if CLUSTER
    for (int i = threadIdx.x; i < PARTS * ITEMS * BLOCKS; i += THREADS) {
        int rank = i / (PARTS * ITEMS), part = i / ITEMS % PARTS;
        Item item(p, place, i % ITEMS);
        if (item.there)
            write_to(rank, &state().vectors[next][item.batch][part * p.width + item.column], state().fresh[part][i % ITEMS]);
    }
#else
    for (int i = threadIdx.x; i < PARTS * ITEMS; i += THREADS) {
        Item item(p, place, i % ITEMS);
        if (item.there)
            p.exchange[((i64)next * BATCH + item.batch) * PADDED + i / ITEMS * p.width + item.column] =
                state().fresh[i / ITEMS][i % ITEMS];
    }
#endif
}

// Gathers the vectors that all blocks have sent.
__device__ __forceinline__ void take(const Params& p, int next) {
#if !CLUSTER
    constexpr int PACKS = BATCH * PADDED * sizeof(REAL) / 16;
    const char* from = (const char*)(p.exchange + (i64)next * BATCH * PADDED);
    unsigned to = address(&state().vectors[0][0][0]);
    for (int i = threadIdx.x; i < PACKS; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 16), "l"(from + i * 16) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#endif
}

// Initialises the vectors with a state of each sequence, or zeros.
__device__ __forceinline__ void start(const Params& p, const Place& place, const REAL* from) {
    for (int i = threadIdx.x; i < BATCH * PADDED; i += THREADS) {
        int batch = i / PADDED, column = i % PADDED;
        bool there = from && batch < place.sequences && column < p.width;
        REAL value = there ? from[(place.sequence + batch) * p.width + column] : (REAL)0;
        state().vectors[0][batch][column] = value;
        if (CLUSTER) state().vectors[CLUSTER ? 1 : 0][batch][column] = 0;
    }
}

#if NORM
// Sums `other` over the columns of all blocks, for each sequence.
template <class Other>
__device__ __forceinline__ void sum_over_group(const Params& p, const Place& place, unsigned& meetings, int next, Other other) {
    int batch = threadIdx.x;
    if (batch < BATCH) {
        REAL sum = 0;
        for (int own = 0; own < OWN; ++own)
            if (Item(p, place, batch * OWN + own).there) sum += other(batch * OWN + own);
#if CLUSTER
        for (int rank = 0; rank < BLOCKS; ++rank) write_to(rank, &state().parts[next][place.rank][batch], sum);
#else
        p.parts[((i64)next * BLOCKS + place.rank) * BATCH + batch] = sum;
#endif
    }
    meet(p, meetings);
    if (batch < BATCH) {
        REAL sum = 0;
        for (int rank = 0; rank < BLOCKS; ++rank) {
#if CLUSTER
            sum += state().parts[next][rank][batch];
#else
            sum += __ldcg(&p.parts[((i64)next * BLOCKS + rank) * BATCH + batch]);
#endif
        }
        state().norm[batch] = sum;
    }
    __syncthreads();
}
#endif

constexpr REAL EPS = 1e-6;

// Not fmin and fmax: they would turn NaN into a number.
__device__ __forceinline__ REAL within(REAL v, REAL end) { return v < -end ? -end : v > end ? end : v; }

// `u` of a step, from the values of the gates.
__device__ __forceinline__ REAL gated(const Params& p, REAL z, REAL gamma, REAL h, REAL s, REAL m) {
    REAL kept = gamma * h, core = fma(z, s, kept);
    return GATES == 1 ? core : fma(fma(m, z - h, h + kept), p.mix, core);
}
