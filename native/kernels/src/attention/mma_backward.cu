// The gradients of attention of 16-bit storage without mask and bias on tensor cores, after common.cu and
// mma.cu.
//   ROLE        what a launch computes: DQ; DKV, DK or DV
//
// A block has OWN rows: queries for dq, keys for dk and dv, and goes over the others tile by tile, two of
// which are in shared memory. Rows of the scores are the block's own in both, so P and dS are left operands
// of the sums as they come, and no other block adds to these: the order of all sums is fixed. The price is
// that scores and dP are found twice, seven products where adding dq up from all blocks needs five.

#define DQ 0
#define DKV 1
#define DK 2
#define DV 3

constexpr bool OF_QUERIES = ROLE == DQ;
constexpr bool WITH_DV = ROLE == DKV || ROLE == DV, WITH_DS = ROLE != DV;
constexpr int STAGE = OTHER * (LEADING + VALUE_LEADING);

struct Item { int head, first; };

// Brings a tile of the others, and of queries their shift and delta.
__device__ __forceinline__ void bring(STORAGE* to, float* facts, const Params& p, const Place& at, int head, int first) {
    int key_head = at.head / (p.heads / p.key_heads);
    Matrix narrow_side = OF_QUERIES ? Matrix{p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width}
                                    : Matrix{p.q + start(p.q_at, at.batch, head), p.q_at.row, p.queries, p.width};
    Matrix value_side = OF_QUERIES ? Matrix{p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width}
                                   : Matrix{p.dy + start(p.y_at, at.batch, head), p.y_at.row, p.queries, p.value_width};
    fetch<OTHER, WIDTH, LEADING, THREADS>(to, narrow_side, first, 0);
    fetch<OTHER, VALUE_WIDTH, VALUE_LEADING, THREADS>(to + OTHER * LEADING, value_side, first, 0);
    if (!OF_QUERIES && threadIdx.x < OTHER) {
        // Queries that are not there weigh nothing: their rows of q and dy are zeros.
        i64 row = ((i64)at.batch * p.heads + head) * p.queries + first + threadIdx.x;
        bool there = first + threadIdx.x < p.queries;
        facts[threadIdx.x] = there ? p.shift[row] : 0.0f;
        facts[OTHER + threadIdx.x] = there ? p.delta[row] : 0.0f;
    }
}

