// Shared by the kernels that take a part of a head's state through time: double buffering, with two stages in shared
// memory. FETCHERS warps fill one of them while WORKERS warps take the state through the other's steps.
//   WORKERS          warps that hold the state
//   FETCHERS         warps that fill stages
//   STEPS            steps of a stage, a power of 2
//   BACKWARD         whether time runs backwards
//   GATE, NORM       whether g is given, and whether q and k are divided by their L2 norms
//   DELTA, BY_KEY    whether states change by the delta rule, and whether each key has a decay of its own

constexpr int THREADS = 32 * (WORKERS + FETCHERS);
// At the ends of chunks dg is computed from states: see cuda/backward.rs.
static_assert(CHUNK % STEPS == 0, "chunks consist of whole stages");

// A head of a batch.
struct Head {
    i64 batch, index;
};

// The offset of a step of a head in beta, and in g without BY_KEY.
__device__ __forceinline__ i64 of_step(const Params& p, const Head& at, i64 t) {
    return (at.batch * p.length + t) * p.heads + at.index;
}

// The index of a step of a head's group among the rows of q and k.
__device__ __forceinline__ i64 of_group(const Params& p, const Head& at, i64 t) {
    return (at.batch * p.length + t) * p.groups + at.index / (p.heads / p.groups);
}

// The offset of a head's state.
__device__ __forceinline__ i64 of_state(const Params& p, const Head& at) {
    return (at.batch * p.heads + at.index) * p.keys * p.values;
}

__device__ __forceinline__ float decay(float g) { return exp2_fast(g * (float)LOG2_E); }
__device__ __forceinline__ double decay(double g) { return exp(g); }

__device__ __forceinline__ REAL decay(const Params& p, i64 step) { return GATE ? decay(p.g[step]) : (REAL)1; }

// Loads four elements from an address aligned to 16 bytes.
__device__ __forceinline__ void load_four(float* to, const float* from) {
    float4 four = *(const float4*)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
__device__ __forceinline__ void load_four(double* to, const double* from) {
    double2 low = ((const double2*)from)[0], high = ((const double2*)from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}

__device__ __forceinline__ REAL warp_sum(REAL sum) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// The n-th stage in the order of processing; the number of steps of a stage.
__device__ __forceinline__ i64 nth_stage(const Params& p, i64 n) {
    return BACKWARD ? (p.length + STEPS - 1) / STEPS - 1 - n : n;
}
__device__ __forceinline__ int steps_of(const Params& p, i64 stage) {
    i64 left = p.length - stage * STEPS;
    return left < STEPS ? left : STEPS;
}

// Processes all stages. `fetch` fills a stage, whose steps the fetching warps share, and `work` takes the state through
// it.
template <class Stage, class Fetch, class Work>
__device__ __forceinline__ void through_time(const Params& p, Stage* stages, Fetch fetch, Work work) {
    bool fetches = threadIdx.x >= 32 * WORKERS;
    i64 count = (p.length + STEPS - 1) / STEPS;
    if (fetches && count > 0) fetch(stages[0], nth_stage(p, 0));
    for (i64 n = 0; n < count; n++) {
        __syncthreads();
        if (!fetches) work(stages[n % 2], nth_stage(p, n));
        else if (n + 1 < count) fetch(stages[(n + 1) % 2], nth_stage(p, n + 1));
    }
}
