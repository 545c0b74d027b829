// Products of many rows by tensor cores: a block of threads has 64 SIDES outputs, 8 NT rows of x, and COLUMNS blocks of each
// at a time. Of these, SIDES warps side by side have 64 outputs each, and DEEP warps behind one another every DEEP-th block;
// they add up at the end. SPLIT neighbours, a cluster, share the columns of the same outputs and rows, and add up last. A
// multiplication is one block of 16 outputs and 8 rows, whose sums begin with the bits of a float, so that they are floats
// already, and one multiplication takes that away. x was made ready by blocks_rows. The host gives FORMAT, NT, SIDES, SPLIT,
// STAGES and FN.

constexpr int MT = 4, SIDE = 16 * MT, DEEP = 4, COLUMNS = FORMAT == 8 ? 8 : 16, ROWS = SIDE * SIDES;
constexpr int THREADS = 32 * SIDES * DEEP;
// From an even address on, in units of 16 bytes; an odd number of them keeps rows in different banks.
constexpr int UNITS = (COLUMNS * BYTES + 14 + 2 + 15) / 16, STRIDE = (UNITS | 1) * 16;
// Bytes of a block of x, and of a stage: weights, then x.
constexpr int X_BYTES = NT * 320, STAGE = ROWS * STRIDE + COLUMNS * X_BYTES;

struct Params {
    const unsigned char* w;
    const unsigned char* x;
    const float* b;
    STORAGE* y;
    i64 rows, outputs, blocks;
};

// Where a block of threads stands: its first output, its eights of rows, and its first and last chunk.
struct Place {
    i64 first, group, begin, end;
};

__device__ __forceinline__ int own_part() { return blockIdx.x % SPLIT; }

__device__ __forceinline__ Place place(const Params& p) {
    i64 tiles = (p.outputs + ROWS - 1) / ROWS, tile = blockIdx.x / SPLIT, chunks = (p.blocks + COLUMNS - 1) / COLUMNS;
    i64 most = (chunks + SPLIT - 1) / SPLIT, begin = own_part() * most;
    return {tile % tiles * ROWS, tile / tiles, begin < chunks ? begin : chunks, begin + most < chunks ? begin + most : chunks};
}

__device__ __forceinline__ int count(const Params& p, i64 chunk) {
    i64 left = p.blocks - chunk * COLUMNS;
    return (int)(left < COLUMNS ? left : COLUMNS);
}

__device__ __forceinline__ const unsigned char* weights_of(const Params& p, i64 output) {
    return p.w + (output < p.outputs ? output : p.outputs - 1) * p.blocks * BYTES;
}

// Where a thread copies weights from in each chunk: 16 units of a row have as many threads, and then what is left of all rows.
constexpr int AT_ONCE = THREADS / 16, REST = UNITS - 16;
// Threads for what is left: as many as are of whole rows.
constexpr int REST_AT_ONCE = THREADS / REST < ROWS ? THREADS / REST : ROWS;
struct Source {
    const unsigned char* rows;
    const unsigned char* rest;
    // How much further the next of these rows are; and how many chunks have all units.
    i64 step, rest_step, whole;
};

__device__ __forceinline__ Source source(const Params& p, i64 first) {
    const unsigned char* end = p.w + p.outputs * p.blocks * BYTES;
    const unsigned char* last = rounded_down(weights_of(p, first + ROWS - 1)) + UNITS * 16;
    i64 whole = first + ROWS > p.outputs || last > end ? 0 : (end - last) / (COLUMNS * BYTES) + 1;
    return {kept(weights_of(p, first + threadIdx.x / 16) + threadIdx.x % 16 * 16),
            kept(weights_of(p, first + threadIdx.x / REST) + (16 + threadIdx.x % REST) * 16),
            AT_ONCE * p.blocks * BYTES, REST_AT_ONCE * p.blocks * BYTES, whole};
}

