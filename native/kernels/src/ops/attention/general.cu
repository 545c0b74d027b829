// Shared by the general kernels, after common.cu and score.cu: products of tiles by plain multiply-adds in the type of
// the arithmetic, from shared memory. cuda/general.rs chooses the macros:
//   ROWS, COLS   rows and columns of the scores that a thread holds
//   CHUNK        columns of a width in shared memory at a time
//   SLICE        columns of the result that a block computes
//   WHOLE        whether both widths fit a chunk, so that a block's own rows are loaded once
//
// A block has THREADS threads. A warp is 4 by 8 lanes, so that the 8 lanes of a row exchange values by shuffles. A
// lane's rows are 4 apart and its columns 8 apart. Rows in shared memory are an odd number of 16-byte units long, so
// that lanes read without bank conflicts.

constexpr int OWN = 16 * ROWS, OTHER = 8 * COLS;

struct __align__(16) Unit { REAL v[16 / sizeof(REAL)]; };
constexpr int UNIT = 16 / sizeof(REAL);

constexpr int LEADING = CHUNK + UNIT, SLICE_LEADING = SLICE + UNIT, X_LEADING = OTHER + UNIT;
// Runs of UNIT columns of the result that a thread accumulates.
constexpr int RUNS = SLICE / (8 * UNIT);

// A thread's row `i` and column `j`.
__device__ __forceinline__ int own_row(int i) { return threadIdx.x / 32 * 4 * ROWS + threadIdx.x % 32 / 8 + 4 * i; }
__device__ __forceinline__ int other_row(int j) { return threadIdx.x % 8 + 8 * j; }
__device__ __forceinline__ int result_column(int run) { return (threadIdx.x % 8 + 8 * run) * UNIT; }

__device__ __forceinline__ Unit unit_at(const REAL* at) { return *(const Unit*)at; }

// s += a b', rows of both in shared memory. The order of additions is that of the width, so that forward and backward
// compute bitwise equal scores.
__device__ __forceinline__ void add_products(REAL (&s)[ROWS][COLS], const REAL* a, const REAL* b) {
    a += own_row(0) * LEADING;
    b += other_row(0) * LEADING;
#pragma unroll 2
    for (int d = 0; d < CHUNK; d += UNIT) {
        Unit left[ROWS], right[COLS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) left[i] = unit_at(a + 4 * i * LEADING + d);
#pragma unroll
        for (int j = 0; j < COLS; ++j) right[j] = unit_at(b + 8 * j * LEADING + d);
#pragma unroll
        for (int u = 0; u < UNIT; ++u)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLS; ++j) s[i][j] = fma(left[i].v[u], right[j].v[u], s[i][j]);
    }
}

// to += x b, both in shared memory; x are the warp's own rows.
__device__ __forceinline__ void add_weighted(REAL (&to)[ROWS][RUNS * UNIT], const REAL* x, const REAL* b, int leading) {
    x += own_row(0) * X_LEADING;
    b += result_column(0);
#pragma unroll 1
    for (int k = 0; k < OTHER; k += UNIT) {
        Unit left[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) left[i] = unit_at(x + 4 * i * X_LEADING + k);
#pragma unroll
        for (int u = 0; u < UNIT; ++u)
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                Unit right = unit_at(b + (k + u) * leading + 8 * run * UNIT);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int e = 0; e < UNIT; ++e)
                        to[i][run * UNIT + e] = fma(left[i].v[u], right.v[e], to[i][run * UNIT + e]);
            }
    }
}

__device__ __forceinline__ void clear(REAL (&s)[ROWS][COLS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLS; ++j) s[i][j] = 0;
}

// s = a b' of rows of two matrices, chunk by chunk of their width. Unless a block's own rows are loaded once, they are
// loaded here.
__device__ __forceinline__ void products(REAL (&s)[ROWS][COLS], const Matrix& a, const Matrix& b, REAL* at_a, REAL* at_b,
                                         int row_a, int row_b) {
    clear(s);
    for (int column = 0; column < a.width; column += CHUNK) {
        __syncthreads();
        fetch<OWN, CHUNK, LEADING, THREADS>(at_a, a, row_a, column);
        fetch<OTHER, CHUNK, LEADING, THREADS>(at_b, b, row_b, column);
        end_group();
        wait_groups<0>();
        __syncthreads();
        add_products(s, at_a, at_b);
    }
}

// The sum, or the maximum, over the 8 lanes of a row.
__device__ __forceinline__ REAL row_sum(REAL v) {
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) v += __shfl_xor_sync(0xffffffff, v, apart);
    return v;
}
__device__ __forceinline__ REAL row_largest(REAL v) {
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) v = largest(v, __shfl_xor_sync(0xffffffff, v, apart));
    return v;
}

__device__ __forceinline__ void store_row(STORAGE* row, const REAL (&from)[RUNS * UNIT], REAL factor, int column, int width) {
#pragma unroll
    for (int c = 0; c < RUNS * UNIT; ++c) {
        int at = column + result_column(c / UNIT) + c % UNIT;
        if (at < width) narrow(from[c] * factor, row[at]);
    }
}
