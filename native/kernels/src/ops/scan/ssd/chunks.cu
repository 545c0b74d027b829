// The scan in chunks of CHUNK steps on tensor cores, for 16-bit storage; the formulas are in cuda/chunks.rs.
//   STATE, WIDTH     states of a row and rows of a head
//   HAS_BIAS, SOFTPLUS, CLAMP   as in step_size.cu
//   OUTPUT           whether y is wanted, else the states at the ends of segments alone
//   SKIP, GATE       whether D and z are there
// A block has a segment of a head: some chunks in a row, whose state stays in its registers. A warp has 16 steps of a
// chunk where it computes y, and 16 rows of the head where it advances the state.

constexpr int THREADS = 2 * WIDTH;
// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks.
constexpr int STATE_APART = STATE + 8, WIDTH_APART = WIDTH + 8;
// Rows of C take y in the end.
constexpr int C_APART = STATE > WIDTH ? STATE_APART : WIDTH_APART;

struct Stage {
    STORAGE c[CHUNK * C_APART], b[CHUNK * STATE_APART], x[CHUNK * WIDTH_APART];
    float delta[CHUNK], decay[CHUNK];
};

// The head of a block, and its chunks.
struct Part {
    int batch, head, segment, first, last;
};

__device__ __forceinline__ Part part(const Params& p) {
    int head = blockIdx.x % p.heads, rest = blockIdx.x / p.heads;
    int segment = rest % p.segments, first = segment * p.each;
    return {rest / p.segments, head, segment, first, first + p.each < p.chunks ? first + p.each : p.chunks};
}

__device__ __forceinline__ i64 of_head(const Params& p, const Part& at) { return (i64)at.batch * p.heads + at.head; }

// Queues a copy of 16 bytes, or of zeros.
__device__ __forceinline__ void copy(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

// Queues copies of the chunk's rows of 8 UNITS numbers; those past the end become zeros.
template <int UNITS, int APART>
__device__ __forceinline__ void copy_rows(STORAGE* to, const STORAGE* from, i64 stride, int left) {
#pragma unroll
    for (int unit = threadIdx.x; unit < CHUNK * UNITS; unit += THREADS) {
        int row = unit / UNITS, column = unit % UNITS * 8;
        bool there = row < left;
        copy(to + row * APART + column, from + (there ? row * stride + column : 0), there);
    }
}

// Queues copies of a chunk as one group.
__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Part& at, int chunk) {
    i64 first = (i64)at.batch * p.length + chunk * CHUNK;
    int left = p.length - chunk * CHUNK, group = at.head / (p.heads / p.groups);
    i64 states = (first * p.groups + group) * STATE;
    if (OUTPUT) copy_rows<STATE / 8, C_APART>(stage.c, p.c + states, (i64)p.groups * STATE, left);
    copy_rows<STATE / 8, STATE_APART>(stage.b, p.b + states, (i64)p.groups * STATE, left);
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.x, p.x + (first * p.heads + at.head) * WIDTH, (i64)p.heads * WIDTH, left);
    i64 steps = (of_head(p, at) * p.chunks + chunk) * CHUNK;
    if (threadIdx.x < CHUNK / 4) {
        copy(stage.delta + 4 * threadIdx.x, p.delta + steps + 4 * threadIdx.x, true);
        copy(stage.decay + 4 * threadIdx.x, p.decay + steps + 4 * threadIdx.x, true);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

typedef Sums State[1][STATE / 8];
typedef Sums Rows[1][WIDTH / 8];

// Where a lane's states of elements 0 and 1, or 2 and 3, lie among those of a head.
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

// S of a warp's rows, rounded to factors for all warps.
__device__ __forceinline__ void share(STORAGE* states, const State& state) {
    int row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(unsigned*)(states + (row + sum_row(0, half)) * STATE_APART + sum_column(n)) =
                pack(state[0][n][2 * half], state[0][n][2 * half + 1]);
}

// y of a warp's steps before skip and gate: C S of the state before the chunk, and the chunk's own inputs.
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

// Adds the skip, gates, and writes y of a warp's steps. Its rows of C are no longer needed, and gather whole lines.
__device__ __forceinline__ void write(const Params& p, const Part& at, int chunk, Stage& stage, const Rows& y) {
    int own = threadIdx.x / 32 * 16;
    i64 first = ((i64)at.batch * p.length + chunk * CHUNK) * p.heads + at.head;
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
            if (GATE && chunk * CHUNK + own + row < p.length) {
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
        if (chunk * CHUNK + own + row < p.length)
            *(int4*)(p.y + (first + (i64)(own + row) * p.heads) * WIDTH + column) =
                *(const int4*)(line + row * C_APART + column);
    }
}

// A pair of factors by their weights.
__device__ __forceinline__ unsigned weighted(unsigned pair, float low, float high) {
    float a, b;
    widen((const STORAGE*)&pair, a, b);
    return pack(a * low, b * high);
}

// S after the chunk of a warp's rows: S decays, and each step adds x B, decayed from there to the end.
__device__ __forceinline__ void advance(State& state, const Stage& stage) {
    int own = threadIdx.x / 32 * 16;
    float total = stage.decay[CHUNK - 1], factor = exp2_fast(total);
#pragma unroll
    for (int n = 0; n < STATE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) state[0][n][e] *= factor;
    // x lies step by step: turned tiles are rows by steps.
    unsigned x_at = right_at<WIDTH_APART>(stage.x + own), b_at = turned_at<STATE_APART>(stage.b);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        Left x[1][1];
        load_turned_tiles(x[0][0], x_at + 2 * k * WIDTH_APART);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int step = k + 8 * half + sum_column(0);
            float low = stage.delta[step] * exp2_fast(total - stage.decay[step]);
            float high = stage.delta[step + 1] * exp2_fast(total - stage.decay[step + 1]);
            x[0][0][2 * half] = weighted(x[0][0][2 * half], low, high);
            x[0][0][2 * half + 1] = weighted(x[0][0][2 * half + 1], low, high);
        }
        add_weighted<STATE, 16, STATE_APART>(state, x, b_at + 2 * k * STATE_APART);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ssd_chunks(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Stage* stages = (Stage*)memory;
    STORAGE* states = (STORAGE*)(stages + 2);
    Part at = part(p);
    i64 head = of_head(p, at) * SIZE, segment = of_head(p, at) * p.segments + at.segment;
    fetch(stages[0], p, at, at.first);
    State state;
    clear(state);
    if (OUTPUT && p.segments > 1) load(state, p.starts + segment * SIZE);
    else if (at.segment == 0 && p.initial) load(state, p.initial + head);
    float total = 0;
#pragma unroll 1
    for (int chunk = at.first; chunk < at.last; chunk++) {
        int turn = (chunk - at.first) % 2;
        Stage& stage = stages[turn];
        if (OUTPUT) share(states, state);
        if (chunk + 1 < at.last) fetch(stages[1 - turn], p, at, chunk + 1);
        else asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        if (OUTPUT) {
            Rows y;
            read_out(y, stage, states);
            write(p, at, chunk, stage, y);
        }
        advance(state, stage);
        total += stage.decay[CHUNK - 1];
        __syncthreads();
    }
    if (!OUTPUT) {
        store(state, p.starts + segment * SIZE);
        if (threadIdx.x == 0) p.totals[segment] = total;
    } else if (p.last && at.segment == p.segments - 1) {
        store(state, p.last + head);
    }
}
