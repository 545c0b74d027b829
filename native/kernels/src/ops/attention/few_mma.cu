// Few queries over many keys on tensor cores, after common.cu, mma.cu, softmax.cu, cluster.cu and parts.cu: 16-bit storage
// without mask and bias. As in few.cu, a block processes a part of a head's keys. The 16 rows of a tile are queries of all
// heads that read that key head, with equal visible keys. Each warp has keys of its own, OTHER at a time, and copies them
// itself STAGES - 1 stages ahead, so that warps do not wait for each other.
//
// Memory is the limit: 16 keys of width 128 are 8 KiB, which take a quarter of a multiprocessor 1 us; their
// instructions take a third of that.

constexpr int ROWS = 16, STAGE = OTHER * (LEADING + VALUE_LEADING), STEP = WARPS * OTHER;

// The results of a warp's keys for each row: the weighted sums, the maximum and the sum of weights.
typedef float Found[ROWS][VALUE_WIDTH + 2];

__device__ __forceinline__ void tell(const Params& p, Found& to, const Sums (&sums)[TILES][VALUE_WIDTH / 8], const Softmax& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = whole_total(state, 0, half);
        float* row = to[sum_row(0, half)];
#pragma unroll
        for (int n = 0; n < VALUE_WIDTH / 8; ++n)
            row[sum_column(n)] = sums[0][n][2 * half], row[sum_column(n) + 1] = sums[0][n][2 * half + 1];
        // p.scale includes log2(e), which is divided out: the join expects maxima in natural units.
        if (threadIdx.x % 4 == 0)
            row[VALUE_WIDTH] = state.top[0][half] * p.scale * (float)(1 / LOG2_E), row[VALUE_WIDTH + 1] = total;
    }
}

// One warp joins the results of all warps for a row.
__device__ __forceinline__ void join(const Params& p, const Found* all, int row, float* to) {
    float top = hidden(), total = 0, weights[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) top = largest(all[warp][row][VALUE_WIDTH], top);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        // A row without visible keys has no maximum to subtract.
        weights[warp] = top == hidden() ? 0.0f : exp2_fast((all[warp][row][VALUE_WIDTH] - top) * (float)LOG2_E);
        total = fmaf(weights[warp], all[warp][row][VALUE_WIDTH + 1], total);
    }
    int lane = threadIdx.x % 32;
    if (lane == 0) to[0] = top, to[1] = total;
    for (int c = lane; c < p.value_width; c += 32) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum = fmaf(weights[warp], all[warp][row][c], sum);
        to[2 + c] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_few_mma(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    int part = blockIdx.x % p.parts, rest = blockIdx.x / p.parts, warp = threadIdx.x / 32;
    int row = rest % p.tiles * ROWS, key_head = rest / p.tiles % p.key_heads, batch = rest / p.tiles / p.key_heads;
    int sharing = p.heads / p.key_heads, rows = sharing * p.queries, end = visible(p, 0);
    int first = (i64)part * p.keys / p.parts, last = least((i64)(part + 1) * p.keys / p.parts, end);
    // Keys outside of this part are masked.
    Matrix keys = {p.k + start(p.k_at, batch, key_head), p.k_at.row, last, p.width};
    Matrix values = {p.v + start(p.v_at, batch, key_head), p.v_at.row, last, p.value_width};
    STORAGE* q = (STORAGE*)memory;
    STORAGE* own = q + ROWS * LEADING + warp * STAGES * STAGE;

    auto queue = [&](int stage, int key) {
        fetch<OTHER, WIDTH, LEADING, 32>(own + stage * STAGE, keys, key, 0);
        fetch<OTHER, VALUE_WIDTH, VALUE_LEADING, 32>(own + stage * STAGE + OTHER * LEADING, values, key, 0);
        end_group();
    };
    for (int r = warp; r < ROWS; r += WARPS) {
        int at = least(row + r, rows - 1), head = key_head * sharing + at / p.queries;
        Matrix query = {p.q + start(p.q_at, batch, head) + at % p.queries * p.q_at.row, 0, row + r < rows, p.width};
        fetch<1, WIDTH, LEADING, 32>(q + r * LEADING, query, 0, 0);
    }
    end_group();
    int key = first + warp * OTHER, stage = 0;
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) queue(ahead, key + ahead * STEP);
    wait_groups<STAGES - 1>();
    __syncthreads();

    Sums sums[TILES][VALUE_WIDTH / 8];
    Softmax state;
    clear(sums);
    begin(state);
    unsigned queries = left_at<LEADING>(q);
#pragma unroll 1
    for (; key < last; key += STEP) {
        queue(stage ? stage - 1 : STAGES - 1, key + (STAGES - 1) * STEP);
        wait_groups<STAGES - 1>();
        __syncwarp();
        const STORAGE* here = own + stage * STAGE;
        Sums s[TILES][OTHER / 8];
        Left weights[TILES][OTHER / 16];
        clear(s);
        add_products<OTHER, WIDTH, LEADING>(s, queries, right_at<LEADING>(here));
        if (key + OTHER <= last) weigh<false>(s, state, p, 0, key);
        else weigh<true>(s, state, p, [&](int, int) { return last - key; });
        fade(sums, state);
        round<OTHER>(weights, s);
        add_weighted<VALUE_WIDTH, OTHER, VALUE_LEADING>(sums, weights, turned_at<VALUE_LEADING>(here + OTHER * LEADING));
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        // All lanes must have read the stage that is overwritten next.
        __syncwarp();
    }

    wait_groups<0>();
    __syncthreads();
    Found* all = (Found*)memory;
    tell(p, all[warp], sums, state);
    __syncthreads();
    REAL* kept = (REAL*)(memory + KEPT);
    int count = least(ROWS, rows - row);
    auto head = [&](int r) { return key_head * sharing + (row + r) / p.queries; };
    auto query = [&](int r) { return (row + r) % p.queries; };
    for (int r = warp; r < count; r += WARPS)
        join(p, all, r, result(p, kept, r, ((i64)batch * p.heads + head(r)) * p.queries + query(r), part));
#if JOINED
    join_rows(count, part, p.parts, [&](int r) { join_row(p, kept + r * apart(p), batch, head(r), query(r)); });
#endif
}
