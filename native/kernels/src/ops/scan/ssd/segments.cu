// The work of a block: a segment of a head, some successive chunks, with the state in registers. A warp has 16 rows of
// the head.
//   STATE, WIDTH, SIZE   states of a row, rows of a head, and states of a head

// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks.
constexpr int STATE_APART = STATE + 8, WIDTH_APART = WIDTH + 8;

typedef Sums State[1][STATE / 8];

// The offset in a head's state of elements 0 and 1, or 2 and 3, of a lane's tile `n`.
__device__ __forceinline__ int state_at(int half, int n) {
    return (threadIdx.x / 32 * 16 + sum_row(0, half)) * STATE + sum_column(n);
}

__device__ __forceinline__ void load(State& state, const float* from) {
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 pair = *(const float2*)(from + state_at(half, n));
            state[0][n][2 * half] = pair.x;
            state[0][n][2 * half + 1] = pair.y;
        }
}

__device__ __forceinline__ void store(const State& state, float* to) {
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2*)(to + state_at(half, n)) = {state[0][n][2 * half], state[0][n][2 * half + 1]};
}

// Writes S of a warp's rows to shared memory for all warps, rounded to storage.
__device__ __forceinline__ void share(STORAGE* states, const State& state) {
    int row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(unsigned*)(states + (row + sum_row(0, half)) * STATE_APART + sum_column(n)) =
                pack(state[0][n][2 * half], state[0][n][2 * half + 1]);
}

// Advances S over a chunk: S decays by `total`, and each step adds its weight times the outer product of x and B; with
// GATED, x is gated by z.
template <bool GATED, class Weight>
__device__ __forceinline__ void advance(State& state, const STORAGE* x, const STORAGE* z, const STORAGE* b, float total,
                                        Weight weight) {
    int own = threadIdx.x / 32 * 16;
    float factor = exp2_fast(total);
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) state[0][n][e] *= factor;
    // x is stored step by step; transposed tiles are rows by steps.
    unsigned x_at = right_at<WIDTH_APART>(x + own), z_at = right_at<WIDTH_APART>(z + own);
    unsigned b_at = turned_at<STATE_APART>(b);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        Left left[1][1], gate;
        load_turned_tiles(left[0][0], x_at + 2 * k * WIDTH_APART);
        if (GATED) load_turned_tiles(gate, z_at + 2 * k * WIDTH_APART);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int step = k + 8 * half + sum_column(0);
            float low = weight(step), high = weight(step + 1);
#pragma unroll
            for (int row = 2 * half; row < 2 * half + 2; row++) {
                float by_low = low, by_high = high;
                if (GATED) {
                    float z_low, z_high;
                    widen((const STORAGE*)&gate[row], z_low, z_high);
                    by_low *= silu(z_low), by_high *= silu(z_high);
                }
                left[0][0][row] = weighted(left[0][0][row], by_low, by_high);
            }
        }
        add_weighted<STATE, 16, STATE_APART>(state, left, b_at + 2 * k * STATE_APART);
    }
}
