// A dense layer of a few rows, bound by reading its weights once; what is done before and behind it in a step of a
// model is done here too, for a kernel more costs more than that. BATCH rows of x, in f32; a warp computes ROWS rows
// of the weights at a time. The host chooses
//   WIDTH   that of the convolution
//   NORM    x is a sum to be normed by the root mean square first
//   BEHIND  0: y is written; 1: it is added to what is there; 2: its first half goes through the convolution; 3: it is
//           written in the type of storage

struct Params {
    const STORAGE* w;          // (rows, columns)
    const STORAGE* b;          // (rows), or none
    const REAL* x;             // (BATCH, columns), rows apart by stride
    const REAL* norm;          // (columns)
    REAL* y;                   // (BATCH, rows)
    STORAGE* narrow_y;         // the same
    const REAL* conv_w;        // (rows / 2, WIDTH)
    const REAL* conv_b;        // (rows / 2), or none
    STORAGE* const* samples;   // BATCH sequences' last samples, each (layers, WIDTH - 1, rows / 2)
    i64 layer;
    i64 rows, columns, stride;  // from row to row of x
    REAL eps, to_mean;
};

constexpr int WARPS = THREADS / 32;

// A warp's packs of its rows of the weights: those of the lane at PACKS places along the row.
struct Held { Pack of[ROWS][PACKS]; };

__device__ __forceinline__ i64 column(i64 first, int k) { return first + ((i64)k * 32 + threadIdx.x % 32) * VEC; }

__device__ __forceinline__ void read(const Params& p, i64 row, i64 first, Held& held) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            i64 at = column(first, k);
            held.of[r][k] = Pack{};
            if (row + r < p.rows && at < p.columns) held.of[r][k] = *(const Pack*)(p.w + (row + r) * p.columns + at);
        }
}

// A row of x in shared memory, to the end of the packs that a warp reads; past its own end there are zeros.
__device__ __forceinline__ int padded(const Params& p) {
    constexpr int EACH = 32 * VEC * PACKS;
    return ((int)p.columns + EACH - 1) / EACH * EACH;
}

// Where an element of x lies in shared memory: so that the 32 lanes of a warp, which have packs side by side, read four
// elements each from different banks.
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

__device__ __forceinline__ void add(const Params& p, int first, const Held& held, const REAL* x,
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

// Elements of each row that a thread asks for at once: it would wait for each of them by itself.
constexpr int ASKED = BATCH > 4 ? 4 : 8;

// The rows of x in shared memory, times the weights of the norm, and what each row must still be multiplied by.
__device__ __forceinline__ void take(const Params& p, REAL* x, REAL (&scales)[BATCH]) {
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

__device__ __forceinline__ REAL convolved(const Params& p, int b, i64 channel, REAL u) {
    i64 channels = p.rows / 2;
    STORAGE *samples = p.samples[b] + p.layer * (WIDTH - 1) * channels + channel, newest;
    narrow(u, newest);
    return convolve(samples, channels, p.conv_w + channel * WIDTH, p.conv_b ? p.conv_b[channel] : (REAL)0, newest);
}

__device__ __forceinline__ void put(const Params& p, int b, i64 row, REAL y) {
    if (p.b) y += widen(p.b[row]);
    i64 at = b * p.rows + row;
#if BEHIND == 0
    p.y[at] = y;
#elif BEHIND == 1
    p.y[at] += y;
#elif BEHIND == 2
    p.y[at] = row < p.rows / 2 ? convolved(p, b, row, y) : y;
#else
    narrow(y, p.narrow_y[at]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) step_dense(Params p) {
    extern __shared__ Four shared[];
    REAL* x = (REAL*)shared;
    let_others_begin();
    i64 step = (i64)gridDim.x * WARPS * ROWS, row = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    Held held;
    read(p, row, 0, held);
    wait_for_others();
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
                if (threadIdx.x % 32 == r * BATCH + b && row + r < p.rows) put(p, b, row + r, sum * scales[b]);
            }
    }
}
