// Products of a few rows. A warp has OUTPUTS rows of weights at a time; of 32 adjacent blocks, each lane has one.
// STAGES - 1 pieces of weights are in flight while one is multiplied. FUSED: all threads of a block prepare its rows of
// x while the first pieces are in flight; else blocks_rows has done so. The host gives FORMAT, ROWS of x, FLOATS,
// FUSED, WARPS, STAGES, OUTPUTS, ROW_BYTES, READY (bytes of x for 32 blocks of a row) and FN.

constexpr int WORDS = FORMAT == 8 ? 8 : 4;
// ROW_BYTES has 32 blocks from an even address on, in 16-byte units from that address rounded down.
constexpr int UNITS = ROW_BYTES / 16, STAGE = OUTPUTS * ROW_BYTES;

// Units of a row that remain after each lane has copied equally many. Those of all OUTPUTS rows are one further copy.
constexpr int REST = UNITS % 32;
static_assert(OUTPUTS * REST <= 32, "one copy");

// A row of weights. Past the last one it is the last one again, whose result is not written.
__device__ __forceinline__ const unsigned char* weights_of(const Walked& p, i64 output) {
    return p.w + (output < p.outputs ? output : p.outputs - 1) * p.blocks * BYTES;
}

// The next piece that a warp fetches: `left` pieces of its rows including this one, this lane's first unit of each row,
// and the lane's unit among the remaining ones.
struct Ahead {
    i64 first, left;
    const unsigned char* units[OUTPUTS + 1];
};

__device__ __forceinline__ Ahead ahead_of(const Walked& p, i64 first, i64 chunks, int lane) {
    Ahead at = {first, chunks};
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) at.units[o] = rounded_down(weights_of(p, first + o)) + lane * 16;
    at.units[OUTPUTS] = rounded_down(weights_of(p, first + lane / REST)) + (UNITS - REST + lane % REST) * 16;
    return at;
}

// Fetches the weights of 32 blocks in whole units. Units past the end of all weights are skipped.
__device__ __forceinline__ void fetch(const Walked& p, const Ahead& at, int lane, unsigned char* stage) {
    const unsigned char* end = p.w + p.outputs * p.blocks * BYTES;
    if (at.units[OUTPUTS - 1] + (UNITS - lane) * 16 <= end) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
            for (int unit = 0; unit + 32 <= UNITS; unit += 32)
                copy16(stage + o * ROW_BYTES + (lane + unit) * 16, at.units[o] + unit * 16);
        }
        int unit = UNITS - REST + lane % REST;
        if (lane < OUTPUTS * REST) copy16(stage + lane / REST * ROW_BYTES + unit * 16, at.units[OUTPUTS]);
        return;
    }
#pragma unroll 1
    for (int o = 0; o < OUTPUTS; ++o) {
        const unsigned char* from = rounded_down(weights_of(p, at.first + o)) + (at.units[0] - rounded_down(weights_of(p, at.first)));
#pragma unroll 1
        for (int unit = 0; unit + lane < UNITS; unit += 32)
            if (from + unit * 16 < end) copy16(stage + o * ROW_BYTES + (lane + unit) * 16, from + unit * 16, end);
    }
}

// Fetches the next piece, if there is one, and moves on.
__device__ __forceinline__ void fetch_next(const Walked& p, Ahead& at, i64 chunks, i64 step, int lane, unsigned char* stage) {
    if (at.left > 0 && at.first < p.outputs) fetch(p, at, lane, stage);
    commit();
    if (--at.left <= 0) {
        at = ahead_of(p, at.first + step, chunks, lane);
        return;
    }
#pragma unroll
    for (int o = 0; o <= OUTPUTS; ++o) at.units[o] += 32 * BYTES;
}

#if FLOATS
// Adds the products of a block of each row of weights with the values in `x`, 32 floats apart.
__device__ __forceinline__ void add(const Block (&blocks)[OUTPUTS], const float (&d)[OUTPUTS], const unsigned char* x,
                                    int lane, float (&sums)[OUTPUTS]) {
    const float* values = (const float*)x + lane;
    float block_sums[OUTPUTS] = {};
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        unsigned words[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) words[o] = blocks[o].word(i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low = values[(4 * i + j) * 32], high = FORMAT == 8 ? 0 : values[(4 * i + j + 16) * 32];
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                int byte = words[o] >> 8 * j;
                if (FORMAT == 8) {
                    block_sums[o] = fmaf(__fmul_rn(d[o], (float)(signed char)byte), low, block_sums[o]);
                } else {
                    block_sums[o] = fmaf(__fmul_rn(d[o], (float)((byte & 15) - 8)), low, block_sums[o]);
                    block_sums[o] = fmaf(__fmul_rn(d[o], (float)((byte >> 4 & 15) - 8)), high, block_sums[o]);
                }
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) sums[o] += block_sums[o];
}
#else
__device__ __forceinline__ void add(const unsigned (&weights)[OUTPUTS][WORDS], const float (&d)[OUTPUTS],
                                    const unsigned char* x, int lane, float (&sums)[OUTPUTS]) {
    int4 low = ((const int4*)x)[lane], high = ((const int4*)x)[lane + 32];
    int2 scale = ((const int2*)(x + 1024))[lane];
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
        sums[o] = fmaf(__int_as_float(scale.x) * d[o], (float)sum, sums[o]);
    }
}
#endif