// P from products; what is not seen gets none.
template <bool EDGE>
__device__ __forceinline__ void weigh(Sums (&s)[TILES][OTHER / 8], const float (&shift)[TILES][2], const float* facts,
                                      const Params& p, int row, int first) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float by = OF_QUERIES ? shift[m][e / 2] : facts[sum_column(n) + e % 2];
                float power = exp2_fast(fmaf(s[m][n][e], p.scale, -by));
                int own = row + sum_row(m, e / 2), other = first + sum_column(n) + e % 2;
                if (EDGE && (OF_QUERIES ? other >= visible(p, own) : own >= visible(p, other))) power = 0;
                s[m][n][e] = power;
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_mma_backward(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    STORAGE* own_side = (STORAGE*)memory;
    STORAGE* own_value = own_side + OWN * LEADING;
    STORAGE* stages = own_value + OWN * VALUE_LEADING;
    float* facts = (float*)(stages + 2 * STAGE);

    int share = p.heads / p.key_heads;
    Place at = place(p, blockIdx.x, OF_QUERIES ? p.heads : p.key_heads, OF_QUERIES);
    int own_head = at.head;
    if (!OF_QUERIES) at.head *= share;
    int key_head = at.head / share, row = at.tile * OWN;
    int begin = OF_QUERIES ? 0 : first_seeing(p, row) / OTHER * OTHER;
    int end = OF_QUERIES ? visible(p, least(row + OWN, p.queries) - 1) : p.queries;
    int tiles = end > begin ? (end - begin + OTHER - 1) / OTHER : 0, items = tiles * (OF_QUERIES ? 1 : share);

    Matrix side = OF_QUERIES ? Matrix{p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width}
                             : Matrix{p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix value = OF_QUERIES ? Matrix{p.dy + start(p.y_at, at.batch, at.head), p.y_at.row, p.queries, p.value_width}
                              : Matrix{p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    if (items) {
        fetch<OWN, WIDTH, LEADING, THREADS>(own_side, side, row, 0);
        if (WITH_DS) fetch<OWN, VALUE_WIDTH, VALUE_LEADING, THREADS>(own_value, value, row, 0);
        bring(stages, facts, p, at, at.head, begin);
        end_group();
    }

    int warp_row = threadIdx.x / 32 * 16 * TILES;
    unsigned own = left_at<LEADING>(own_side + warp_row * LEADING);
    unsigned own_v = left_at<VALUE_LEADING>(own_value + warp_row * VALUE_LEADING);
    row += warp_row;
    float shift[TILES][2], delta[TILES][2];
    if (OF_QUERIES) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int query = row + sum_row(m, half);
                i64 id = ((i64)at.batch * p.heads + at.head) * p.queries + query;
                shift[m][half] = query < p.queries ? p.shift[id] : 0.0f;
                delta[m][half] = query < p.queries ? p.delta[id] : 0.0f;
            }
    }

    Sums narrow_sums[TILES][WIDTH / 8], value_sums[TILES][VALUE_WIDTH / 8];
    if (WITH_DS) clear(narrow_sums);
    if (WITH_DV) clear(value_sums);
    int head = 0, first = begin;
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
        wait_groups<0>();
        __syncthreads();
        STORAGE* here = stages + item % 2 * STAGE;
        const float* facts_here = facts + item % 2 * 2 * OTHER;
        int next_head = head, next = first + OTHER;
        if (next >= end) next_head++, next = begin;
        if (item + 1 < items) {
            int other = (item + 1) % 2;
            bring(stages + other * STAGE, facts + other * 2 * OTHER, p, at, at.head + next_head, next);
        }
        end_group();

        Sums s[TILES][OTHER / 8];
        clear(s);
        add_products<OTHER, WIDTH, LEADING>(s, own, right_at<LEADING>(here));
        // Of keys that are not there, scores are 0 and what they are shifted by may be anything.
        bool edge = OF_QUERIES ? first + OTHER > visible(p, row) : CAUSAL && row + 16 * TILES > visible(p, first);
        if (edge) weigh<true>(s, shift, facts_here, p, row, first);
        else weigh<false>(s, shift, facts_here, p, row, first);
        STORAGE* here_value = here + OTHER * LEADING;
        Left x[TILES][OTHER / 16];
        if (WITH_DV) {
            round<OTHER>(x, s);
            add_weighted<VALUE_WIDTH, OTHER, VALUE_LEADING>(value_sums, x, turned_at<VALUE_LEADING>(here_value));
        }
        if (WITH_DS) {
            Sums dp[TILES][OTHER / 8];
            clear(dp);
            add_products<OTHER, VALUE_WIDTH, VALUE_LEADING>(dp, own_v, right_at<VALUE_LEADING>(here_value));
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int n = 0; n < OTHER / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float less = OF_QUERIES ? delta[m][e / 2] : facts_here[OTHER + sum_column(n) + e % 2];
                        s[m][n][e] *= dp[m][n][e] - less;
                    }
            round<OTHER>(x, s);
            add_weighted<WIDTH, OTHER, LEADING>(narrow_sums, x, turned_at<LEADING>(here));
        }
        head = next_head, first = next;
    }

    // The scale of the scores has the factor of powers of 2 in it.
    float factor = p.scale * (float)(1 / LOG2_E);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at_row = row + sum_row(m, half);
            if (at_row >= (OF_QUERIES ? p.queries : p.keys)) continue;
            STORAGE* narrow_to = OF_QUERIES ? p.dq + start(p.q_at, at.batch, own_head) + at_row * p.q_at.row
                                            : p.dk + start(p.k_at, at.batch, own_head) + at_row * p.k_at.row;
            if (WITH_DS) store_row<WIDTH>(narrow_to, narrow_sums[m], half, factor, p.width);
            STORAGE* value_to = p.dv + start(p.v_at, at.batch, own_head) + at_row * p.v_at.row;
            if (WITH_DV) store_row<VALUE_WIDTH>(value_to, value_sums[m], half, 1, p.value_width);
        }
}
