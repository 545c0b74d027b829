// The scan in chunks of CHUNK steps on tensor cores, for 16-bit storage; the formulas are in cuda/chunks/forward.rs.
//   STATE, WIDTH     states of a row and rows of a head
//   HAS_BIAS, SOFTPLUS, CLAMP   as in step_size.cu
//   SKIP, GATE       whether D and z are given
// A warp has 16 steps of a chunk where it computes y, and 16 rows of the head where it advances the state.

// Rows of C are reused for y.
constexpr int C_APART = STATE > WIDTH ? STATE_APART : WIDTH_APART;

struct Stage {
    STORAGE c[CHUNK * C_APART], b[CHUNK * STATE_APART], x[CHUNK * WIDTH_APART];
    float delta[CHUNK], decay[CHUNK];
};

// Queues copies of a chunk as one group.
__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Part& at, int chunk) {
    i64 first = at.step(chunk);
    int left = at.left(chunk), group = at.head / (p.heads / p.groups);
    i64 states = (first * p.groups + group) * STATE;
    copy_rows<STATE / 8, C_APART>(stage.c, p.c + states, (i64)p.groups * STATE, left);
    copy_rows<STATE / 8, STATE_APART>(stage.b, p.b + states, (i64)p.groups * STATE, left);
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.x, p.x + (first * p.heads + at.head) * WIDTH, (i64)p.heads * WIDTH, left);
    copy_steps(stage.delta, stage.decay, p, at.chunk(p, chunk));
    commit();
}

typedef Sums Rows[1][WIDTH / 8];

// y of a warp's steps before skip and gate: from the state before the chunk, and from the chunk's own inputs.
__device__ __forceinline__ void read_out(Rows& y, const Stage& stage, const STORAGE* states) {
    int own = threadIdx.x / 32 * 16;
    Left c[STATE / 16];
    unsigned c_at = left_at<C_APART>(stage.c + own * C_APART), states_at = right_at<STATE_APART>(states);
    clear(y);
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        load_tiles(c[k], c_at + 2 * 16 * k);
#pragma unroll
        for (int n = 0; n < WIDTH; n += 16) {
            unsigned right[4];
            load_tiles(right, states_at + 2 * (n * STATE_APART + 16 * k));
            multiply_add(y[0][n / 8], c[k], right[0], right[1]);
            multiply_add(y[0][n / 8 + 1], c[k], right[2], right[3]);
        }
    }
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        decay[half] = stage.decay[own + sum_row(0, half)];
        float factor = exp2_fast(decay[half]);
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) y[0][n][2 * half] *= factor, y[0][n][2 * half + 1] *= factor;
    }
    unsigned b_at = right_at<STATE_APART>(stage.b), x_at = turned_at<WIDTH_APART>(stage.x);
#pragma unroll 1
    for (int j = 0; j <= own; j += 16) {
        Sums scores[1][2];
        clear(scores);
#pragma unroll
        for (int k = 0; k < STATE / 16; k++) {
            unsigned right[4];
            load_tiles(right, b_at + 2 * (j * STATE_APART + 16 * k));
            multiply_add(scores[0][0], c[k], right[0], right[1]);
            multiply_add(scores[0][1], c[k], right[2], right[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int step = own + sum_row(0, e / 2), of = j + sum_column(n) + e % 2;
                float weight = exp2_fast(decay[e / 2] - stage.decay[of]) * stage.delta[of];
                scores[0][n][e] = of <= step ? scores[0][n][e] * weight : 0.0f;
            }
        Left weights[1][1];
        round<16>(weights, scores);
        add_weighted<WIDTH, 16, WIDTH_APART>(y, weights, x_at + 2 * j * WIDTH_APART);
    }
}

// Adds the skip, gates, and writes y of a warp's steps. Its rows of C are no longer needed: y is staged there, so that
// stores are coalesced.
__device__ __forceinline__ void write(const Params& p, const Part& at, int chunk, Stage& stage, const Rows& y) {
    int own = threadIdx.x / 32 * 16, left = at.left(chunk) - own;
    i64 first = at.step(chunk) * p.heads + at.head;
    STORAGE* line = stage.c + own * C_APART;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = sum_row(0, half), column = sum_column(n);
            float low = y[0][n][2 * half], high = y[0][n][2 * half + 1];
            if (SKIP) {
                float x_low, x_high;
                widen(stage.x + (own + row) * WIDTH_APART + column, x_low, x_high);
                const float* d = p.d + (p.wide_skip ? at.head * WIDTH + column : at.head);
                low = fmaf(d[0], x_low, low);
                high = fmaf(d[p.wide_skip ? 1 : 0], x_high, high);
            }
            if (GATE && row < left) {
                float z_low, z_high;
                widen(p.z + (first + (i64)(own + row) * p.heads) * WIDTH + column, z_low, z_high);
                low *= silu(z_low);
                high *= silu(z_high);
            }
            *(unsigned*)(line + row * C_APART + column) = pack(low, high);
        }
    __syncwarp();
#pragma unroll
    for (int unit = threadIdx.x % 32; unit < 16 * WIDTH / 8; unit += 32) {
        int row = unit / (WIDTH / 8), column = unit % (WIDTH / 8) * 8;
        if (row < left)
            *(int4*)(p.y + (first + (i64)(own + row) * p.heads) * WIDTH + column) =
                *(const int4*)(line + row * C_APART + column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ssd_chunks(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Stage* stages = (Stage*)memory;
    STORAGE* states = (STORAGE*)(stages + 2);
    Part at(p, blockIdx.x);
    if (at.first < at.last) fetch(stages[0], p, at, at.first);
    State state;
    clear(state);
    if (at.segments > 1) load(state, p.starts + at.id * SIZE);
    else if (p.initial) load(state, p.initial + at.state(p));
#pragma unroll 1
    for (int chunk = at.first; chunk < at.last; chunk++) {
        int turn = (chunk - at.first) % 2;
        Stage& stage = stages[turn];
        share(states, state);
        if (chunk + 1 < at.last) fetch(stages[1 - turn], p, at, chunk + 1);
        else commit();
        copied<1>();
        __syncthreads();
        Rows y;
        read_out(y, stage, states);
        write(p, at, chunk, stage, y);
        float total = stage.decay[CHUNK - 1];
        auto weight = [&](int step) { return stage.delta[step] * exp2_fast(total - stage.decay[step]); };
        advance<false>(state, stage.x, stage.x, stage.b, total, weight);
        __syncthreads();
    }
    if (p.last && at.segment == at.segments - 1) store(state, p.last + at.state(p));
}