// Adds the lane's blocks; rows of x are `apart` bytes apart.
__device__ __forceinline__ void add(const unsigned char* x, i64 apart, const unsigned char* stage,
                                    const Where (&at)[OUTPUTS], int lane, float (&sums)[ROWS][OUTPUTS]) {
    float d[OUTPUTS];
#if FLOATS
    Block weights[OUTPUTS] = {{stage, at[0]}, {stage, at[1]}, {stage, at[2]}, {stage, at[3]}};
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) d[o] = weights[o].scale();
#else
    unsigned weights[OUTPUTS][WORDS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        Block block(stage, at[o]);
        d[o] = block.scale();
#pragma unroll
        for (int i = 0; i < WORDS; ++i) weights[o][i] = block.word(i);
    }
#endif
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add(weights, d, x + r * apart, lane, sums[r]);
}

__device__ __forceinline__ void write(const Walked& p, i64 first, i64 group, const float (&sums)[ROWS][OUTPUTS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            float sum = sums[r][o];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
            i64 output = first + o, row = group * ROWS + r;
            if (threadIdx.x % 32 == r * OUTPUTS + o && output < p.outputs && row < p.rows)
                p.y[row * p.outputs + output] = finished(sum, p.b, output);
        }
    }
}

// Prepares the rows of a group. Rows and blocks past the last ones are zeros.
__device__ __forceinline__ void make_all_ready(const Walked& p, i64 group, int chunks, unsigned char* to) {
    for (int at = threadIdx.x; at < ROWS * chunks * 128; at += 32 * WARPS) {
        int quarter = at % 4, chunk = at / 128;
        i64 row = group * ROWS + chunk / chunks, block = chunk % chunks * 32 + at / 4 % 32;
        float x[8] = {};
        if (row < p.rows && block < p.blocks) eight(p.x + (row * p.blocks + block) * 32 + quarter * 8, x);
        make_ready(x, to + chunk * READY, at / 4 % 32, quarter, FORMAT == 4 ? 8 : 0);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) blocks_walk(Walked p) {
    extern __shared__ __align__(16) unsigned char shared[];
    int warp = threadIdx.x / 32, lane;
    // Volatile, because the compiler would otherwise read the register repeatedly.
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    unsigned char* stages = shared + warp * STAGES * STAGE;
    i64 chunks = (p.blocks + 31) / 32, group = blockIdx.x / p.columns, step = p.columns * WARPS * OUTPUTS;
    i64 begin = (blockIdx.x % p.columns * WARPS + warp) * OUTPUTS;
    Ahead ahead = ahead_of(p, begin, chunks, lane);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch_next(p, ahead, chunks, step, lane, stages + stage * STAGE);
#if FUSED
    unsigned char* ready = shared + WARPS * STAGES * STAGE;
    make_all_ready(p, group, (int)chunks, ready);
    int apart = (int)chunks * READY;
#else
    wait_for_others();
    i64 apart = chunks * READY;
    const unsigned char* ready = p.ready + group * ROWS * apart;
#endif
    int stage = 0, next = STAGES - 1;
    for (i64 first = begin; first < p.outputs; first += step) {
        Where at[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            at[o] = where(kept(o * ROW_BYTES + ((int)(unsigned long long)weights_of(p, first + o) & 15) + lane * BYTES));
        float sums[ROWS][OUTPUTS] = {};
        const unsigned char* x = ready;
        for (i64 chunk = 0; chunk < chunks; ++chunk, x += READY) {
            fetch_next(p, ahead, chunks, step, lane, stages + next * STAGE);
            copied<STAGES - 1>();
            __syncwarp();
            if (chunk * 32 + lane < p.blocks) add(x, apart, stages + stage * STAGE, at, lane, sums);
            // The next copy overwrites what was read here.
            __syncwarp();
            next = stage;
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        write(p, first, group, sums);
    }
}
