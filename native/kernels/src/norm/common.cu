// What the norms and their gradients share. THREADS threads have a row together, ROWS rows a block, and
// blocks go through all rows in steps. Where PACKS is not 0 a thread holds its PACKS packs of a row in
// registers, else it reads them again and again.

struct Params {
    const STORAGE* x;
    const REAL* w;
    const REAL* b;
    const STORAGE* dy;
    STORAGE* to;      // y, or dx
    REAL* mean;
    REAL* rstd;
    REAL* dw;         // a row of sums for each slot of threads
    REAL* db;
    i64 rows, columns;
    REAL eps, scale, to_mean, count;   // count: columns, or 1 if there are none
};

constexpr int WARPS = THREADS / 32;

// A thread's packs of a row, and where it holds them.
#if PACKS
constexpr int HELD = PACKS;
#define EACH_PACK _Pragma("unroll") for (int k = 0; k < PACKS; ++k)
#define AT k
#else
constexpr int HELD = 1;
#define EACH_PACK for (int k = 0; column(k) < p.columns; ++k)
#define AT 0
#endif
#define EACH_ELEMENT _Pragma("unroll") for (int e = 0; e < VEC; ++e)

__device__ __forceinline__ int slot() { return threadIdx.x / THREADS; }
__device__ __forceinline__ i64 column(int k) { return ((i64)k * THREADS + threadIdx.x % THREADS) * VEC; }

// The sums of N values over the threads of a row, in all of them; the same order each time. There is a
// place for each of a row's sums, in two sets that rows take in turn: so nobody writes where others still read.
template <int PLACE, int N>
__device__ __forceinline__ void row_sums(REAL (&values)[N], int set) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2)
#pragma unroll
        for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(~0u, values[n], distance);
    if (WARPS == 1) return;
    __shared__ REAL sums[2][3][ROWS][WARPS][2];
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) sums[set][PLACE][slot()][threadIdx.x % THREADS / 32][n] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values[n] = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) values[n] += sums[set][PLACE][slot()][warp][n];
    }
}

// A row of x or dy; past the last row it is empty.
struct Row {
    const STORAGE* from;
    i64 count;
    Pack held[HELD];

    __device__ __forceinline__ void begin(const Params& p, const STORAGE* all, i64 row) {
        count = row < p.rows ? p.columns : 0;
        from = all + (count ? row * p.columns : 0);
        if (PACKS)
            EACH_PACK held[AT] = load(from, column(k), count);
    }
    __device__ __forceinline__ Pack pack(int k) const { return PACKS ? held[AT] : load(from, column(k), count); }
};

struct Statistics { REAL mean, r, t; };

// A product that is rounded, whatever it is added to: of a row of one element nothing may be left.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ Statistics statistics(const Params& p, const Row& row, int set) {
    REAL mean = 0;
#if CENTERED
    REAL sum[1] = {0};
    EACH_PACK {
        Pack pack = row.pack(k);
        EACH_ELEMENT sum[0] += widen(pack.of[e]);
    }
    row_sums<0>(sum, set);
    // Not times the inverse: fused with what follows it would leave a row of equal numbers its roundings.
    mean = sum[0] / p.count;
#endif
    REAL squares[1] = {0};
    EACH_PACK {
        Pack pack = row.pack(k);
        EACH_ELEMENT {
            REAL v = (widen(pack.of[e]) - mean) * p.scale;
            // Past the row's end there is nothing, not the mean.
            squares[0] += column(k) + e < row.count ? v * v : 0;
        }
    }
    row_sums<1>(squares, set);
    REAL square = squares[0] * p.to_mean;
#if OUTSIDE
    REAL q = sqrt(square);
    return {mean, 1 / (q + p.eps), q == 0 ? 0 : 1 / q};
#else
    REAL r = 1 / sqrt(square + p.eps);
    return {mean, r, r};
#endif
}

// 16 bytes of weights: they begin at such addresses where VEC is more than 1.
constexpr int AT_ONCE = VEC > 1 ? 16 / sizeof(REAL) : 1;
struct alignas(AT_ONCE * sizeof(REAL)) Some { REAL of[AT_ONCE]; };

// Weights of a pack; those past the end are 0.
__device__ __forceinline__ void weights(const Params& p, const REAL* from, int k, REAL (&to)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; e += AT_ONCE) {
        Some some = {};
        if (from && column(k) + e < p.columns) some = *(const Some*)(from + column(k) + e);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) to[e + i] = some.of[i];
    }
}

#define WEIGHTS_AT (HOLD_WEIGHTS ? AT : 0)

// w and b of a thread's columns, all of them with HOLD_WEIGHTS, else those of the pack they were read for.
struct Weights {
    REAL w[HOLD_WEIGHTS ? HELD : 1][VEC], b[HOLD_WEIGHTS ? HELD : 1][VEC];

    __device__ __forceinline__ Weights(const Params& p) {
        if (HOLD_WEIGHTS)
            EACH_PACK read(p, k);
    }
    __device__ __forceinline__ void read(const Params& p, int k) {
        weights(p, p.w, k, w[WEIGHTS_AT]);
        weights(p, HAS_B ? p.b : nullptr, k, b[WEIGHTS_AT]);
    }
    __device__ __forceinline__ void again(const Params& p, int k) {
        if (!HOLD_WEIGHTS) read(p, k);
    }
};
