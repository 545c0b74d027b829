// A search down the levels of a memory for each query, and attention over the slots that it finds.
//
// A block processes one query after the other. Warps compute scores, one candidate each. The top_k-th best score is
// found bit by bit from the highest bit on (radix select), by counting scores that are no less. The kept candidates are
// written in the order of their slots. So candidates need no sorting, whatever their number.

typedef unsigned long long Key;

constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffff;

// Keys are ordered as scores are; NaN is below all others, and both zeros are equal.
__device__ Key key(float score) {
    if (score != score) return 0;
    unsigned bits = __float_as_uint(score == 0 ? 0.0f : score);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ Key key(double score) {
    if (score != score) return 0;
    Key bits = __double_as_longlong(score == 0 ? 0.0 : score);
    return bits >> 63 ? ~bits : bits | (Key)1 << 63;
}

template <class T, class F>
__device__ T over_block(T value, F join) {
    __shared__ T of_warps[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(ALL, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    T all = of_warps[0];
    for (int warp = 1; warp < WARPS; ++warp) all = join(all, of_warps[warp]);
    return all;
}

// The number of threads before this one for which `yes` is true (an exclusive scan), and the total number.
__device__ int before(bool yes, int& all) {
    __shared__ int of_warps[WARPS];
    unsigned votes = __ballot_sync(ALL, yes);
    int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    int count = __popc(votes & ((1u << threadIdx.x % 32) - 1));
    all = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) count += of_warps[w];
        all += of_warps[w];
    }
    return count;
}

// The candidates of a level: all slots of the top level, below it the children of the slots kept above.
struct Candidates {
    const int* kept;
    i64 ratio;
    __device__ i64 operator[](i64 i) const { return kept ? kept[i / ratio] * ratio + i % ratio : i; }
};

template <class T>
__device__ void score(const Params& p, const STORAGE* q, const T* rows, Candidates of, i64 count, REAL* scores) {
    for (i64 c = threadIdx.x / 32; c < count; c += WARPS) {
        const T* row = rows + of[c] * p.width;
        REAL sum = 0;
        for (i64 d = threadIdx.x % 32; d < p.width; d += 32) sum += (REAL)widen(q[d]) * (REAL)widen(row[d]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
        if (threadIdx.x % 32 == 0) scores[c] = sum * (REAL)p.scale;
    }
    __syncthreads();
}

__device__ i64 count_from(const REAL* scores, i64 count, Key least) {
    i64 mine = 0;
    for (i64 c = threadIdx.x; c < count; c += THREADS) mine += key(scores[c]) >= least;
    return over_block(mine, [](i64 a, i64 b) { return a + b; });
}

// Writes the `keep` best candidates in the order of their slots.
__device__ void select(const REAL* scores, Candidates of, i64 count, i64 keep, int* kept) {
    Key worst = 0;
    for (int bit = 8 * sizeof(REAL) - 1; bit >= 0; --bit) {
        Key trial = worst | (Key)1 << bit;
        if (count_from(scores, count, trial) >= keep) worst = trial;
    }
    i64 better = count_from(scores, count, worst + 1);
    // Of the candidates with exactly the worst kept score, the first ones are taken.
    i64 equal = 0, written = 0;
    for (i64 first = 0; first < count; first += THREADS) {
        i64 c = first + threadIdx.x;
        Key mine = c < count ? key(scores[c]) : 0;
        bool same = c < count && mine == worst;
        int all;
        i64 at = equal + before(same, all);
        equal += all;
        bool taken = c < count && (mine > worst || (same && at < keep - better));
        at = written + before(taken, all);
        written += all;
        if (taken) kept[at] = (int)of[c];
    }
    __syncthreads();
}

__device__ void attend(const Params& p, i64 query, Candidates of, i64 count, const STORAGE* v, REAL* scores) {
    REAL largest = -1 / (REAL)0;
    for (i64 c = threadIdx.x; c < count; c += THREADS) largest = scores[c] > largest ? scores[c] : largest;
    largest = over_block(largest, [](REAL a, REAL b) { return a > b ? a : b; });
    int* slots = p.slots + query * count;
    REAL sum = 0;
    for (i64 c = threadIdx.x; c < count; c += THREADS) {
        REAL weight = exp(scores[c] - largest);
        scores[c] = weight;
        slots[c] = (int)of[c];
        sum += weight;
    }
    sum = over_block(sum, [](REAL a, REAL b) { return a + b; });
    for (i64 d = threadIdx.x; d < p.width; d += THREADS) {
        REAL mean = 0;
        for (i64 c = 0; c < count; ++c) mean += scores[c] * (REAL)widen(v[slots[c] * p.width + d]);
        narrow(mean / sum, p.context[query * p.width + d]);
    }
    // All threads must have read the scores before the next query overwrites them.
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) hds_query(Params p) {
    REAL* scores = p.scores + blockIdx.x * p.most;
    for (i64 query = blockIdx.x; query < p.queries; query += gridDim.x) {
        i64 memory = p.shared ? 0 : query / p.length;
        const STORAGE* q = p.q + query * p.width;
        int *next = p.kept + blockIdx.x * 2 * p.top_k, *other = next + p.top_k;
        Candidates of{nullptr, p.ratio};
        i64 count = p.sizes[p.levels - 1];
        for (int level = p.levels - 1; level > 0; --level) {
            score(p, q, p.above[level] + memory * p.sizes[level] * p.width, of, count, scores);
            i64 keep = count < p.top_k ? count : p.top_k;
            select(scores, of, count, keep, next);
            of.kept = next;
            next = other;
            other = (int*)of.kept;
            count = keep * p.ratio;
        }
        i64 bank = memory * p.sizes[0] * p.width;
        score(p, q, p.k + bank, of, count, scores);
        attend(p, query, of, count, p.v + bank, scores);
    }
}
