// Samples the next token of each sequence: see sample.rs. One block per sequence. Softmax weights are integers in
// units of 2^-36, so that their sums do not depend on the order.

typedef unsigned long long u64;
constexpr int WARPS = THREADS / 32;   // 32, or a power of two below

// The lowest bit of a key that differs between values of the storage type of one sign.
constexpr int LOWEST_BIT = sizeof(STORAGE) == 2 ? 13 : 0;

// Reduces a value over a warp, or over a block; all threads get the result.
template <class T, class F>
__device__ __forceinline__ T over_warp(T value, F together) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = together(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}
template <class T, class F>
__device__ __forceinline__ T over_block(T value, F together) {
    __shared__ T values[WARPS];
    value = over_warp(value, together);
    __syncthreads();
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
    __syncthreads();
    return over_warp(values[threadIdx.x % WARPS], together);
}
struct Sum {
    __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Larger {
    __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// An unsigned integer in the order of the logits; 0 for NaN.
__device__ __forceinline__ unsigned key(float logit) {
    unsigned bits = __float_as_uint(logit);
    if (logit != logit) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

// The logits of a sequence; each warp handles a contiguous range.
struct Row {
    const STORAGE* logits;
    i64 first, end;   // the range of the warp
    float most, factor;

    __device__ __forceinline__ u64 weight(float logit) const {
        return (u64)(exp2f((logit - most) * factor) * 68719476736.0f);
    }
    // Calls `work` with each of the thread's logits whose key is at least `least`.
    template <class F>
    __device__ __forceinline__ void each(unsigned least, F work) const {
        for (i64 i = first + threadIdx.x % 32; i < end; i += 32) {
            float logit = widen(logits[i]);
            if (key(logit) >= least) work(i, logit);
        }
    }
    __device__ __forceinline__ u64 many(unsigned least) const {
        u64 sum = 0;
        each(least, [&](i64, float) { ++sum; });
        return sum;
    }
    __device__ __forceinline__ u64 mass(unsigned least) const {
        u64 sum = 0;
        each(least, [&](i64, float logit) { sum += weight(logit); });
        return sum;
    }
};

// The largest key for which `enough`, which is monotonic, holds: found bit by bit from the highest.
template <class F>
__device__ __forceinline__ unsigned largest(F enough) {
    unsigned least = 0;
    for (int bit = 31; bit >= LOWEST_BIT; --bit)
        if (enough(least | 1u << bit)) least |= 1u << bit;
    return least;
}

// Writes the token at which the running sum of weights first exceeds `share` of the total. Only the warp in whose
// range it falls writes.
__device__ __forceinline__ void draw(const Row& row, unsigned least, double share, unsigned* token) {
    __shared__ u64 sums[WARPS];
    u64 own = over_warp(row.mass(least), Sum{});
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
    __syncthreads();
    u64 before = 0, all = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < threadIdx.x / 32) before += sums[warp];
        all += sums[warp];
    }
    u64 target = (u64)((double)all * share);
    if (target < before || target >= before + own) return;
    for (i64 first = row.first; first < row.end; first += 32) {
        i64 i = first + threadIdx.x % 32;
        float logit = i < row.end ? widen(row.logits[i]) : __uint_as_float(0x7fffffff);
        u64 sum = key(logit) >= least ? row.weight(logit) : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            u64 left = __shfl_up_sync(~0u, sum, distance);
            if (threadIdx.x % 32 >= distance) sum += left;
        }
        unsigned past = __ballot_sync(~0u, target < before + sum);
        if (past) {
            if (threadIdx.x % 32 == 0) *token = (unsigned)first + __ffs(past) - 1;
            return;
        }
        before += __shfl_sync(~0u, sum, 31);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) step_choose(Choose p) {
    let_others_begin();
    wait_for_others();
    Draw d = p.draws[blockIdx.x];
    unsigned* token = p.tokens + blockIdx.x;
    i64 part = (p.vocabulary + WARPS - 1) / WARPS, first = threadIdx.x / 32 * part;
    i64 end = first + part < p.vocabulary ? first + part : p.vocabulary;
    Row row = {p.logits + blockIdx.x * p.vocabulary, first, end, 0, d.per_temperature * (float)LOG2_E};
    // The largest key, above the complement of its token, so that the first of equal keys wins.
    u64 best = 0;
    row.each(1, [&](i64 i, float logit) { best = Larger{}(best, (u64)key(logit) << 32 | (unsigned)~i); });
    best = over_block(best, Larger{});
    row.most = logit_of(best >> 32);
    if (best == 0 || !(fabsf(row.most) < 3.4e38f)) {
        if (threadIdx.x == 0) *token = ~0u;
        return;
    }
    if (d.per_temperature == 0) {
        if (threadIdx.x == 0) *token = ~(unsigned)best;
        return;
    }
    // Excludes NaN, whose key is 0.
    unsigned least = 1;
    if (d.top_k && d.top_k < p.vocabulary)
        least = largest([&](unsigned k) { return over_block(row.many(k), Sum{}) >= d.top_k; });
    if (least == 0) least = 1;
    if (d.top_p < 1) {
        u64 enough = Larger{}((u64)((double)over_block(row.mass(least), Sum{}) * d.top_p), 1);
        unsigned of_p = largest([&](unsigned k) { return over_block(row.mass(k), Sum{}) >= enough; });
        least = of_p > least ? of_p : least;
    }
    draw(row, least, d.uniform, token);
}
