// Attention for every call: any type, width, mask and bias. After general.cu.
//
// A block owns OWN queries of a head, and SLICE columns of their results, usually all. The values of a tile are loaded
// while its scores are computed, and the next keys while these values are summed.
//
// History, f32 on an H200, TFLOP/s at widths 64 and 128, backward in brackets:
//   PyTorch 2.11                             35 (35)   46 (38)
//   version 1, 8 columns a thread            35 (19)   27 (17)
//   version 2, 4 columns                     37 (20)   32 (20)
//     two blocks a multiprocessor at width 128, without register spills

extern "C" __global__ void __launch_bounds__(THREADS) attention_general(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int KEPT = WHOLE ? 1 : 0;
    REAL* q = (REAL*)memory;
    REAL* k = q + OWN * LEADING;
    REAL* v = k + OTHER * LEADING;
    REAL* x = v + OTHER * SLICE_LEADING;

    unsigned slices = most(1, (p.value_width + SLICE - 1) / SLICE);
    int slice = blockIdx.x % slices * SLICE;
    Place at = place(p, blockIdx.x / slices, p.heads, true);
    int row = at.tile * OWN, key_head = at.head / (p.heads / p.key_heads);
    Matrix queries = {p.q + start(p.q_at, at.batch, at.head), p.q_at.row, p.queries, p.width};
    Matrix keys = {p.k + start(p.k_at, at.batch, key_head), p.k_at.row, p.keys, p.width};
    Matrix values = {p.v + start(p.v_at, at.batch, key_head), p.v_at.row, p.keys, p.value_width};
    int end = visible(p, least(row + OWN, p.queries) - 1);

    REAL sums[ROWS][RUNS * UNIT] = {}, top[ROWS], total[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) top[i] = hidden(), total[i] = 0;
    if (KEPT && end > 0) {
        fetch<OWN, CHUNK, LEADING, THREADS>(q, queries, row, 0);
        fetch<OTHER, CHUNK, LEADING, THREADS>(k, keys, 0, 0);
        end_group();
    }
    for (int first = 0; first < end; first += OTHER) {
        REAL s[ROWS][COLS];
        if (KEPT) {
            wait_groups<0>();
            __syncthreads();
            fetch<OTHER, SLICE, SLICE_LEADING, THREADS>(v, values, first, slice);
            end_group();
            clear(s);
            add_products(s, q, k);
        } else {
            products(s, queries, keys, q, k, row, first);
            __syncthreads();
            fetch<OTHER, SLICE, SLICE_LEADING, THREADS>(v, values, first, slice);
            end_group();
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            REAL highest = hidden();
#pragma unroll
            for (int j = 0; j < COLS; ++j) {
                s[i][j] = score(p, at, row + own_row(i), first + other_row(j), s[i][j]);
                highest = largest(s[i][j], highest);
            }
            highest = largest(row_largest(highest), top[i]);
            // A row without visible keys so far has no maximum to subtract.
            REAL by = highest == hidden() ? (REAL)0 : highest;
            REAL fade = exp2_fast((top[i] - by) * (REAL)LOG2_E);
            top[i] = highest;
            total[i] *= fade;
#pragma unroll
            for (int c = 0; c < RUNS * UNIT; ++c) sums[i][c] *= fade;
#pragma unroll
            for (int j = 0; j < COLS; ++j) {
                REAL weight = exp2_fast((s[i][j] - by) * (REAL)LOG2_E);
                total[i] += weight;
                x[own_row(i) * X_LEADING + other_row(j)] = weight;
            }
        }
        wait_groups<0>();
        __syncthreads();
        if (KEPT && first + OTHER < end) {
            fetch<OTHER, CHUNK, LEADING, THREADS>(k, keys, first + OTHER, 0);
            end_group();
        }
        add_weighted(sums, x, v, SLICE_LEADING);
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        REAL all = row_sum(total[i]);
        int query = row + own_row(i);
        if (query >= p.queries) continue;
        STORAGE* to = p.to + start(p.y_at, at.batch, at.head) + query * p.y_at.row;
        store_row(to, sums[i], all == 0 ? (REAL)0 : 1 / all, slice, p.value_width);
        if (slice == 0 && threadIdx.x % 8 == 0)
            p.to_lse[statistics(p, at.batch, at.head, query)] = all == 0 ? hidden() : top[i] + log(all);
    }
}