__device__ __forceinline__ void fetch_weights(const Params& p, const Source& source, i64 first, i64 chunk,
                                              unsigned char* stage) {
    i64 skipped = chunk * COLUMNS * BYTES;
    if (chunk < source.whole) {
        const unsigned char* from = source.rows + skipped;
        unsigned char* to = stage + threadIdx.x / 16 * STRIDE + threadIdx.x % 16 * 16;
#pragma unroll
        for (int done = 0; done < ROWS; done += AT_ONCE, from += source.step) copy16(to + done * STRIDE, rounded_down(from));
        from = source.rest + skipped;
        to = stage + threadIdx.x / REST * STRIDE + (16 + threadIdx.x % REST) * 16;
        int row = threadIdx.x / REST;
#pragma unroll
        for (int done = 0; done < ROWS; done += REST_AT_ONCE, from += source.rest_step)
            if (row < REST_AT_ONCE && row + done < ROWS) copy16(to + done * STRIDE, rounded_down(from));
        return;
    }
    const unsigned char* end = p.w + p.outputs * p.blocks * BYTES;
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * UNITS; at += THREADS) {
        const unsigned char* from = rounded_down(weights_of(p, first + at / UNITS)) + skipped + at % UNITS * 16;
        if (from < end) copy16(stage + at / UNITS * STRIDE + at % UNITS * 16, from, end);
    }
}

__device__ __forceinline__ void fetch_x(const Params& p, i64 group, i64 chunk, unsigned char* stage) {
    const unsigned char* from = p.x + (group * p.blocks + chunk * COLUMNS) * X_BYTES;
    int bytes = count(p, chunk) * X_BYTES;
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16) copy16(stage + ROWS * STRIDE + at, from + at);
}

// What sums start from in Q8_0; in Q4_0 weights are too large by 8, and each row of x has a number of its own.
constexpr int START = 0x4b400000;

__device__ __forceinline__ void multiply(int (&to)[4], const unsigned (&a)[4], int2 b, int4 scales) {
#if FORMAT == 8
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
        "%10};"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(START));
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %10, "
        "%11};"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(scales.y), "r"(scales.w));
#endif
}

// What takes the float that sums start from away again, times a scale: exact, as it has two bits and a scale 11.
__device__ __forceinline__ float less(int scale, int start) {
    return FORMAT == 8 ? __int_as_float(start) : -__int_as_float(START) * __int_as_float(scale);
}

// A block of 16 outputs as a multiplication takes them, and the scales of the two that this lane has.
__device__ __forceinline__ void factor(const unsigned char* stage, const int (&at)[2], unsigned (&a)[4], float (&d)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Block from(stage, where(at[half]));
        d[half] = from.scale();
        // The lane's words are as many further.
        Block own(stage + threadIdx.x % 4 * 4, where(at[half]));
        unsigned word = own.word(0);
        a[half] = FORMAT == 8 ? word : word & 0x0f0f0f0f;
        a[2 + half] = FORMAT == 8 ? own.word(4) : word >> 4 & 0x0f0f0f0f;
    }
}

// Adds a warp's share of a chunk: every DEEP-th block.
__device__ __forceinline__ void add(const unsigned char* stage, const int (&at)[MT][2], const unsigned char* x, int count,
                                    float (&sums)[MT][NT][4]) {
    int lane = threadIdx.x % 32, deep = threadIdx.x / 32 / SIDES;
    x += deep * X_BYTES;
#pragma unroll
    for (int k = 0; k < COLUMNS; k += DEEP) {
        if (k + deep >= count) break;
        unsigned a[MT][4];
        float d[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) factor(stage + k * BYTES, at[m], a[m], d[m]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int2 b = ((const int2*)(x + k * X_BYTES))[n * 32 + lane];
            // Of two rows.
            int4 scales = ((const int4*)(x + k * X_BYTES + NT * 256))[n * 4 + lane % 4];
            float scale[2] = {__int_as_float(scales.x), __int_as_float(scales.z)};
            float away[2] = {less(scales.x, scales.y), less(scales.z, scales.w)};
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                int to[4];
                multiply(to, a[m], b, scales);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // Rounded once.
                    float product = fmaf(__int_as_float(to[i]), scale[i % 2], away[i % 2]);
                    sums[m][n][i] = fmaf(product, d[m][i / 2], sums[m][n][i]);
                }
            }
        }
    }
}

