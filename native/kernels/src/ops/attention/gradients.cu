// Shared by the gradients on tensor cores, after mma.cu.
//   ROLE   what a launch computes: DQ; DKV, DK or DV
//
// A block owns OWN rows: queries for dq, keys for dk and dv. It loops over the other side tile by tile, with two tiles
// in shared memory. The rows of the scores are the owned ones in both cases, so P and dS are left operands of the sums
// without a transpose, and each sum is in one block, in a fixed order. The cost is that scores and dP are computed
// twice: seven products, where atomic sums of dq need five.
//
// History, bf16 on an H200, TFLOP/s (of five products) at 4x16x4096x64 and 2x32x8192x128, causal ones in
// brackets:
//   FlashAttention-2 of PyTorch 2.11   266 (223)   301 (287)
//   cuDNN, by PyTorch 2.11             454 (373)   579 (557)
//   mma_backward.cu                    241 (217)   238 (233)
//     at width 128 the sums of dk and dv leave registers for 16 rows a warp only
//   wgmma_backward.cu, version 1       276 (257)   366 (348)
//   version 2                          325 (289)   375 (359)
//     dq of width 64 in 16 warps a multiprocessor, dk and dv in 8 with twice the queries a tile
//   specialised_backward.cu            see there: one pass, five products

#define DQ 0
#define DKV 1
#define DK 2
#define DV 3

constexpr bool OF_QUERIES = ROLE == DQ;
constexpr bool WITH_DV = ROLE == DKV || ROLE == DV, WITH_DS = ROLE != DV;

// The matrices of one side of a head: q and dy for queries, k and v for keys.
struct Sides { Matrix side, value; };

__device__ __forceinline__ Sides of_queries(const Params& p, int batch, int head) {
    return {{p.q + start(p.q_at, batch, head), p.q_at.row, p.queries, p.width},
            {p.dy + start(p.y_at, batch, head), p.y_at.row, p.queries, p.value_width}};
}
__device__ __forceinline__ Sides of_keys(const Params& p, int batch, int key_head) {
    return {{p.k + start(p.k_at, batch, key_head), p.k_at.row, p.keys, p.width},
            {p.v + start(p.v_at, batch, key_head), p.v_at.row, p.keys, p.value_width}};
}

// The work of a block: its own rows, and `items` tiles of the other side, head by head.
struct Work {
    int batch, own_head, head, key_head, row, begin, end, items;

    template <class P>
    __device__ __forceinline__ Work(P& p, unsigned index) {
        int share = p.heads / p.key_heads;
        Place at = place(p, index, OF_QUERIES ? p.heads : p.key_heads, OF_QUERIES);
        batch = at.batch, own_head = at.head;
        head = OF_QUERIES ? own_head : own_head * share;
        key_head = OF_QUERIES ? own_head / share : own_head;
        row = at.tile * OWN;
        begin = OF_QUERIES ? 0 : first_seeing(p, row) / OTHER * OTHER;
        end = OF_QUERIES ? visible(p, least(row + OWN, p.queries) - 1) : p.queries;
        int tiles = end > begin ? (end - begin + OTHER - 1) / OTHER : 0;
        items = tiles * (OF_QUERIES ? 1 : share);
    }

    __device__ __forceinline__ Sides own(const Params& p) const {
        return OF_QUERIES ? of_queries(p, batch, head) : of_keys(p, batch, key_head);
    }
    __device__ __forceinline__ Sides others(const Params& p, int head) const {
        return OF_QUERIES ? of_keys(p, batch, key_head) : of_queries(p, batch, head);
    }
};

// Loads shift and delta of a tile of queries into shared memory.
__device__ __forceinline__ void bring_facts(float* facts, const Params& p, int batch, int head, int first) {
    if (OF_QUERIES || threadIdx.x >= OTHER) return;
    // Padding queries have no effect: their rows of q and dy are zeros.
    i64 row = statistics(p, batch, head, first + threadIdx.x);
    bool there = first + threadIdx.x < p.queries;
    facts[threadIdx.x] = there ? p.shift[row] : 0.0f;
    facts[OTHER + threadIdx.x] = there ? p.delta[row] : 0.0f;
}

// Shift and delta of each of a warp's own rows, where these are queries.
struct Facts { float shift[TILES][2], delta[TILES][2]; };

__device__ __forceinline__ void own_facts(Facts& to, const Params& p, const Work& work, int row) {
    if (OF_QUERIES) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int query = row + sum_row(m, half);
                i64 id = statistics(p, work.batch, work.head, query);
                to.shift[m][half] = query < p.queries ? p.shift[id] : 0.0f;
                to.delta[m][half] = query < p.queries ? p.delta[id] : 0.0f;
            }
    }
}

template <bool EDGE>
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], const Facts& own, const float* facts, const Params& p,
                                      int row, int first) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float by = OF_QUERIES ? own.shift[m][e / 2] : facts[sum_column(n) + e % 2];
                float power = exp2_fast(fmaf(s[m][n][e], p.scale, -by));
                int mine = row + sum_row(m, e / 2), other = first + sum_column(n) + e % 2;
                if (EDGE && (OF_QUERIES ? other >= visible(p, mine) : mine >= visible(p, other))) power = 0;
                s[m][n][e] = power;
            }
}

// P from products; 0 where a key is masked. Padding keys have products of 0, and the shift is arbitrary.
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], const Facts& own, const float* facts, const Params& p,
                                      int row, int first) {
    bool edge = OF_QUERIES ? first + OTHER > visible(p, row) : CAUSAL && row + 16 * TILES > visible(p, first);
    if (edge) weigh<true>(s, own, facts, p, row, first);
    else weigh<false>(s, own, facts, p, row, first);
}

// dS from P and dP.
__device__ __forceinline__ void slope(Sums (&s)[TILES][OTHER / 8], const Sums (&dp)[TILES][OTHER / 8], const Facts& own,
                                      const float* facts) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[m][n][e] *= dp[m][n][e] - (OF_QUERIES ? own.delta[m][e / 2] : facts[OTHER + sum_column(n) + e % 2]);
}

__device__ __forceinline__ void finish(const Params& p, const Work& work, int row, const Sums (&side)[TILES][WIDTH / 8],
                                       const Sums (&value)[TILES][VALUE_WIDTH / 8]) {
    // p.scale includes log2(e), which is divided out for the gradients.
    float factor = p.scale * (float)(1 / LOG2_E);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = row + sum_row(m, half);
            if (at >= (OF_QUERIES ? p.queries : p.keys)) continue;
            STORAGE* side_to = OF_QUERIES ? p.dq + start(p.q_at, work.batch, work.own_head) + at * p.q_at.row
                                          : p.dk + start(p.k_at, work.batch, work.own_head) + at * p.k_at.row;
            if (WITH_DS) store_row<WIDTH>(side_to, side[m], half, factor, p.width);
            STORAGE* value_to = p.dv + start(p.v_at, work.batch, work.own_head) + at * p.v_at.row;
            if (WITH_DV) store_row<VALUE_WIDTH>(value_to, value[m], half, 1, p.value_width);
        }
}
