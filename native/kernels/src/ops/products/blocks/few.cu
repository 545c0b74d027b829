// The kernel of products of a few rows. FUSED: all threads of a block prepare its rows of x while the first weights are
// in flight; else blocks_rows has done so. The host gives FUSED and FN, and the constants of walk.cu.

__device__ __forceinline__ void write(const Walked& p, i64 first, i64 group, const float (&sums)[ROWS][OUTPUTS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            float sum = sum_of_warp(sums[r][o]);
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
    i64 chunks = (p.blocks + 31) / 32, group = blockIdx.x / p.columns, apart = chunks * READY;
    i64 begin = (blockIdx.x % p.columns * WARPS + threadIdx.x / 32) * OUTPUTS;
    auto ready = [&]() -> const unsigned char* {
#if FUSED
        unsigned char* rows = shared + WARPS * STAGES * STAGE;
        make_all_ready(p, group, (int)chunks, rows);
        return rows;
#else
        wait_for_others();
        return p.ready + group * ROWS * apart;
#endif
    };
    walk({p.w, p.outputs, p.blocks}, begin, p.columns * WARPS * OUTPUTS, apart, shared + threadIdx.x / 32 * STAGES * STAGE,
         ready, [&](i64 first, const float (&sums)[ROWS][OUTPUTS]) { write(p, first, group, sums); });
}
