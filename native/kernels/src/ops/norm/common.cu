// Shared by norms and their gradients. THREADS threads, a slot, share a row; a block has ROWS slots, and blocks visit
// rows at a stride of the grid. If PACKS is not 0, a thread holds its PACKS packs of a row in registers, otherwise it
// reads them repeatedly. Params, which the host declares, have `rows` and `columns`, the weights `w` and with HAS_B
// `b`, `eps, scale, inverse_scale, to_mean`, and with CENTERED also `count`; those of gradients have `inverse_count`
// too.

constexpr int WARPS = THREADS / 32;

// A loop over a thread's packs of a row, and the index at which it holds a pack. Rows consist of whole packs.
#if PACKS
constexpr int HELD = PACKS;
typedef int Column;
#define EACH_PACK _Pragma("unroll") for (int k = 0; k < PACKS; ++k)
#define AT k
#else
constexpr int HELD = 1;
typedef i64 Column;
#define EACH_PACK for (int k = 0; column(k) < p.columns; ++k)
#define AT 0
#endif
#define EACH_ELEMENT _Pragma("unroll") for (int e = 0; e < VEC; ++e)

__device__ __forceinline__ int slot() { return threadIdx.x / THREADS; }
__device__ __forceinline__ Column column(int k) { return ((Column)k * THREADS + threadIdx.x % THREADS) * VEC; }
__device__ __forceinline__ bool inside(const Params& p, int k) { return column(k) < (Column)p.columns; }

// The number of independent accumulators of a sum, since dependent additions wait for each other.
constexpr int PARTS = VEC < 4 ? VEC : 4;
template <int N>
__device__ __forceinline__ REAL total(REAL (&parts)[N]) {
#pragma unroll
    for (int half = N / 2; half; half /= 2)
#pragma unroll
        for (int n = 0; n < half; ++n) parts[n] += parts[n + half];
    return parts[0];
}

// The sums over a warp: of one value, in all lanes; or of two, the first in the lower half and the second in the upper
// half of the warp.
__device__ __forceinline__ REAL warp_sums(const REAL (&values)[1]) {
    REAL sum = values[0];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}
__device__ __forceinline__ REAL warp_sums(const REAL (&values)[2]) {
    bool upper = threadIdx.x & 16;
    REAL sum = upper ? values[1] : values[0];
    sum += __shfl_xor_sync(~0u, upper ? values[0] : values[1], 16);
#pragma unroll
    for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// The sums of N values over the threads of a row, in all of these threads, always in one order. Each PLACE has memory
// of its own, double-buffered by `set` so that no thread overwrites sums that another one still reads.
template <int PLACE, int N>
__device__ __forceinline__ void row_sums(REAL (&values)[N], int set) {
    REAL sum = warp_sums(values);
    if (WARPS == 1) {
#pragma unroll
        for (int n = 0; n < N; ++n) values[n] = N == 1 ? sum : __shfl_sync(~0u, sum, 16 * n);
        return;
    }
    __shared__ alignas(16) REAL sums[2][ROWS][N][WARPS];
    int n = threadIdx.x % 32 / 16;
    if (threadIdx.x % 16 == 0 && n < N) sums[set][slot()][n][threadIdx.x % THREADS / 32] = sum;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        REAL parts[WARPS < 4 ? WARPS : 4] = {};
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) parts[warp % 4] += sums[set][slot()][n][warp];
        values[n] = total(parts);
    }
}

// Writes pack k of a row of `to`.
__device__ __forceinline__ void write(const Params& p, const REAL (&values)[VEC], STORAGE* to, i64 row, int k) {
    if (row < p.rows && inside(p, k)) *(Pack*)(to + row * p.columns + column(k)) = narrow(values);
}

struct Statistics {
    REAL mean, r;
    REAL scaled_mean, scaled_r, scaled_t;   // times `scale`; r, and t = 1 / sqrt(..), divided by it

    // (x - mean) scale. The scale is a power of two, so there is only one rounding.
    __device__ __forceinline__ REAL deviation(const Params& p, REAL x) const {
        return CENTERED ? fma(x, p.scale, -scaled_mean) : x * p.scale;
    }
};

template <class Row>
__device__ __forceinline__ Statistics statistics(const Params& p, const Row& row, int set) {
    Statistics s = {};
#if CENTERED
    REAL parts[PARTS] = {};
    EACH_PACK {
        REAL x[VEC];
        row.values(p, k, x);
        EACH_ELEMENT parts[e % PARTS] += x[e];
    }
    REAL sum[1] = {total(parts)};
    row_sums<0>(sum, set);
    // A division, not a product with the inverse: the mean of equal numbers must be exact.
    s.mean = sum[0] / p.count;
    s.scaled_mean = s.mean * p.scale;
#endif
    REAL square_parts[PARTS] = {};
    EACH_PACK {
        REAL x[VEC];
        row.values(p, k, x);
        // Past the row's end x is 0, and its deviation must not count.
        if (inside(p, k))
            EACH_ELEMENT {
                REAL v = s.deviation(p, x[e]);
                square_parts[e % PARTS] += v * v;
            }
    }
    REAL squares[1] = {total(square_parts)};
    row_sums<1>(squares, set);
    REAL square = squares[0] * p.to_mean;
#if OUTSIDE
    REAL q = sqrt(square), t = q == 0 ? 0 : 1 / q;
    s.r = 1 / (q + p.eps);
#else
    s.r = rsqrt(square + p.eps);
    REAL t = s.r;
#endif
    s.scaled_r = s.r * p.inverse_scale;
    s.scaled_t = t * p.inverse_scale;
    return s;
}

// 16 bytes of weights or of their sums, which are aligned to that if VEC is more than 1.
constexpr int AT_ONCE = VEC > 1 ? 16 / sizeof(REAL) : 1;
struct alignas(AT_ONCE * sizeof(REAL)) Some { REAL of[AT_ONCE]; };

// Reads the weights, or sums, of a pack's columns; past the end they are 0.
__device__ __forceinline__ void read(const Params& p, const REAL* from, int k, REAL (&to)[VEC]) {
    bool there = inside(p, k);
#pragma unroll
    for (int e = 0; e < VEC; e += AT_ONCE) {
        Some some = {};
        if (there) some = *(const Some*)(from + column(k) + e);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) to[e + i] = some.of[i];
    }
}

__device__ __forceinline__ void write(const Params& p, const REAL (&from)[VEC], REAL* to, int k) {
    if (inside(p, k))
#pragma unroll
        for (int e = 0; e < VEC; e += AT_ONCE) {
            Some some;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) some.of[i] = from[e + i];
            *(Some*)(to + column(k) + e) = some;
        }
}

#define WEIGHTS_AT (HOLD ? AT : 0)

// w and b of a thread's columns: with HOLD all of them, otherwise those of the current pack.
struct Weights {
    REAL w[HOLD ? HELD : 1][VEC], b[HOLD ? HELD : 1][VEC] = {};

    __device__ __forceinline__ Weights(const Params& p) {
        if (HOLD)
            EACH_PACK read_both(p, k);
    }
    __device__ __forceinline__ void read_both(const Params& p, int k) {
        read(p, p.w, k, w[WEIGHTS_AT]);
#if HAS_B
        read(p, p.b, k, b[WEIGHTS_AT]);
#endif
    }
    __device__ __forceinline__ void again(const Params& p, int k) {
        if (!HOLD) read_both(p, k);
    }
};
