// Products by counting: tensor cores count the bits that two rows of bits share. Weights are used as stored, in planes.
// Activations are rows of bits too: for signs (FORM TERNARY) their planes, for bytes (FORM I8) their eight bit planes.
// Every block makes the bit planes of x itself while its weights are in flight. A block has ROWS rows of activations
// and SIDE SIDES rows of weights, whose chunks of CHUNK columns SPLIT warps take in turn. Each thread copies the data
// that it reads itself, STAGES chunks ahead, so threads do not wait for each other before the end. AHEAD: a
// multiprocessor has space for two blocks, so one fetches weights while another kernel's block is still working.

constexpr int THREADS = 32 * WARPS, SPLIT = WARPS / SIDES, OUTS = SIDE * SIDES;
// Groups of eight rows of bits that are counted together.
constexpr int NT = FORM == TERNARY ? ROWS / 8 : ROWS;

// A thread has PIECES pieces of 16 bytes in a stage of STAGE bytes: both planes of its row among eight, and of the row
// eight below.
static_assert(SIDE == 16 && PIECES == 4, "what a thread copies and counts");

__device__ __forceinline__ void fetch(const Params& p, i64 chunk, uint4* stage) {
    i64 bytes = (p.n + 7) / 8, at = chunk * (CHUNK / 8) + threadIdx.x % 4 * 16;
    if (at >= bytes) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 out = blockIdx.x * (i64)OUTS + threadIdx.x / 32 % SIDES * SIDE + half * 8 + threadIdx.x % 32 / 4;
        // Rows past the last one repeat it, and are not written. Columns past the end are multiplied with zeros in x.
        i64 from = (out < p.outs ? out : p.outs - 1) * bytes + at;
        copy16(stage + half * 2 * THREADS, p.planes[0] + from);
        copy16(stage + (half * 2 + 1) * THREADS, p.planes[1] + from);
    }
}

// Counts the shared bits among 256, for 16 rows by 8, and adds them.
__device__ __forceinline__ void count(int (&to)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Adds the counts of 512 columns of 16 rows of a plane by 8 rows of bits.
__device__ __forceinline__ void count(int (&to)[4], uint4 upper, uint4 lower, uint4 bits) {
    count(to, upper.x, lower.x, upper.y, lower.y, bits.x, bits.y);
    count(to, upper.z, lower.z, upper.w, lower.w, bits.z, bits.w);
}

// Bytes of a row of bits: an odd number of 64-byte units, so that adjacent rows fall into different banks. The host
// computes the same; as a parameter the pitch would cost instructions, because the compiler would know less about it.
__device__ __forceinline__ int pitch_of(i64 chunks) { return (int)(chunks | 1) * (CHUNK / 8); }

#if FORM == I8
// Groups of eight columns that a thread keeps in registers between its two passes over x.
constexpr int KEPT = 2 * ROWS, OF_ROW = THREADS / ROWS;

// Transposes eight bytes into eight rows of bits: each row gets one bit of every byte.
__device__ __forceinline__ void spread(Bytes bytes, unsigned char* to, int pitch) {
    unsigned words[2] = {bytes.low, bytes.high};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned swap = (words[i] ^ words[i] >> 7) & 0x00aa00aa;
        words[i] ^= swap ^ swap << 7;
        swap = (words[i] ^ words[i] >> 14) & 0x0000cccc;
        words[i] ^= swap ^ swap << 14;
    }
    unsigned low = (words[0] & 0x0f0f0f0f) | (words[1] & 0x0f0f0f0f) << 4;
    unsigned high = (words[0] >> 4 & 0x0f0f0f0f) | (words[1] & 0xf0f0f0f0);
#pragma unroll
    for (int b = 0; b < 8; b++) to[b * pitch] = (b < 4 ? low : high) >> 8 * (b % 4);
}

// A row of x in flight to a group of threads, which then quantize it.
struct Ready {
    Eight kept[KEPT];
    i64 row, n, first;
    const STORAGE* x;

    __device__ __forceinline__ Ready(const Params& p) {
        row = threadIdx.x / OF_ROW, first = threadIdx.x % OF_ROW * 8;
        n = row < p.rows ? p.n : 0;
        x = p.x + row * p.n;
#pragma unroll
        for (int k = 0; k < KEPT; k++) kept[k] = eight(x, first + k * 8 * OF_ROW, n);
    }

    __device__ __forceinline__ void make(const Params& p, unsigned char* bits, i64 chunks, unsigned* sizes, float* scale) {
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < KEPT; k++) kept[k].here();
#pragma unroll
        for (int k = 0; k < KEPT; k++) most = larger(most, largest_of(kept[k]));
        for (i64 i = first + KEPT * 8 * OF_ROW; i < n; i += 8 * OF_ROW) most = larger(most, largest_of(eight(x, i, n)));
        Measure measure(joined<WARPS / ROWS>(most, sizes, larger), p.floor);
        bool writes = blockIdx.x == 0 && row < p.rows;
        signed char* q = writes && p.q ? p.q + row * p.n : nullptr;
        int pitch = pitch_of(chunks);
        bits += row * 8 * pitch;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            i64 i = first + k * 8 * OF_ROW;
            if (i < chunks * CHUNK) spread(bytes_of(measure, kept[k], q, i, n), bits + i / 8, pitch);
        }
        for (i64 i = first + KEPT * 8 * OF_ROW; i < chunks * CHUNK; i += 8 * OF_ROW)
            spread(bytes_of(measure, eight(x, i, n), q, i, n), bits + i / 8, pitch);
        if (first != 0) return;
        scale[row] = measure.scale;
        if (writes && p.x_scales) p.x_scales[row] = measure.scale;
    }
};

