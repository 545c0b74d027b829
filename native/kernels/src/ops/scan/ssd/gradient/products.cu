// The products of gradient.cu, and sums of their results.

// Sums over the lanes of a row, or of a column, of a tile.
__device__ __forceinline__ float row_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float column_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 4);
    v += __shfl_xor_sync(~0u, v, 8);
    return v + __shfl_xor_sync(~0u, v, 16);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

// Writes a sum for each of a warp's 16 steps, over the lanes of its row.
__device__ __forceinline__ void write_rows(float* to, int row, const float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = row_sum(sums[half]);
        if (threadIdx.x % 4 == 0) to[row + sum_row(0, half)] = sum;
    }
}

// dy silu(z), rounded to storage as a factor of products.
__device__ __forceinline__ void gate(STORAGE* gated, const Stage& stage) {
#pragma unroll
    for (int pair = threadIdx.x; pair < CHUNK * WIDTH / 2; pair += THREADS) {
        int at = pair / (WIDTH / 2) * WIDTH_APART + pair % (WIDTH / 2) * 2;
        float low, high;
        widen(stage.z + at, low, high);
        *(unsigned*)(gated + at) = weighted(*(const unsigned*)(stage.dy + at), silu(low), silu(high));
    }
}

// Dot products of a warp's steps of `of` with its columns, steps of `with`; zeros where all of these are later.
template <int INNER, int APART>
__device__ __forceinline__ void scores(Scores& to, const STORAGE* of, const STORAGE* with, const Work& at) {
    clear(to);
    if (at.column * SCORES >= at.row + 16) return;
    add_products<SCORES, INNER, APART>(to, left_at<APART>(of + at.row * APART),
                                       right_at<APART>(with + at.column * SCORES * APART));
}

// Sums of a tile's row: over the columns before the lane's own pair, and over all columns.
struct Before {
    float pair, total;

    __device__ __forceinline__ Before(float sum) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            float other = __shfl_up_sync(~0u, sum, distance);
            if (lane % 4 >= distance) sum += other;
        }
        pair = __shfl_up_sync(~0u, sum, 1);
        if (lane % 4 == 0) pair = 0;
        total = __shfl_sync(~0u, sum, lane | 3);
    }
};

// Sums of `both`, the contributions from steps of a warp's columns to steps of its rows: over each row, and for each
// column t over all pairs j < t <= i among these columns j and rows i.
__device__ __forceinline__ void count(Parts& parts, const Scores& both, const Work& at) {
    float rows[2] = {};
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++) {
        int t = at.column * SCORES + sum_column(n);
        float crossing[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = at.row + sum_row(0, half);
            float low = both[0][n][2 * half];
            Before before(low + both[0][n][2 * half + 1]);
            float sum = rows[half] + before.pair;
            if (i >= t) crossing[0] += sum;
            if (i >= t + 1) crossing[1] += sum + low;
            rows[half] += before.total;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float sum = column_sum(crossing[e]);
            if (threadIdx.x % 32 < 4) parts.within[at.row / 16][t + e] = sum;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (threadIdx.x % 4 == 0) parts.rows[at.column][at.row + sum_row(0, half)] = rows[half];
}

// From C_i . B_j and dy_i . x_j: writes the weights of dy in dx to shared memory, adds Q_ij, the weights of B and C in
// dC and dB, to `sum`, and replaces dy_i . x_j by (C_i . B_j) Q_ij, the contribution from step j to step i.
__device__ __forceinline__ void weigh(Scores& sum, STORAGE* weights, const Stage& stage, const Work& at,
                                      const Scores& cb, Scores& dyx) {
    int first = at.column * SCORES;
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; half++) decay[half] = stage.decay[at.row + sum_row(0, half)];
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++) {
        float weight[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = at.row + sum_row(0, e / 2), j = first + sum_column(n) + e % 2;
            float power = exp2_fast(decay[e / 2] - stage.decay[j]);
            weight[e] = j <= i ? cb[0][n][e] * power : 0.0f;
            float other = j <= i ? dyx[0][n][e] * power * stage.delta[j] : 0.0f;
            sum[0][n][e] += other;
            dyx[0][n][e] = cb[0][n][e] * other;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            STORAGE* to = weights + (at.row + sum_row(0, half)) * WIDTH_APART + first + sum_column(n);
            *(unsigned*)to = pack(weight[2 * half], weight[2 * half + 1]);
        }
    }
}

