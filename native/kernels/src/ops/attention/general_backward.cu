// The gradients of attention for every call, after common.cu and general.cu.
//   ROLE   what a launch computes: DQ, DK, DV, DBIAS
//
// A block owns OWN rows: queries for dq, keys for dk and dv. It loops over the other side tile by tile, recomputes P
// and dS, and multiplies them with the other side's rows: each gradient is a sum in one block, in a fixed order. For dk
// and dv the block goes through the query heads of its key head one by one. dq, dk and dv each recompute the scores,
// which keeps the sums in registers at any width.
//
// For dbias a block owns OWN x OTHER elements of the bias and sums over the axes along which they are broadcast. If
// there are too few such blocks, each sums over a part of these axes, and another kernel adds up the parts.

#define DQ 0
#define DK 1
#define DV 2
#define DBIAS 3

constexpr bool OF_QUERIES = ROLE == DQ || ROLE == DBIAS;

// The matrices of a query head: the owned rows and the other side's, and the factors of dP.
struct Pairs { Matrix own, other, own_value, other_value; };

__device__ __forceinline__ Pairs pairs(const Params& p, const Place& at) {
    int key_head = at.head / (p.heads / p.key_heads);
    Matrix q = {p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width};
    Matrix dy = {p.dy + start(p.y_at, at.batch, at.head), p.y_at.row, p.queries, p.value_width};
    Matrix k = {p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix v = {p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    return OF_QUERIES ? Pairs{q, k, dy, v} : Pairs{k, q, v, dy};
}

// The tiles in shared memory. Unless WHOLE, both products share two tiles, and the tile to be weighted has its own.
struct Tiles { REAL *own, *other, *own_value, *other_value, *weighted, *x; };

__device__ __forceinline__ Tiles tiles() {
    extern __shared__ __align__(16) unsigned char memory[];
    Tiles t;
    t.own = (REAL*)memory;
    t.other = t.own + OWN * LEADING;
    REAL* next = t.other + OTHER * LEADING;
    t.own_value = WHOLE ? next : t.own;
    t.other_value = WHOLE ? t.own_value + OWN * LEADING : t.other;
    if (WHOLE) next = t.other_value + OTHER * LEADING;
    t.weighted = WHOLE ? (ROLE == DV ? t.other_value : t.other) : next;
    t.x = WHOLE ? next : next + OTHER * SLICE_LEADING;
    return t;
}

// P if ROLE is DV, else dS, of a tile, with the owned rows as its rows. If WHOLE, the tiles have been loaded.
__device__ __forceinline__ void weights(REAL (&s)[ROWS][COLS], const Params& p, const Place& at, const Pairs& of,
                                        const Tiles& t, int own, int other) {
    REAL dp[ROWS][COLS];
    if (WHOLE) {
        clear(s);
        add_products(s, t.own, t.other);
        clear(dp);
        if (ROLE != DV) add_products(dp, t.own_value, t.other_value);
    } else {
        products(s, of.own, of.other, t.own, t.other, own, other);
        if (ROLE != DV) products(dp, of.own_value, of.other_value, t.own_value, t.other_value, own, other);
    }
    i64 head = statistics(p, at.batch, at.head, 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
            int query = OF_QUERIES ? own + own_row(i) : other + other_row(j);
            int key = OF_QUERIES ? other + other_row(j) : own + own_row(i);
            REAL value = key < p.keys ? score(p, at, query, key, s[i][j]) : hidden();
            bool seen = value != hidden();
            REAL weight = seen ? exp2_fast((value - p.shift[head + query]) * (REAL)LOG2_E) : (REAL)0;
            s[i][j] = ROLE == DV ? weight : seen ? weight * (dp[i][j] - p.delta[head + query]) : (REAL)0;
        }
}

#if ROLE != DBIAS
extern "C" __global__ void __launch_bounds__(THREADS) attention_general_backward(Params p) {
    constexpr int WIDE = ROLE == DV;
    Tiles t = tiles();
    int width = WIDE ? p.value_width : p.width;
    unsigned slices = most(1, (width + SLICE - 1) / SLICE);
    int slice = blockIdx.x % slices * SLICE, share = p.heads / p.key_heads;
    Place at = place(p, blockIdx.x / slices, OF_QUERIES ? p.heads : p.key_heads, OF_QUERIES);
    int own = at.tile * OWN, heads = OF_QUERIES ? 1 : share, own_head = at.head;
    int begin = OF_QUERIES ? 0 : first_seeing(p, own) / OTHER * OTHER;
    int end = OF_QUERIES ? visible(p, least(own + OWN, p.queries) - 1) : p.queries;

    REAL sums[ROWS][RUNS * UNIT] = {};
    for (int h = 0; h < heads; ++h) {
        at.head = own_head * heads + h;
        Pairs of = pairs(p, at);
        if (WHOLE && h == 0 && begin < end) {
            fetch<OWN, CHUNK, LEADING, THREADS>(t.own, of.own, own, 0);
            if (ROLE != DV) fetch<OWN, CHUNK, LEADING, THREADS>(t.own_value, of.own_value, own, 0);
        }
        for (int first = begin; first < end; first += OTHER) {
            __syncthreads();
            if (WHOLE) {
                fetch<OTHER, CHUNK, LEADING, THREADS>(t.other, of.other, first, 0);
                fetch<OTHER, CHUNK, LEADING, THREADS>(t.other_value, of.other_value, first, 0);
                end_group();
                wait_groups<0>();
                __syncthreads();
            }
            REAL s[ROWS][COLS];
            weights(s, p, at, of, t, own, first);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLS; ++j) t.x[own_row(i) * X_LEADING + other_row(j)] = s[i][j];
            if (!WHOLE) {
                fetch<OTHER, SLICE, SLICE_LEADING, THREADS>(t.weighted, WIDE ? of.other_value : of.other, first, slice);
                end_group();
                wait_groups<0>();
            }
            __syncthreads();
            add_weighted(sums, t.x, t.weighted, WHOLE ? LEADING : SLICE_LEADING);
        }
    }

    const At& to_at = ROLE == DQ ? p.q_at : ROLE == DK ? p.k_at : p.v_at;
    STORAGE* to = (ROLE == DQ ? p.dq : ROLE == DK ? p.dk : p.dv) + start(to_at, at.batch, own_head);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        int row = own + own_row(i);
        if (row >= (OF_QUERIES ? p.queries : p.keys)) continue;
        store_row(to + row * to_at.row, sums[i], WIDE ? (REAL)1 : p.scale, slice, width);
    }
}
#else
// All indices of an axis along which the bias is broadcast, otherwise the block's own index, which is taken out of
// `id`.
struct Axis { int first, count; };

