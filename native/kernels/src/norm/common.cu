// What the norms and their gradients share. THREADS threads have a row together, ROWS rows a block. Where
// PACKS is not 0 a thread holds its PACKS packs of a row in registers, else it reads them again and again.

struct Params {
    const STORAGE* x;
    const REAL* w;
    const REAL* b;
    const STORAGE* dy;
    STORAGE* to;      // y, or dx
    REAL* mean;
    REAL* rstd;
    REAL* dw;         // a row of sums for each slot of rows
    REAL* db;
    i64 rows, columns;
    i64 rows_each;    // how many rows a slot of the gradient has
    REAL eps, scale, to_mean, by_columns;
};

constexpr int WARPS = THREADS / 32;

// Packs of a row that a thread has.
#if PACKS
#define EACH_PACK _Pragma("unroll") for (int k = 0; k < PACKS; ++k)
#else
#define EACH_PACK for (int k = 0; k < packs; ++k)
#endif

__device__ __forceinline__ int slot() { return threadIdx.x / THREADS; }
__device__ __forceinline__ i64 column(int k) { return ((i64)k * THREADS + threadIdx.x % THREADS) * VEC; }

// The sum of both over the threads of a row, in all of them; the same order each time.
__device__ __forceinline__ void row_sums(REAL& a, REAL& b) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        a += __shfl_xor_sync(~0u, a, distance);
        b += __shfl_xor_sync(~0u, b, distance);
    }
    if (WARPS == 1) return;
    __shared__ REAL sums[2][ROWS][WARPS];
    int warp = threadIdx.x % THREADS / 32;
    if (threadIdx.x % 32 == 0) {
        sums[0][slot()][warp] = a;
        sums[1][slot()][warp] = b;
    }
    __syncthreads();
    a = b = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        a += sums[0][slot()][other];
        b += sums[1][slot()][other];
    }
    // The next sums go into the same memory.
    __syncthreads();
}

struct Row {
    i64 first;   // its first element
    i64 count;   // its length, or 0 past the last row
    int packs;
    Pack held[PACKS ? PACKS : 1];

    __device__ __forceinline__ Row(const Params& p, i64 row) {
        first = row * p.columns;
        count = row < p.rows ? p.columns : 0;
        packs = (int)((p.columns + (i64)THREADS * VEC - 1) / ((i64)THREADS * VEC));
        if (PACKS == 0) return;
#pragma unroll
        for (int k = 0; k < PACKS; ++k) held[k] = load(p.x + first, column(k), count);
    }
    __device__ __forceinline__ Pack pack(const Params& p, int k) const {
        return PACKS ? held[k] : load(p.x + first, column(k), count);
    }
};

struct Statistics { REAL mean, r, t; };

__device__ __forceinline__ REAL root(REAL v) { return sqrt(v); }

__device__ __forceinline__ Statistics statistics(const Params& p, const Row& row) {
    int packs = row.packs;
    REAL mean = 0, squares = 0, none = 0;
#if CENTERED
    EACH_PACK {
        Pack pack = row.pack(p, k);
#pragma unroll
        for (int e = 0; e < VEC; ++e) mean += widen(pack.of[e]);
    }
    row_sums(mean, none);
    mean *= p.by_columns;
#endif
    EACH_PACK {
        Pack pack = row.pack(p, k);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            REAL v = (widen(pack.of[e]) - mean) * p.scale;
            // Past the row's end there is nothing, not the mean.
            squares += column(k) + e < row.count ? v * v : 0;
        }
    }
    row_sums(squares, none);
    squares *= p.to_mean;
#if OUTSIDE
    REAL q = root(squares);
    return {mean, 1 / (q + p.eps), q == 0 ? 0 : 1 / q};
#else
    REAL r = 1 / root(squares + p.eps);
    return {mean, r, r};
#endif
}

// w and b of a pack; those past the end are 0.
struct Weights { REAL w[VEC], b[VEC]; };

__device__ __forceinline__ Weights weights(const Params& p, int k) {
    Weights of = {};
    i64 at = column(k);
    if (VEC > 1 && at + VEC <= p.columns) {
        // 16 bytes at a time: w and b lie at such addresses where x does.
        constexpr int AT_ONCE = 16 / sizeof(REAL);
        struct alignas(16) Wide { REAL of[AT_ONCE]; };
#pragma unroll
        for (int e = 0; e < VEC; e += AT_ONCE) {
            Wide w = *(const Wide*)(p.w + at + e);
            Wide b = {};
            if (HAS_B) b = *(const Wide*)(p.b + at + e);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                of.w[e + i] = w.of[i];
                of.b[e + i] = b.of[i];
            }
        }
        return of;
    }
    for (int e = 0; e < VEC; ++e) {
        if (at + e >= p.columns) break;
        of.w[e] = p.w[at + e];
        if (HAS_B) of.b[e] = p.b[at + e];
    }
    return of;
}