// Products of a warp's steps, rows `of` of B or C, with the states of each row of the head, times a factor for each
// step. Adds to `sums` their dot products with the rows `with` of dy or x.
__device__ __forceinline__ void read_state(Rows& to, float (&sums)[2], const STORAGE* of, const STORAGE* states,
                                           const STORAGE* with, const float (&factor)[2], const Work& at) {
    clear(to);
    add_products<OWN_WIDTH, STATE, STATE_APART>(to, left_at<STATE_APART>(of + at.row * STATE_APART),
                                                right_at<STATE_APART>(states + at.column * OWN_WIDTH * STATE_APART));
#pragma unroll
    for (int n = 0; n < OWN_WIDTH / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float low, high;
            widen(with + (at.row + sum_row(0, half)) * WIDTH_APART + at.column * OWN_WIDTH + sum_column(n), low, high);
            to[0][n][2 * half] *= factor[half];
            to[0][n][2 * half + 1] *= factor[half];
            sums[half] = fmaf(to[0][n][2 * half], low, fmaf(to[0][n][2 * half + 1], high, sums[half]));
        }
}

// Adds the products of a warp's steps, rows `of` of x or dy times a factor each, with the states.
__device__ __forceinline__ void add_states(Others& to, const STORAGE* of, const STORAGE* states,
                                           const float (&factor)[2], const Work& at) {
    unsigned from = left_at<WIDTH_APART>(of + at.row * WIDTH_APART);
    Left rows[1][WIDTH / 16];
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        load_tiles(rows[0][k], from + 2 * 16 * k);
#pragma unroll
        for (int e = 0; e < 4; e++) rows[0][k][e] = weighted(rows[0][k][e], factor[e % 2], factor[e % 2]);
    }
    add_weighted<OWN_STATES, WIDTH, STATE_APART>(to, rows, turned_at<STATE_APART>(states + at.column * OWN_STATES));
}

// A warp's partial sum of S . G of the head.
__device__ __forceinline__ float through(const Stage& stage) {
    float sum = 0;
#pragma unroll
    for (int pair = threadIdx.x; pair < WIDTH * STATE / 2; pair += THREADS) {
        int at = pair / (STATE / 2) * STATE_APART + pair % (STATE / 2) * 2;
        float before[2], after[2];
        widen(stage.before + at, before[0], before[1]);
        widen(stage.after + at, after[0], after[1]);
        sum = fmaf(before[0], after[0], fmaf(before[1], after[1], sum));
    }
    return warp_sum(sum);
}

// Adds the terms within the chunk to a warp's steps: the weights of each step and later ones times their rows of `of`,
// which is dy or C.
template <int COLUMNS, int APART>
__device__ __forceinline__ void add_later(Sums (&to)[1][COLUMNS / 8], const STORAGE* weights, const STORAGE* of,
                                          const Work& at) {
    unsigned from = right_at<WIDTH_APART>(weights + at.row), right = turned_at<APART>(of + at.column * COLUMNS);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (k < at.row) continue;
        Left left[1][1];
        load_turned_tiles(left[0][0], from + 2 * k * WIDTH_APART);
        add_weighted<COLUMNS, 16, APART>(to, left, right + 2 * k * APART);
    }
}

// Likewise for each step and earlier ones, with rows of x or B, and times their delta where it is given.
template <int COLUMNS, int APART>
__device__ __forceinline__ void add_earlier(Sums (&to)[1][COLUMNS / 8], const STORAGE* weights, const STORAGE* of,
                                            const float* delta, const Work& at) {
    unsigned from = left_at<WIDTH_APART>(weights + at.row * WIDTH_APART);
    unsigned right = turned_at<APART>(of + at.column * COLUMNS);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (k > at.row) continue;
        Left left[1][1];
        load_tiles(left[0][0], from + 2 * k);
        if (delta) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float* by = delta + k + e / 2 * 8 + sum_column(0);
                left[0][0][e] = weighted(left[0][0][e], by[0], by[1]);
            }
        }
        add_weighted<COLUMNS, 16, APART>(to, left, right + 2 * k * APART);
    }
}

// Writes the weights, summed over heads, to shared memory.
__device__ __forceinline__ void share(STORAGE* weights, const Scores& sum, const Work& at) {
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(unsigned*)(weights + (at.row + sum_row(0, half)) * WIDTH_APART + at.column * SCORES + sum_column(n)) =
                pack(sum[0][n][2 * half], sum[0][n][2 * half + 1]);
}
