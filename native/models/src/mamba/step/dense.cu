// A dense layer of a small batch, bound by reading its weights once. Its prologue and epilogue are fused, because a
// separate kernel would cost more than they do. x has BATCH rows in f32; a warp computes ROWS rows of the weights at a
// time. The host chooses
//   WIDTH     the width of the convolution
//   NORM      whether x is the residual stream, which is normed by the root mean square first
//   EPILOGUE  WRITE: y is written; ADD: the result is added to y; CONVOLVE: y is written, with its first half after
//             the convolution; NARROW: narrow_y is written, in the storage type

constexpr int WARPS = THREADS / 32;

// A lane's packs of weights: PACKS of each of the warp's ROWS rows.
struct Held { Pack of[ROWS][PACKS]; };

__device__ __forceinline__ i64 column(i64 first, int k) { return first + ((i64)k * 32 + threadIdx.x % 32) * VEC; }

__device__ __forceinline__ void read(const Dense& p, i64 row, i64 first, Held& held) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
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
                                    REAL (&sums)[ROWS][BATCH]) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        REAL w[ROWS][VEC];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) widen(held.of[r][k], w[r]);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            REAL v[VEC];
            take_pack(x + b * padded(p), first / (32 * VEC) + k, v);
#pragma unroll
            for (int e = 0; e < VEC; ++e)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sums[r][b] = fma(w[r][e], v[e], sums[r][b]);
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
    __shared__ REAL squares[BATCH][WARPS];
    if (NORM)
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int distance = 16; distance; distance /= 2)
                square[b] += __shfl_xor_sync(~0u, square[b], distance);
            if (threadIdx.x % 32 == 0) squares[b][threadIdx.x / 32] = square[b];
        }
    __syncthreads();
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        scales[b] = 1;
        if (NORM) {
            REAL sum = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += squares[b][warp];
            scales[b] = 1 / sqrt(sum * p.to_mean + p.eps);
        }
    }
}

// The operands of a thread's epilogue, loaded before its sum is ready, to hide their latency.
struct Operands {
    REAL bias;
#if EPILOGUE == ADD
    REAL old;
#elif EPILOGUE == CONVOLVE
    Taps taps;
#endif
};

// The lane that writes row r of sequence b; and the row and the sequence that this lane writes.
__device__ __forceinline__ int putter(int r, int b) { return r * BATCH + b; }
__device__ __forceinline__ int row_put() { return threadIdx.x % 32 / BATCH; }
__device__ __forceinline__ int sequence_put() { return threadIdx.x % 32 % BATCH; }

// The offset of a channel in a sequence's conv_state.
__device__ __forceinline__ i64 in_conv_state(const Dense& p, i64 channel) {
    return p.layer * (WIDTH - 1) * (p.rows / 2) + channel;
}

// Loads the operands that no earlier kernel of the step writes, so before the wait.
__device__ __forceinline__ void read_ahead(const Dense& p, i64 row, Operands& operands) {
    row += row_put();
    if (row_put() >= ROWS || row >= p.rows) return;
    operands.bias = p.b ? widen(p.b[row]) : (REAL)0;
#if EPILOGUE == CONVOLVE
    if (row < p.rows / 2) {
        const STORAGE* samples = p.samples[sequence_put()] + in_conv_state(p, row);
        operands.taps = taps(samples, p.rows / 2, p.conv_w + row * WIDTH, p.conv_b ? p.conv_b + row : 0);
    }
#endif
}

// Loads the operands that earlier kernels of the step write, so after the wait.
__device__ __forceinline__ void read_old(const Dense& p, i64 row, Operands& operands) {
#if EPILOGUE == ADD
    row += row_put();
    if (row_put() < ROWS && row < p.rows) operands.old = p.y[sequence_put() * p.rows + row];
#endif
}

__device__ __forceinline__ void put(const Dense& p, i64 row, REAL y, const Operands& operands) {
    y += operands.bias;
    i64 at = sequence_put() * p.rows + row;
#if EPILOGUE == WRITE
    p.y[at] = y;
#elif EPILOGUE == ADD
    p.y[at] = operands.old + y;
#elif EPILOGUE == CONVOLVE
    if (row < p.rows / 2) {
        STORAGE newest;
        narrow(y, newest);
        y = convolve(operands.taps, p.next_samples[sequence_put()] + in_conv_state(p, row), p.rows / 2, newest);
    }
    p.y[at] = y;
#else
    narrow(y, p.narrow_y[at]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) step_dense(Dense p) {
    extern __shared__ Four shared[];
    REAL* x = (REAL*)shared;
    let_others_begin();
    i64 step = (i64)gridDim.x * WARPS * ROWS, row = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    Held held;
    Operands operands;
    read(p, row, 0, held);
    read_ahead(p, row, operands);
    wait_for_others();
    read_old(p, row, operands);
    REAL scales[BATCH];
    take(p, x, scales);
    for (; row < p.rows; row += step) {
        REAL sums[ROWS][BATCH] = {};
        for (i64 first = 0; first < p.columns; first += 32 * VEC * PACKS) {
            Held these = held;
            bool more = first + 32 * VEC * PACKS < p.columns;
            if (more) read(p, row, first + 32 * VEC * PACKS, held);
            else if (row + step < p.rows) read(p, row + step, 0, held);
            add(p, (int)first, these, x, sums);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                REAL sum = sums[r][b];
#pragma unroll
                for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (threadIdx.x % 32 == putter(r, b) && row + r < p.rows) put(p, row + r, sum * scales[b], operands);
            }
        if (row + step < p.rows) {
            read_ahead(p, row + step, operands);
            read_old(p, row + step, operands);
        }
    }
}