// The sum over the four lanes that share a row of weights, each bit weighted by its place in the byte.
__device__ __forceinline__ int weighed(int low, int high) {
    int t = threadIdx.x % 4, sum = low * (1 << 2 * t) + (t == 3 ? -high : high) * (2 << 2 * t);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    return sum + __shfl_xor_sync(0xffffffff, sum, 2);
}
#else
// Starts the copies of all rows of planes: those of plane 0, then of plane 1. Zeros fill the ends of rows and rows past
// the last one.
__device__ __forceinline__ void fetch_bits(const Params& p, unsigned char* bits, i64 chunks) {
    i64 bytes = (p.n + 7) / 8;
    int units = (int)chunks * (CHUNK / 128), pitch = pitch_of(chunks);
    for (int at = threadIdx.x; at < 2 * ROWS * units; at += THREADS) {
        int line = at / units, unit = at % units;
        i64 row = blockIdx.y * (i64)ROWS + line % ROWS;
        uint4* to = (uint4*)(bits + line * pitch) + unit;
        if (row < p.rows && 16 * unit < bytes)
            copy16(to, (line < ROWS ? p.x_planes[0] : p.x_planes[1]) + row * bytes + 16 * unit);
        else
            *to = make_uint4(0, 0, 0, 0);
    }
}
#endif

// Adds a chunk: sums[..][0] counts products with a positive sign, sums[..][1] those with a negative one.
__device__ __forceinline__ void add_chunk(const uint4* stage, const unsigned char* bits, int pitch, int (&sums)[NT][2][4]) {
    uint4 upper[2] = {stage[0], stage[THREADS]}, lower[2] = {stage[2 * THREADS], stage[3 * THREADS]};
    bits += threadIdx.x % 32 / 4 * pitch + threadIdx.x % 4 * 16;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint4 x = *(const uint4*)(bits + n * 8 * pitch);
        count(sums[n][0], upper[0], lower[0], x);
        count(sums[n][1], upper[1], lower[1], x);
#if FORM == TERNARY
        x = *(const uint4*)(bits + (ROWS + n * 8) * pitch);
        count(sums[n][0], upper[1], lower[1], x);
        count(sums[n][1], upper[0], lower[0], x);
#endif
    }
}

// Writes a warp's sums to shared memory, where those of all parts are added up.
__device__ __forceinline__ void leave(const int (&sums)[NT][2][4], int* all) {
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    all += warp / SIDES * ROWS * OUTS + warp % SIDES * SIDE + g;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int low = sums[n][0][half * 2] - sums[n][1][half * 2], high = sums[n][0][half * 2 + 1] - sums[n][1][half * 2 + 1];
#if FORM == I8
            int sum = weighed(low, high);
            if (t == 0) all[n * OUTS + half * 8] = sum;
#else
            all[(n * 8 + 2 * t) * OUTS + half * 8] = low;
            all[(n * 8 + 2 * t + 1) * OUTS + half * 8] = high;
#endif
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) ternary_counts(Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    uint4* stages = (uint4*)shared + threadIdx.x;
    unsigned char* bits = shared + STAGES * STAGE;
    i64 chunks = (p.n + CHUNK - 1) / CHUNK, part = threadIdx.x / 32 / SIDES;
    auto fetch_first = [&] {
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) {
            i64 chunk = part + stage * SPLIT;
            if (chunk < chunks) fetch(p, chunk, stages + stage * (STAGE / 16));
            commit();
        }
    };
    if (blockIdx.x * (i64)OUTS >= p.outs) return stay(chunks >= 8);
#if AHEAD
    let_others_begin();
    fetch_first();
    wait_for_others();
#else
    wait_for_others();
    let_others_begin();
#endif
#if FORM == I8
    // x is loaded before the weights, which would delay it, unless those were fetched early.
    Ready ready(p);
#else
    fetch_bits(p, bits, chunks);
#endif
#if !AHEAD
    fetch_first();
#endif
#if FORM == I8
    __shared__ unsigned sizes[WARPS];
    __shared__ float scales[ROWS];
    ready.make(p, bits, chunks, sizes, scales);
    p.x_scale = scales;
#else
    // The first group of copies includes the bits.
    copied<STAGES - 1>();
#endif
    __syncthreads();
    int sums[NT][2][4] = {};
    int turn = 0;
    for (i64 chunk = part; chunk < chunks; chunk += SPLIT, turn++) {
        uint4* stage = stages + turn % STAGES * (STAGE / 16);
        copied<STAGES - 1>();
        add_chunk(stage, bits + chunk * (CHUNK / 8), pitch_of(chunks), sums);
        i64 ahead = chunk + STAGES * SPLIT;
        if (ahead < chunks) fetch(p, ahead, stage);
        commit();
    }
    copied<0>();
    __syncthreads();
    leave(sums, (int*)shared);
    __syncthreads();
    auto sum_of = [&](int at) {
        int sum = 0;
#pragma unroll
        for (int other = 0; other < SPLIT; other++) sum += ((const int*)shared)[other * ROWS * OUTS + at];
        return sum;
    };
    finish_all<ROWS, OUTS, THREADS>(p, blockIdx.x, threadIdx.x, sum_of, [] {});
}
