// What dense layers of small batches share. They are bound by reading their weights once, so that their prologue and
// epilogue are fused: a separate kernel would cost more than they do. x has BATCH rows in f32; a warp computes OUTPUTS
// rows of the weights at a time. The host chooses
//   WIDTH     the width of the convolution
//   NORM      whether x is the residual stream, which is normed by the root mean square first
//   BIAS      the type of the bias
//   EPILOGUE  WRITE: y is written; ADD: the result is added to y; CONVOLVE: y is written, with its first half after
//             the convolution; NARROW: narrow_y is written, in the storage type

// The reciprocal root mean squares of the rows of x from each thread's sums of squares, by which NORM multiplies; else 1.
// A barrier of the block.
__device__ __forceinline__ void find_scales(const Dense& p, REAL (&square)[BATCH], REAL (&scales)[BATCH]) {
    __shared__ REAL squares[BATCH][THREADS / 32];
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
            for (int warp = 0; warp < THREADS / 32; ++warp) sum += squares[b][warp];
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
    if (row_put() >= OUTPUTS || row >= p.rows) return;
    operands.bias = p.b ? widen(((const BIAS*)p.b)[row]) : (REAL)0;
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
    if (row_put() < OUTPUTS && row < p.rows) operands.old = p.y[sequence_put() * p.rows + row];
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
        y = convolve(operands.taps, newest);
        keep(operands.taps, p.next_samples[sequence_put()] + in_conv_state(p, row), p.rows / 2, newest);
    }
    p.y[at] = y;
#else
    narrow(y, p.narrow_y[at]);
#endif
}

// Loads the operands of the next rows, if there are any.
__device__ __forceinline__ void read_next(const Dense& p, i64 row, Operands& operands) {
    if (row >= p.rows) return;
    read_ahead(p, row, operands);
    read_old(p, row, operands);
}
