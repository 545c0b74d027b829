// Products of a few rows: a warp has OUTPUTS rows of weights, and of 32 neighbouring blocks a lane each. STAGES pieces
// of weights are under way. x was made ready by blocks_rows. The host gives FORMAT, ROWS of x, FLOATS and FN.

constexpr unsigned ALL = 0xffffffff;
constexpr int OUTPUTS = 4, STAGES = 3, WARPS = 4, WORDS = FORMAT == 8 ? 8 : 4;
// 32 blocks from an even address on, in units of 16 bytes from that address rounded down.
constexpr int UNITS = (32 * BYTES + 14 + 2 + 15) / 16, ROW_BYTES = UNITS * 16;

struct Params {
    const unsigned char* w;
    const unsigned char* x;
    const int2* scales;
    const float* b;
    STORAGE* y;
    i64 rows, outputs, blocks;
};

// Units of a row that are left when each lane has copied as many as all others. The last few of all rows are one copy.
constexpr int REST = UNITS % 32;
static_assert(OUTPUTS * REST <= 32, "one copy");

// Asks for the weights of 32 blocks of all outputs of a warp, whose rows these are, and last the one of which this lane
// copies what is left. 32 blocks are whole units.
__device__ __forceinline__ void fetch(const Params& p, const unsigned char* const (&rows)[OUTPUTS + 1], i64 chunk,
                                      unsigned char* stage) {
    int lane = threadIdx.x % 32;
    i64 skipped = chunk * 32 * BYTES;
    if ((chunk + 1) * 32 < p.blocks) {
        // Another block follows in each row, and so all units are there.
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const unsigned char* from = rounded_down(rows[o]) + skipped + lane * 16;
#pragma unroll
            for (int unit = 0; unit + 32 <= UNITS; unit += 32)
                copy16(stage + o * ROW_BYTES + (lane + unit) * 16, from + unit * 16);
        }
        int unit = UNITS - REST + lane % REST;
        if (lane < OUTPUTS * REST)
            copy16(stage + lane / REST * ROW_BYTES + unit * 16, rounded_down(rows[OUTPUTS]) + skipped + unit * 16);
        return;
    }
    const unsigned char* end = p.w + p.outputs * p.blocks * BYTES;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        const unsigned char* from = rounded_down(rows[o]) + skipped;
        for (int unit = lane; unit < UNITS; unit += 32)
            if (from + unit * 16 < end) copy16(stage + o * ROW_BYTES + unit * 16, from + unit * 16, end);
    }
}

__device__ __forceinline__ Block block_at(const unsigned char* row, int o, const unsigned char* stage) {
    return Block(stage + o * ROW_BYTES + ((unsigned long long)row & 15) + threadIdx.x % 32 * BYTES);
}

#if FLOATS
__device__ __forceinline__ float product(const Block& block, const float* x) {
    float d = block.scale(), sum = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        unsigned word = block.word(i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int byte = word >> 8 * j;
            if (FORMAT == 8) {
                sum = fmaf(__fmul_rn(d, (float)(signed char)byte), x[(4 * i + j) * 32], sum);
            } else {
                sum = fmaf(__fmul_rn(d, (float)((byte & 15) - 8)), x[(4 * i + j) * 32], sum);
                sum = fmaf(__fmul_rn(d, (float)((byte >> 4 & 15) - 8)), x[(4 * i + j + 16) * 32], sum);
            }
        }
    }
    return sum;
}

__device__ __forceinline__ void add(const Params& p, const unsigned char* const (&rows)[OUTPUTS + 1], i64 group, i64 chunk,
                                    const unsigned char* stage, float (&sums)[OUTPUTS][ROWS]) {
    i64 chunks = (p.blocks + 31) / 32;
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        Block block = block_at(rows[o], o, stage);
        for (int r = 0; r < ROWS; ++r) {
            i64 row = group * ROWS + r;
            row = row < p.rows ? row : p.rows - 1;
            sums[o][r] += product(block, (const float*)p.x + (row * chunks + chunk) * 1024 + threadIdx.x % 32);
        }
    }
}
#else
__device__ __forceinline__ void add(const Params& p, const unsigned char* const (&rows)[OUTPUTS + 1], i64 group, i64 chunk,
                                    const unsigned char* stage, float (&sums)[OUTPUTS][ROWS]) {
    i64 chunks = (p.blocks + 31) / 32;
    int lane = threadIdx.x % 32;
    unsigned weights[OUTPUTS][WORDS];
    float d[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        Block block = block_at(rows[o], o, stage);
        d[o] = block.scale();
#pragma unroll
        for (int i = 0; i < WORDS; ++i) weights[o][i] = block.word(i);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        i64 row = group * ROWS + r;
        row = row < p.rows ? row : p.rows - 1;
        const int4* x = (const int4*)p.x + (row * chunks + chunk) * 64 + lane;
        int4 low = x[0], high = x[32];
        int2 scale = p.scales[(row * chunks + chunk) * 32 + lane];
        int words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            int sum = scale.y;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                if (FORMAT == 8) {
                    sum = __dp4a((int)weights[o][i], words[i], sum);
                } else {
                    sum = __dp4a((int)(weights[o][i] & 0x0f0f0f0f), words[i], sum);
                    sum = __dp4a((int)(weights[o][i] >> 4 & 0x0f0f0f0f), words[i + 4], sum);
                }
            }
            sums[o][r] = fmaf(__int_as_float(scale.x) * d[o], (float)sum, sums[o][r]);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS) blocks_walk(Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* stages = shared + threadIdx.x / 32 * STAGES * OUTPUTS * ROW_BYTES;
    int lane = threadIdx.x % 32;
    i64 columns = (p.outputs + OUTPUTS * WARPS - 1) / (OUTPUTS * WARPS), group = blockIdx.x / columns;
    i64 first = (blockIdx.x % columns * WARPS + threadIdx.x / 32) * OUTPUTS, chunks = (p.blocks + 31) / 32;
    if (first >= p.outputs) return;
    const unsigned char* rows[OUTPUTS + 1];
#pragma unroll
    for (int o = 0; o <= OUTPUTS; ++o) {
        i64 output = first + (o < OUTPUTS ? o : lane / REST);
        rows[o] = p.w + (output < p.outputs ? output : p.outputs - 1) * p.blocks * BYTES;
    }
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < chunks) fetch(p, rows, stage, stages + stage * OUTPUTS * ROW_BYTES);
        commit();
    }
    others_are_done();
    float sums[OUTPUTS][ROWS] = {};
    for (i64 chunk = 0; chunk < chunks; ++chunk) {
        i64 next = chunk + STAGES - 1;
        if (next < chunks) fetch(p, rows, next, stages + next % STAGES * OUTPUTS * ROW_BYTES);
        commit();
        arrived<STAGES - 1>();
        if (chunk * 32 + lane < p.blocks) add(p, rows, group, chunk, stages + chunk % STAGES * OUTPUTS * ROW_BYTES, sums);
        // The next copy goes where this was read.
        __syncwarp();
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = sums[o][r];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            i64 output = first + o, row = group * ROWS + r;
            if (lane == o * ROWS + r && output < p.outputs && row < p.rows) {
                float z = p.b ? sum + p.b[output] : sum;
                narrow(activate<FN>(z), p.y[row * p.outputs + output]);
            }
        }
    }
}
