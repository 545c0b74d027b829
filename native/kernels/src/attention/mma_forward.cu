// Attention of 16-bit storage without mask and bias on tensor cores, after common.cu and mma.cu, as in
// FlashAttention-2 (Dao 2023).
//
// A block has OWN queries of a head. While the scores of a tile are computed, its values come in; while
// these are weighted, the next keys do. Scores are powers of 2: the factor of the exponent goes into the
// scale. Of causal tiles those that nobody sees are left out, and only those on the edge are compared.

struct Softmax { float top[TILES][2], total[TILES][2]; };

// Turns products into weights, and fades what was summed before.
template <bool EDGE>
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], Sums (&sums)[TILES][VALUE_WIDTH / 8], Softmax& state,
                                      const Params& p, int row, int first) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = hidden();
            int end = EDGE ? visible(p, row + sum_row(m, half)) - first : OTHER;
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
            // A row that has seen nothing yet has no top to be shifted by.
            float by = EDGE && highest == hidden() ? 0.0f : highest * p.scale;
            float fade = exp2_fast(fmaf(state.top[m][half], p.scale, -by)), total = state.total[m][half] * fade;
            state.top[m][half] = highest;
#pragma unroll
            for (int n = 0; n < VALUE_WIDTH / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) sums[m][n][e] *= fade;
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_mma(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    STORAGE* q = (STORAGE*)memory;
    STORAGE* k = q + OWN * LEADING;
    STORAGE* v = k + OTHER * LEADING;

    Place at = place(p, blockIdx.x, p.heads, true);
    int row = at.tile * OWN, key_head = at.head / (p.heads / p.key_heads);
    Matrix queries = {p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width};
    Matrix keys = {p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix values = {p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    int end = visible(p, least(row + OWN, p.queries) - 1), whole = visible(p, row) / OTHER * OTHER;

    int warp_row = threadIdx.x / 32 * 16 * TILES;
    unsigned own = left_at<LEADING>(q + warp_row * LEADING);
    unsigned other = right_at<LEADING>(k), weighted = turned_at<VALUE_LEADING>(v);
    row += warp_row;

    Sums sums[TILES][VALUE_WIDTH / 8];
    clear(sums);
    Softmax state;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) state.top[m][half] = hidden(), state.total[m][half] = 0;

    if (end > 0) {
        fetch<OWN, WIDTH, LEADING, THREADS>(q, queries, at.tile * OWN, 0);
        fetch<OTHER, WIDTH, LEADING, THREADS>(k, keys, 0, 0);
        end_group();
    }
#pragma unroll 1
    for (int first = 0; first < end; first += OTHER) {
        wait_groups<0>();
        __syncthreads();
        fetch<OTHER, VALUE_WIDTH, VALUE_LEADING, THREADS>(v, values, first, 0);
        end_group();
        Sums s[TILES][OTHER / 8];
        clear(s);
        add_products<OTHER, WIDTH, LEADING>(s, own, other);
        if (first < whole) weigh<false>(s, sums, state, p, row, first);
        else weigh<true>(s, sums, state, p, row, first);
        Left weights[TILES][OTHER / 16];
        round<OTHER>(weights, s);
        wait_groups<0>();
        __syncthreads();
        if (first + OTHER < end) fetch<OTHER, WIDTH, LEADING, THREADS>(k, keys, first + OTHER, 0);
        end_group();
        add_weighted<VALUE_WIDTH, OTHER, VALUE_LEADING>(sums, weights, weighted);
    }

#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = state.total[m][half];
            total += __shfl_xor_sync(0xffffffff, total, 1);
            total += __shfl_xor_sync(0xffffffff, total, 2);
            int query = row + sum_row(m, half);
            if (query >= p.queries) continue;
            STORAGE* to = p.to + start(p.y_at, at.batch, at.head) + query * p.y_at.row;
            store_row<VALUE_WIDTH>(to, sums[m], half, total == 0 ? 0.0f : 1 / total, p.value_width);
            // The scale has the factor of powers of 2 in it, and lse is in powers of e.
            float lse = total == 0 ? hidden() : (state.top[m][half] * p.scale + log2f(total)) * (float)(1 / LOG2_E);
            if (threadIdx.x % 4 == 0) p.to_lse[((i64)at.batch * p.heads + at.head) * p.queries + query] = lse;
        }
}
