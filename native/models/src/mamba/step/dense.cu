// A dense layer of a small batch with weights of floats; the rest of it is in layer.cu.

// A lane's packs of weights: PACKS of each of the warp's OUTPUTS rows.
struct Held { Pack of[OUTPUTS][PACKS]; };

__device__ __forceinline__ i64 column(i64 first, int k) { return first + ((i64)k * 32 + threadIdx.x % 32) * VEC; }

__device__ __forceinline__ void read(const Dense& p, i64 row, i64 first, Held& held) {
#pragma unroll
    for (int r = 0; r < OUTPUTS; ++r)
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            i64 at = column(first, k);
            held.of[r][k] = Pack{};
            if (row + r < p.rows && at < p.columns) held.of[r][k] = *(const Pack*)(p.w + (row + r) * p.columns + at);
        }
}

// Elements of a row of x in shared memory, padded with zeros to whole reads of a warp.
__device__ __forceinline__ int padded(const Dense& p) {
    constexpr int EACH = 32 * VEC * PACKS;
    return ((int)p.columns + EACH - 1) / EACH * EACH;
}

// The index of an element of x in shared memory. The 32 lanes of a warp have adjacent packs, and each lane reads four
// elements at once; this order avoids bank conflicts.
__device__ __forceinline__ int place(int column) {
    if (VEC <= 4) return column;
    int pack = column / VEC, e = column % VEC;
    return ((pack / 32 * (VEC / 4) + e / 4) * 32 + pack % 32) * 4 + e % 4;
}

struct alignas(16) Four { REAL of[4]; };

__device__ __forceinline__ void take_pack(const REAL* x, int k, REAL (&to)[VEC]) {
    int lane = threadIdx.x % 32;
    if (VEC == 1) to[0] = x[k * 32 + lane];
#pragma unroll
    for (int four = 0; four < VEC / 4; ++four) {
        Four v = *(const Four*)(x + ((k * (VEC / 4) + four) * 32 + lane) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) to[four * 4 + e] = v.of[e];
    }
}

__device__ __forceinline__ void add(const Dense& p, int first, const Held& held, const REAL* x,
                                    REAL (&sums)[OUTPUTS][BATCH]) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        REAL w[OUTPUTS][VEC];
#pragma unroll
        for (int r = 0; r < OUTPUTS; ++r) widen(held.of[r][k], w[r]);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            REAL v[VEC];
            take_pack(x + b * padded(p), first / (32 * VEC) + k, v);
#pragma unroll
            for (int e = 0; e < VEC; ++e)
#pragma unroll
                for (int r = 0; r < OUTPUTS; ++r) sums[r][b] = fma(w[r][e], v[e], sums[r][b]);
        }
    }
}

// Elements of each row that a thread loads before it uses them, so that their latencies overlap.
constexpr int ASKED = BATCH > 4 ? 4 : 8;

// The prologue: loads the rows of x, times the weights of the norm, into shared memory. The reciprocal root mean square
// of each row is returned in `scales`, by which the epilogue multiplies.
__device__ __forceinline__ void take(const Dense& p, REAL* x, REAL (&scales)[BATCH]) {
    REAL square[BATCH] = {};
    for (int first = threadIdx.x; first < padded(p); first += THREADS * ASKED) {
        REAL v[BATCH][ASKED], w[ASKED];
#pragma unroll
        for (int k = 0; k < ASKED; ++k) {
            int at = first + k * THREADS;
            bool there = at < p.columns;
            w[k] = NORM && there ? p.norm[at] : (REAL)1;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) v[b][k] = there ? p.x[b * p.stride + at] : (REAL)0;
        }
#pragma unroll
        for (int k = 0; k < ASKED; ++k) {
            int at = first + k * THREADS;
            if (at >= padded(p)) break;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (NORM) square[b] = fma(v[b][k], v[b][k], square[b]);
                x[b * padded(p) + place(at)] = v[b][k] * w[k];
            }
        }
    }
    find_scales(p, square, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) step_dense(Dense p) {
    extern __shared__ Four shared[];
    REAL* x = (REAL*)shared;
    let_others_begin();
    constexpr int WARPS = THREADS / 32;
    i64 step = (i64)gridDim.x * WARPS * OUTPUTS, row = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * OUTPUTS;
    Held held;
    Operands operands;
    read(p, row, 0, held);
    read_ahead(p, row, operands);
    wait_for_others();
    read_old(p, row, operands);
    REAL scales[BATCH];
    take(p, x, scales);
    for (; row < p.rows; row += step) {
        REAL sums[OUTPUTS][BATCH] = {};
        for (i64 first = 0; first < p.columns; first += 32 * VEC * PACKS) {
            Held these = held;
            bool more = first + 32 * VEC * PACKS < p.columns;
            if (more) read(p, row, first + 32 * VEC * PACKS, held);
            else if (row + step < p.rows) read(p, row + step, 0, held);
            add(p, (int)first, these, x, sums);
        }
#pragma unroll
        for (int r = 0; r < OUTPUTS; ++r)
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                REAL sum = sums[r][b];
#pragma unroll
                for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (threadIdx.x % 32 == putter(r, b) && row + r < p.rows) put(p, row + r, sum * scales[b], operands);
            }
        read_next(p, row + step, operands);
    }
}
