// Products of a few rows. A warp has OUTPUTS rows of weights at a time; of 32 adjacent blocks, each lane has one.
// STAGES - 1 pieces of weights are in flight while one is multiplied. The host gives FORMAT, ROWS of x, FLOATS, WARPS,
// STAGES, OUTPUTS, ROW_BYTES and READY (bytes of x for 32 blocks of a row).

constexpr int WORDS = FORMAT == 8 ? 8 : 4;
// ROW_BYTES has 32 blocks from an even address on, in 16-byte units from that address rounded down.
constexpr int UNITS = ROW_BYTES / 16, STAGE = OUTPUTS * ROW_BYTES;

// Units of a row that remain after each lane has copied equally many. Those of all OUTPUTS rows are one further copy.
constexpr int REST = UNITS % 32;
static_assert(OUTPUTS * REST <= 32, "one copy");

// Rows of weights.
struct Weights {
    const unsigned char* w;
    i64 outputs, blocks;

    // A row. Past the last one it is the last one again, whose result is not written.
    __device__ __forceinline__ const unsigned char* row(i64 output) const {
        return w + (output < outputs ? output : outputs - 1) * blocks * BYTES;
    }
};

// The next piece that a warp fetches: `left` pieces of its rows including this one, this lane's first unit of each row,
// and the lane's unit among the remaining ones.
struct Ahead {
    i64 first, left;
    const unsigned char* units[OUTPUTS + 1];
};

__device__ __forceinline__ Ahead ahead_of(const Weights& w, i64 first, i64 chunks, int lane) {
    Ahead at = {first, chunks};
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) at.units[o] = rounded_down(w.row(first + o)) + lane * 16;
    at.units[OUTPUTS] = rounded_down(w.row(first + lane / REST)) + (UNITS - REST + lane % REST) * 16;
    return at;
}

// Fetches the weights of 32 blocks in whole units. Units past the end of all weights are skipped.
__device__ __forceinline__ void fetch(const Weights& w, const Ahead& at, int lane, unsigned char* stage) {
    const unsigned char* end = w.w + w.outputs * w.blocks * BYTES;
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
        const unsigned char* from = rounded_down(w.row(at.first + o)) + (at.units[0] - rounded_down(w.row(at.first)));
#pragma unroll 1
        for (int unit = 0; unit + lane < UNITS; unit += 32)
            if (from + unit * 16 < end) copy16(stage + o * ROW_BYTES + (lane + unit) * 16, from + unit * 16, end);
    }
}

// Fetches the next piece, if there is one, and moves on. What is behind the last piece is not computed: with few pieces
// that would take as long as the products.
__device__ __forceinline__ void fetch_next(const Weights& w, Ahead& at, i64 chunks, i64 step, int lane, unsigned char* stage) {
    if (at.left > 0) {
        fetch(w, at, lane, stage);
        at.left--;
        if (at.left > 0) {
#pragma unroll
            for (int o = 0; o <= OUTPUTS; ++o) at.units[o] += 32 * BYTES;
        } else if (at.first + step < w.outputs) {
            at = ahead_of(w, at.first + step, chunks, lane);
        }
    }
    commit();
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
    int4 first_half = ((const int4*)x)[lane], second_half = ((const int4*)x)[lane + 32];
    int2 scale = ((const int2*)(x + 1024))[lane];
    int words[8] = {first_half.x,  first_half.y,  first_half.z,  first_half.w,
                    second_half.x, second_half.y, second_half.z, second_half.w};
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        int low = scale.y, high = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int first = FORMAT == 8 ? (int)weights[o][i] : (int)(weights[o][i] & 0x0f0f0f0f);
            int second = FORMAT == 8 ? (int)weights[o][i + WORDS - 4] : (int)(weights[o][i] >> 4 & 0x0f0f0f0f);
            low = __dp4a(first, words[i], low), high = __dp4a(second, words[i + 4], high);
        }
        sums[o] = fmaf(__int_as_float(scale.x) * d[o], (float)(low + high), sums[o]);
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

// The sum over a warp.
__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    return sum;
}

// Multiplies the rows that this warp has: from `begin` on, every `step`-th OUTPUTS of them. `ready` returns the rows of
// x, `apart` bytes from each other, and is called while the first weights are in flight; `write` gets the sums of each
// lane for the OUTPUTS from its first argument on.
template <class Ready, class Write>
__device__ __forceinline__ void walk(const Weights& w, i64 begin, i64 step, i64 apart, unsigned char* stages, Ready ready,
                                     Write write) {
    int lane;
    // Volatile, because the compiler would otherwise read the register repeatedly.
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    i64 chunks = (w.blocks + 31) / 32;
    Ahead ahead = {};
    if (begin < w.outputs) ahead = ahead_of(w, begin, chunks, lane);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch_next(w, ahead, chunks, step, lane, stages + stage * STAGE);
    const unsigned char* rows = ready();
    int stage = 0, next = STAGES - 1;
    for (i64 first = begin; first < w.outputs; first += step) {
        Where at[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            at[o] = where(kept(o * ROW_BYTES + ((int)(unsigned long long)w.row(first + o) & 15) + lane * BYTES));
        float sums[ROWS][OUTPUTS] = {};
        const unsigned char* x = rows;
        for (i64 chunk = 0; chunk < chunks; ++chunk, x += READY) {
            fetch_next(w, ahead, chunks, step, lane, stages + next * STAGE);
            copied<STAGES - 1>();
            __syncwarp();
            if (chunk * 32 + lane < w.blocks) add(x, apart, stages + stage * STAGE, at, lane, sums);
            // The next copy overwrites what was read here.
            __syncwarp();
            next = stage;
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        write(first, sums);
    }
}