// Adds up what the warps behind one another have, in the first part of `all`.
__device__ __forceinline__ void add_warps(const float (&sums)[MT][NT][4], float* all) {
    int side = threadIdx.x / 32 % SIDES, deep = threadIdx.x / 32 / SIDES, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int output = side * SIDE + m * 16 + i / 2 * 8 + g, row = n * 8 + 2 * t + i % 2;
                all[(deep * 8 * NT + row) * ROWS + output] = sums[m][n][i];
            }
    __syncthreads();
    for (int at = threadIdx.x; at < 8 * NT * ROWS; at += THREADS)
        for (int d = 1; d < DEEP; ++d) all[at] += all[d * 8 * NT * ROWS + at];
}

__device__ __forceinline__ void meet() {
    if constexpr (SPLIT > 1)
        meet_in_cluster();
    else
        __syncthreads();
}

__device__ __forceinline__ float of_part(const float* sum, int part) {
    if constexpr (SPLIT > 1) return of_block(sum, part);
    return *sum;
}

// Adds up what the neighbours have, of which each writes a part.
__device__ __forceinline__ void write(const Params& p, const Place& at, const float* all) {
    meet();
    for (int i = threadIdx.x + own_part() * THREADS; i < 8 * NT * ROWS; i += SPLIT * THREADS) {
        float z = of_part(all + i, 0);
#pragma unroll
        for (int part = 1; part < SPLIT; ++part) z += of_part(all + i, part);
        i64 row = at.group * 8 * NT + i / ROWS, output = at.first + i % ROWS;
        if (row >= p.rows || output >= p.outputs) continue;
        if (p.b) z += p.b[output];
        narrow(activate<FN>(z), p.y[row * p.outputs + output]);
    }
    // Nobody leaves whose sums are still read.
    meet();
}

// Where a lane's first blocks of weights lie in a stage: blocks are two bytes more than whole words, and so are of the same
// sort where DEEP of them lie between.
__device__ __forceinline__ void find(const Params& p, i64 first, int (&at)[MT][2]) {
    static_assert(DEEP * BYTES % 4 == 0, "whole words");
    int side = threadIdx.x / 32 % SIDES, deep = threadIdx.x / 32 / SIDES, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = side * SIDE + m * 16 + half * 8 + g, skewed = (unsigned long long)weights_of(p, first + row) & 15;
            at[m][half] = kept(row * STRIDE + skewed + deep * BYTES);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks_tile(Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Place at = place(p);
    Source from = source(p, at.first);
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (at.begin + stage < at.end) fetch_weights(p, from, at.first, at.begin + stage, shared + stage * STAGE);
        commit();
    }
    int blocks[MT][2];
    find(p, at.first, blocks);
    wait_for_others();
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (at.begin + stage < at.end) fetch_x(p, at.group, at.begin + stage, shared + stage * STAGE);
        commit();
    }
    float sums[MT][NT][4] = {};
    int stage = 0, free = STAGES - 1;
    for (i64 chunk = at.begin; chunk < at.end; ++chunk) {
        copied<STAGES - 2>();
        // And those of others; and all are done with the stage that is free.
        __syncthreads();
        i64 ahead = chunk + STAGES - 1;
        if (ahead < at.end) {
            fetch_weights(p, from, at.first, ahead, shared + free * STAGE);
            fetch_x(p, at.group, ahead, shared + free * STAGE);
        }
        commit();
        add(shared + stage * STAGE, blocks, shared + stage * STAGE + ROWS * STRIDE, count(p, chunk), sums);
        free = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    // Sums lie where weights were.
    __syncthreads();
    add_warps(sums, (float*)shared);
    write(p, at, (const float*)shared);
}
