// The online softmax of a warp's scores, after mma.cu.

struct Softmax { float top[TILES][2], total[TILES][2], fade[TILES][2]; };

__device__ __forceinline__ void begin(Softmax& state) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) state.top[m][half] = hidden(), state.total[m][half] = 0;
}

// Turns products into weights, and computes the factor that rescales all sums so far. On an edge, `seen` gives the
// number of keys that are visible to a row of the lane.
template <bool EDGE, typename Seen>
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], Softmax& state, const Params& p, Seen seen) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = hidden();
            int end = EDGE ? seen(m, half) : OTHER;
#pragma unroll
            for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    if (EDGE && sum_column(n) + e % 2 >= end) s[m][n][e] = hidden();
                    highest = fmaxf(highest, s[m][n][e]);
                }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 2));
            highest = fmaxf(highest, state.top[m][half]);
            // A row without visible keys so far has no maximum to subtract.
            float by = EDGE && highest == hidden() ? 0.0f : highest * p.scale;
            float fade = exp2_fast(fmaf(state.top[m][half], p.scale, -by)), total = state.total[m][half] * fade;
            state.top[m][half] = highest;
            state.fade[m][half] = fade;
#pragma unroll
            for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    s[m][n][e] = exp2_fast(fmaf(s[m][n][e], p.scale, -by));
                    total += s[m][n][e];
                }
            state.total[m][half] = total;
        }
}

// Weighs the keys from `first` on; the warp's rows are the queries from `row` on.
template <bool EDGE>
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], Softmax& state, const Params& p, int row, int first) {
    weigh<EDGE>(s, state, p, [&](int m, int half) { return visible(p, row + sum_row(m, half)) - first; });
}

__device__ __forceinline__ void fade(Sums (&sums)[TILES][VALUE_WIDTH / 8], const Softmax& state) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < VALUE_WIDTH / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][n][e] *= state.fade[m][e / 2];
}

// A row's sum of weights, in all lanes that share the row.
__device__ __forceinline__ float whole_total(const Softmax& state, int m, int half) {
    float total = state.total[m][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    return total + __shfl_xor_sync(0xffffffff, total, 2);
}

// Writes y and lse of a warp's rows.
__device__ __forceinline__ void finish(const Params& p, const Place& at, int row, const Sums (&sums)[TILES][VALUE_WIDTH / 8],
                                       const Softmax& state) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = whole_total(state, m, half);
            int query = row + sum_row(m, half);
            if (query >= p.queries) continue;
            STORAGE* to = p.to + start(p.y_at, at.batch, at.head) + query * p.y_at.row;
            store_row<VALUE_WIDTH>(to, sums[m], half, total == 0 ? 0.0f : 1 / total, p.value_width);
            // p.scale includes log2(e), which is divided out: lse is a natural logarithm.
            float lse = total == 0 ? hidden() : (state.top[m][half] * p.scale + log2f(total)) * (float)(1 / LOG2_E);
            if (threadIdx.x % 4 == 0) p.to_lse[statistics(p, at.batch, at.head, query)] = lse;
        }
}
