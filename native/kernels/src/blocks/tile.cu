// Products of many rows by tensor cores: a block of threads has 16 MT outputs and 8 NT rows of x; its warps share the
// columns, COLUMNS blocks at a time, and add up at the end. A multiplication is one block of 16 outputs and 8 rows,
// whose sums begin with the bits of a float, so that they are floats already, and one multiplication takes that away.
// x was made ready by blocks_rows. The host gives FORMAT, MT, NT and FN.

constexpr int WARPS = 4, STAGES = 3, COLUMNS = FORMAT == 8 ? 4 : 8, ROWS = 16 * MT;
// From an even address on, in units of 16 bytes; an odd number of them keeps rows in different banks.
constexpr int UNITS = (COLUMNS * BYTES + 14 + 2 + 15) / 16, STRIDE = (UNITS | 1) * 16;
constexpr int START = 0x4b400000;

struct Params {
    const unsigned char* w;
    const int2* x;
    const float4* scales;
    const float* b;
    STORAGE* y;
    i64 rows, outputs, blocks;
};

__device__ __forceinline__ const unsigned char* weights_at(const Params& p, i64 first, int row, i64 chunk) {
    i64 output = first + row;
    return p.w + ((output < p.outputs ? output : p.outputs - 1) * p.blocks + chunk * COLUMNS) * BYTES;
}

__device__ __forceinline__ void fetch(const Params& p, i64 first, i64 chunk, unsigned char* stage) {
    constexpr int AT_ONCE = 32 / UNITS;  // rows
    int lane = threadIdx.x % 32;
    if ((chunk + 1) * COLUMNS < p.blocks && first + ROWS <= p.outputs) {
        // Another block follows in each row, and so all units are there.
        int row = lane / UNITS, unit = lane % UNITS * 16;
        const unsigned char* from = weights_at(p, first, row, chunk);
        i64 step = AT_ONCE * p.blocks * BYTES;
        stage += row * STRIDE + unit;
#pragma unroll
        for (int done = 0; done < ROWS; done += AT_ONCE, from += step)
            if (row < (ROWS - done < AT_ONCE ? ROWS - done : AT_ONCE))
                copy16(stage + done * STRIDE, rounded_down(from) + unit);
        return;
    }
    const unsigned char* end = p.w + p.outputs * p.blocks * BYTES;
#pragma unroll 1
    for (int at = lane; at < ROWS * UNITS; at += 32) {
        const unsigned char* from = rounded_down(weights_at(p, first, at / UNITS, chunk)) + at % UNITS * 16;
        if (from < end) copy16(stage + at / UNITS * STRIDE + at % UNITS * 16, from, end);
    }
}

__device__ __forceinline__ void multiply(int (&to)[4], const unsigned (&a)[4], int2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
        "%10};"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(START));
}

// Four nibbles as signed bytes.
__device__ __forceinline__ unsigned less_8(unsigned nibbles) {
    return (((nibbles & 0x0f0f0f0f) | 0x80808080) - 0x08080808) ^ 0x80808080;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) blocks_tile(Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned char* stages = shared + warp * STAGES * ROWS * STRIDE;
    i64 columns = (p.outputs + ROWS - 1) / ROWS, first = blockIdx.x % columns * ROWS, group = blockIdx.x / columns;
    i64 chunks = (p.blocks + COLUMNS - 1) / COLUMNS;
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        i64 chunk = warp + stage * WARPS;
        if (chunk < chunks) fetch(p, first, chunk, stages + stage * ROWS * STRIDE);
        commit();
    }
    others_are_done();
    float sums[MT][NT][4] = {};
    int turn = 0;
    for (i64 chunk = warp; chunk < chunks; chunk += WARPS, ++turn) {
        i64 next = chunk + (STAGES - 1) * WARPS;
        if (next < chunks) fetch(p, first, next, stages + (turn + STAGES - 1) % STAGES * ROWS * STRIDE);
        commit();
        arrived<STAGES - 1>();
        const unsigned char* stage = stages + turn % STAGES * ROWS * STRIDE;
        const unsigned char* rows[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = m * 16 + half * 8 + g;
                rows[m][half] = stage + row * STRIDE + ((unsigned long long)weights_at(p, first, row, chunk) & 15);
            }
        int count = (int)(p.blocks - chunk * COLUMNS < COLUMNS ? p.blocks - chunk * COLUMNS : COLUMNS);
#pragma unroll 2
        for (int k = 0; k < count; ++k) {
            i64 at = (group * p.blocks + chunk * COLUMNS + k) * NT;
            const int2* x_at = p.x + at * 32 + lane;
            const float4* scales_at = p.scales + at * 4 + t;
            unsigned a[MT][4];
            float d[MT][2];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Block from(rows[m][half] + k * BYTES);
                    d[m][half] = from.scale();
                    unsigned word = from.word(t);
                    a[m][half] = FORMAT == 8 ? word : less_8(word);
                    a[m][2 + half] = FORMAT == 8 ? from.word(t + 4) : less_8(word >> 4);
                }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                int2 x = x_at[n * 32];
                // Of two rows: scale, and that times the float that sums start from.
                float4 scale = scales_at[n * 4];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    int to[4];
                    multiply(to, a[m], x);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        // Exact before it is rounded once: a scale has 11 bits, and the float two.
                        float product = fmaf(__int_as_float(to[i]), i % 2 ? scale.z : scale.x, i % 2 ? scale.w : scale.y);
                        sums[m][n][i] = fmaf(product, d[m][i / 2], sums[m][n][i]);
                    }
                }
            }
        }
        __syncwarp();
    }
    // All warps' sums, one warp after the other, where weights were.
    __syncthreads();
    float* all = (float*)shared;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int output = m * 16 + i / 2 * 8 + g, row = n * 8 + 2 * t + i % 2;
                all[(warp * 8 * NT + row) * ROWS + output] = sums[m][n][i];
            }
    __syncthreads();
    for (int at = threadIdx.x; at < 8 * NT * ROWS; at += 32 * WARPS) {
        i64 row = group * 8 * NT + at / ROWS, output = first + at % ROWS;
        float z = all[at];
        for (int w = 1; w < WARPS; ++w) z += all[w * 8 * NT * ROWS + at];
        if (row >= p.rows || output >= p.outputs) continue;
        if (p.b) z += p.b[output];
        narrow(activate<FN>(z), p.y[row * p.outputs + output]);
    }
}