__device__ __forceinline__ Axis axis(i64 stride, int size, i64& id) {
    if (!stride) return {0, size};
    Axis one = {(int)(id % size), 1};
    id /= size;
    return one;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_dbias(Params p) {
    __shared__ REAL of_warps[THREADS / 32][OTHER];
    Tiles t = tiles();
    i64 id = blockIdx.x;
    int part = id % p.parts;
    id /= p.parts;
    Axis column = axis(p.bias_at[3], (p.keys + OTHER - 1) / OTHER, id);
    Axis row = axis(p.bias_at[2], (p.queries + OWN - 1) / OWN, id);
    Axis head = axis(p.bias_at[1], p.heads, id);
    Axis batch = axis(p.bias_at[0], p.batch, id);

    REAL sums[ROWS][COLS];
    clear(sums);
    i64 all = (i64)batch.count * head.count * row.count * column.count;
    for (i64 item = all * part / p.parts; item < all * (part + 1) / p.parts; ++item) {
        i64 rest = item;
        int key = (column.first + (int)(rest % column.count)) * OTHER;
        rest /= column.count;
        int query = (row.first + (int)(rest % row.count)) * OWN;
        rest /= row.count;
        Place at = {0, batch.first + (int)(rest / head.count), head.first + (int)(rest % head.count)};
        if (visible(p, least(query + OWN, p.queries) - 1) <= key) continue;
        REAL s[ROWS][COLS];
        weights(s, p, at, pairs(p, at), t, query, key);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLS; ++j) sums[i][j] += s[i][j];
    }

    if (!p.bias_at[3]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 1; j < COLS; ++j) sums[i][0] += sums[i][j];
            sums[i][0] = row_sum(sums[i][0]);
        }
    }
    if (!p.bias_at[2]) {
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
#pragma unroll
            for (int i = 1; i < ROWS; ++i) sums[0][j] += sums[i][j];
            sums[0][j] += __shfl_xor_sync(0xffffffff, sums[0][j], 8);
            sums[0][j] += __shfl_xor_sync(0xffffffff, sums[0][j], 16);
            of_warps[threadIdx.x / 32][other_row(j)] = sums[0][j];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
            sums[0][j] = 0;
            for (int warp = 0; warp < THREADS / 32; ++warp) sums[0][j] += of_warps[warp][other_row(j)];
        }
    }
    REAL* to = p.dbias + batch.first * p.bias_at[0] + head.first * p.bias_at[1];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
            int query = p.bias_at[2] ? row.first * OWN + own_row(i) : own_row(i);
            int key = p.bias_at[3] ? column.first * OTHER + other_row(j) : other_row(j);
            bool there = query < (p.bias_at[2] ? p.queries : 1) && key < (p.bias_at[3] ? p.keys : 1);
            if (there) to[part * p.bias_count + query * p.bias_at[2] + key * p.bias_at[3]] = sums[i][j];
        }
}
#endif
