// The chunks of CHUNK steps of the kernels on tensor cores; the formulas are in cuda/chunked.rs.
//   KEYS       keys, rounded up to whole tiles
//   WIDTH    values of a block
//   DELTA    whether states change by the delta rule; else U is v
//   BY_KEY   whether each key has a decay of its own
//   GATE, NORM   whether g is given, and whether q and k are divided by their L2 norms

// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks.
constexpr int KEY_APART = KEYS + 8, VALUE_APART = WIDTH + 8, STEP_APART = CHUNK + 8;
constexpr int SQUARE = CHUNK * CHUNK;
// Elements of what only the delta rule needs, and of P where it is computed beforehand; else one unit.
template <int COUNT>
constexpr int OF_DELTA = DELTA ? COUNT : 8;
template <int COUNT>
constexpr int OF_SCORES = DELTA || BY_KEY ? COUNT : 8;

// A chunk of a head of a sequence.
struct Chunk {
    Sequence of;
    int head, index, group; // group is not found anew for each chunk of a head: divisions take long

    // `id` counts the chunks of all sequences, for each head.
    __device__ __forceinline__ Chunk(const Params& p, int id) : head(id / p.all_chunks) {
        index = id % p.all_chunks;
        of = sequence_of(p, index);
        index -= of.chunk;
        group = head / (p.heads / p.groups);
    }
    __device__ __forceinline__ Chunk(const Params& p, const Sequence& of, int head, int index)
        : of(of), head(head), index(index), group(head / (p.heads / p.groups)) {}

    __device__ __forceinline__ i64 id(const Params& p) const { return (i64)head * p.all_chunks + of.chunk + index; }
    // Steps up to the end of the sequence, and its first step among those of all sequences.
    __device__ __forceinline__ int left() const { return of.length - index * CHUNK; }
    __device__ __forceinline__ i64 step() const { return of.first + index * CHUNK; }
    // Offsets of its first step in q and k, in v, and in beta and g.
    __device__ __forceinline__ i64 keys(const Params& p) const { return (step() * p.groups + group) * p.keys; }
    __device__ __forceinline__ i64 values(const Params& p) const { return (step() * p.heads + head) * p.values; }
    __device__ __forceinline__ i64 of_head(const Params& p) const { return step() * p.heads + head; }
};

// The least log2 of a step's decay: past it a state is 0 in f32. Larger magnitudes would cost sums the digits of the
// steps that follow.
constexpr float MOST_DECAY = -160.0f;

__device__ __forceinline__ float log_decay(float g) {
    float log = g * (float)LOG2_E;
    return log < MOST_DECAY ? MOST_DECAY : log;
}

#if BY_KEY
// log2 of each key's decay over a chunk; those of steps are in q and k already.
struct Factors {
    float log[KEYS];
};
#else
// Factors of a chunk's steps: log2 of the decay from the chunk's start, and what q and k are multiplied by, and
// beta.
struct Factors {
    float log[CHUNK], q[CHUNK], k[CHUNK], beta[CHUNK];
};

// A warp's decays from the chunk's start.
__device__ __forceinline__ void sum_decays(Factors& factors, const Params& p, const Chunk& at) {
    int lane = threadIdx.x % 32;
    float before = 0;
#pragma unroll
    for (int first = 0; first < CHUNK; first += 32) {
        int i = first + lane;
        float log = GATE && i < at.left() ? log_decay(p.g[at.of_head(p) + (i64)i * p.heads]) : 0.0f;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            float other = __shfl_up_sync(~0u, log, distance);
            if (lane >= distance) log += other;
        }
        log += before;
        before = __shfl_sync(~0u, log, 31);
        factors.log[i] = log;
    }
}
#endif

// Queues a copy of a chunk's factors.
__device__ __forceinline__ void copy_factors(Factors& to, const Params& p, const Chunk& at) {
    const float* from = p.factors + at.id(p) * (sizeof(Factors) / 4);
    if (threadIdx.x < sizeof(Factors) / 16) copy((float*)&to + 4 * threadIdx.x, from + 4 * threadIdx.x, true);
}

// The inner product of eight elements of each.
__device__ __forceinline__ float dot(const STORAGE* a, const STORAGE* b) {
    int4 left = *(const int4*)a, right = *(const int4*)b;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float a_low, a_high, b_low, b_high;
        widen((const STORAGE*)&left + i, a_low, a_high);
        widen((const STORAGE*)&right + i, b_low, b_high);
        sum = fmaf(a_low, b_low, fmaf(a_high, b_high, sum));
    }
    return sum;
}

__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

// Queues copies of a chunk's q or k.
__device__ __forceinline__ void copy_keys(STORAGE* to, const STORAGE* from, const Params& p, const Chunk& at) {
    copy_rows<KEYS / 8, KEY_APART>(to, from + at.keys(p), (i64)p.groups * p.keys, at.left(), p.keys);
}
