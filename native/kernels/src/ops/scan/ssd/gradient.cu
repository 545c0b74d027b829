// The gradient of the scan in chunks of CHUNK steps on tensor cores, for 16-bit storage, once the states before the
// chunks and the cotangents of the states after them are known; the formulas are in cuda/chunks/gradient.rs.
//   STATE, WIDTH     states of a row and rows of a head
//   HAS_BIAS, SOFTPLUS, CLAMP, MASK   as in step_size.cu
//   SKIP, GATE       whether D and z are there
//   SPLIT            warps that share 16 steps of a chunk, each with a part of the columns
//   STAGES           heads in shared memory: the one at work, and in 2 the next one
// A block has a chunk and some heads of a group, which it takes one after the other: dB, dC and the weights of B and C
// in them are summed in registers.

// Each warp has whole tiles of columns, the last of which may be past the states.
constexpr int STATES = (STATE + 16 * SPLIT - 1) / (16 * SPLIT) * (16 * SPLIT);
// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks.
constexpr int STATE_APART = (STATES > WIDTH ? STATES : WIDTH) + 8, WIDTH_APART = WIDTH + 8;
constexpr int WARPS = THREADS / 32, GROUPS = CHUNK / 16;
// Columns of a warp.
constexpr int SCORES = CHUNK / SPLIT, OWN_WIDTH = WIDTH / SPLIT, OWN_STATES = STATES / SPLIT;

typedef Sums Scores[1][SCORES / 8];
typedef Sums Rows[1][OWN_WIDTH / 8];
typedef Sums Others[1][OWN_STATES / 8];

// What differs from head to head. In the end `before` and `after` take dx and dz.
struct Stage {
    STORAGE x[CHUNK * WIDTH_APART], dy[CHUNK * WIDTH_APART], z[GATE ? CHUNK * WIDTH_APART : 8];
    STORAGE before[WIDTH * STATE_APART], after[WIDTH * STATE_APART];
    float delta[CHUNK], decay[CHUNK];
};

// Sums over a warp's columns, or over its steps.
struct Parts {
    float later[SPLIT][CHUNK], earlier[GROUPS][CHUNK], from_state[SPLIT][CHUNK], to_state[SPLIT][CHUNK];
    float input[SPLIT][CHUNK], skip[GROUPS][WIDTH], through[WARPS];
};

struct Shared {
    Stage stages[STAGES];
    STORAGE b[CHUNK * STATE_APART], c[CHUNK * STATE_APART], weights[CHUNK * WIDTH_APART];
    STORAGE gated[GATE ? CHUNK * WIDTH_APART : 8];
    Parts parts;
};

// The work of a block, and the rows and columns of a warp.
struct Work {
    int batch, chunk, group, part, first, last, left, row, column;

    __device__ __forceinline__ Work(const Params& p) {
        int heads = p.heads / p.groups, id = blockIdx.x;
        part = id % p.parts, id /= p.parts;
        group = id % p.groups, id /= p.groups;
        chunk = id % p.chunks, batch = id / p.chunks;
        first = group * heads + part * p.some_heads;
        last = least(first + p.some_heads, (group + 1) * heads);
        left = least(p.length - (i64)chunk * CHUNK, CHUNK);
        row = threadIdx.x / 32 / SPLIT * 16, column = threadIdx.x / 32 % SPLIT;
    }

    __device__ __forceinline__ static i64 least(i64 a, i64 b) { return a < b ? a : b; }

    // A step of the chunk, of a head in it, and the chunk of a head.
    __device__ __forceinline__ i64 step(const Params& p, int i) const { return (i64)batch * p.length + chunk * CHUNK + i; }
    __device__ __forceinline__ i64 step(const Params& p, int i, int head) const { return step(p, i) * p.heads + head; }
    __device__ __forceinline__ i64 of_head(const Params& p, int head) const {
        return ((i64)batch * p.heads + head) * p.chunks + chunk;
    }
};

__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Work& at, int head) {
    i64 first = at.step(p, 0, head) * WIDTH, stride = (i64)p.heads * WIDTH, states = at.of_head(p, head) * SIZE;
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.x, p.x + first, stride, at.left);
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.dy, p.dy + first, stride, at.left);
    if (GATE) copy_rows<WIDTH / 8, WIDTH_APART>(stage.z, p.z + first, stride, at.left);
    copy_rows<STATE / 8, STATE_APART>(stage.before, p.before + states, STATE, WIDTH);
    copy_rows<STATE / 8, STATE_APART>(stage.after, p.after + states, STATE, WIDTH);
    copy_steps(stage.delta, stage.decay, p, at.of_head(p, head));
    commit();
}

__device__ __forceinline__ void fetch_group(Shared& shared, const Params& p, const Work& at) {
    i64 states = (at.step(p, 0) * p.groups + at.group) * STATE, stride = (i64)p.groups * STATE;
    copy_rows<STATE / 8, STATE_APART>(shared.b, p.b + states, stride, at.left);
    copy_rows<STATE / 8, STATE_APART>(shared.c, p.c + states, stride, at.left);
}

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

// Writes sums of a warp's 16 steps.
__device__ __forceinline__ void write_rows(float* to, int row, const float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = row_sum(sums[half]);
        if (threadIdx.x % 4 == 0) to[row + sum_row(0, half)] = sum;
    }
}

// dy silu(z), rounded to factors.
__device__ __forceinline__ void gate(STORAGE* gated, const Stage& stage) {
#pragma unroll
    for (int pair = threadIdx.x; pair < CHUNK * WIDTH / 2; pair += THREADS) {
        int at = pair / (WIDTH / 2) * WIDTH_APART + pair % (WIDTH / 2) * 2;
        float low, high;
        widen(stage.z + at, low, high);
        *(unsigned*)(gated + at) = weighted(*(const unsigned*)(stage.dy + at), silu(low), silu(high));
    }
}

// From C B and dy x of a tile: the weights of dy in dx go to shared memory, those of B and C in dC and dB are summed in
// `sum`, and what goes through the decays between two steps counts at both.
__device__ __forceinline__ void weigh(Scores& sum, STORAGE* weights, Parts& parts, const Stage& stage, const Work& at,
                                      const Scores& cb, const Scores& dyx) {
    int first = at.column * SCORES;
    float rows[2] = {}, decay[2];
#pragma unroll
    for (int half = 0; half < 2; half++) decay[half] = stage.decay[at.row + sum_row(0, half)];
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++) {
        float columns[2] = {}, weight[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = at.row + sum_row(0, e / 2), j = first + sum_column(n) + e % 2;
            float power = exp2_fast(decay[e / 2] - stage.decay[j]);
            weight[e] = j <= i ? cb[0][n][e] * power : 0.0f;
            float other = j <= i ? dyx[0][n][e] * power * stage.delta[j] : 0.0f;
            float both = j < i ? cb[0][n][e] * other : 0.0f;
            sum[0][n][e] += other;
            rows[e / 2] += both;
            columns[e % 2] += both;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            STORAGE* to = weights + (at.row + sum_row(0, half)) * WIDTH_APART + first + sum_column(n);
            *(unsigned*)to = pack(weight[2 * half], weight[2 * half + 1]);
            float of_column = column_sum(columns[half]);
            if (threadIdx.x % 32 < 4) parts.earlier[at.row / 16][first + sum_column(n) + half] = of_column;
        }
    }
    write_rows(parts.later[at.column], at.row, rows);
}

// Products of a warp's steps, rows of B or C, with the states' rows of a head: row for row of the head, by a factor for
// each step. Gives the sums of these times `with`.
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

// Adds a warp's steps, rows of x or dy by a factor each, times the states.
__device__ __forceinline__ void add_states(Others& to, const STORAGE* of, const STORAGE* states, const float (&factor)[2],
                                           const Work& at) {
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

// A thread's part of the sum of S G of the head.
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
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// Adds the chunk's own: to a warp's steps, weights of later steps times their rows of dy, or of columns of states.
template <int COLUMNS, int APART>
__device__ __forceinline__ void add_later(Sums (&to)[1][COLUMNS / 8], const STORAGE* weights, const STORAGE* of, const Work& at) {
    unsigned from = right_at<WIDTH_APART>(weights + at.row), right = turned_at<APART>(of + at.column * COLUMNS);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (k < at.row) continue;
        Left left[1][1];
        load_turned_tiles(left[0][0], from + 2 * k * WIDTH_APART);
        add_weighted<COLUMNS, 16, APART>(to, left, right + 2 * k * APART);
    }
}

// Likewise of earlier steps, by delta of these where it is given.
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

// dx and dz of a warp's steps from u = dx / delta before the skip, and from y before skip and gate. They take the place
// of the states in shared memory. Sums x u of each step, and dy x of each row of the head.
__device__ __forceinline__ void finish(Stage& stage, Parts& parts, const Params& p, const Work& at, int head, const Rows& u,
                                       const Rows& y) {
    float input[2] = {};
#pragma unroll
    for (int n = 0; n < OWN_WIDTH / 8; n++) {
        int column = at.column * OWN_WIDTH + sum_column(n);
        float d[2] = {}, skip[2] = {};
        if (SKIP) {
            const float* from = p.d + (p.wide_skip ? (i64)head * WIDTH + column : head);
            d[0] = from[0], d[1] = from[p.wide_skip];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = at.row + sum_row(0, half), to = i * WIDTH_APART + column;
            float x[2], dy[2], z[2], dx[2], dz[2], delta = stage.delta[i];
            widen(stage.x + to, x[0], x[1]);
            widen(stage.dy + to, dy[0], dy[1]);
            if (GATE) widen(stage.z + to, z[0], z[1]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float of_u = u[0][n][2 * half + e], before_gate = dy[e];
                if (GATE) {
                    dz[e] = dy[e] * fmaf(d[e], x[e], y[0][n][2 * half + e]) * silu_slope(z[e]);
                    before_gate *= silu(z[e]);
                }
                dx[e] = fmaf(delta, of_u, d[e] * before_gate);
                input[half] = fmaf(x[e], of_u, input[half]);
                skip[e] = fmaf(before_gate, x[e], skip[e]);
            }
            *(unsigned*)(stage.before + to) = pack(dx[0], dx[1]);
            if (GATE) *(unsigned*)(stage.after + to) = pack(dz[0], dz[1]);
        }
        if (SKIP) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float sum = column_sum(skip[e]);
                if (threadIdx.x % 32 < 4) parts.skip[at.row / 16][column + e] = sum;
            }
        }
    }
    write_rows(parts.input[at.column], at.row, input);
}

// Writes the steps of the chunk that are there.
__device__ __forceinline__ void write_out(STORAGE* to, const STORAGE* from, const Params& p, const Work& at, int head) {
#pragma unroll
    for (int unit = threadIdx.x; unit < CHUNK * WIDTH / 8; unit += THREADS) {
        int row = unit / (WIDTH / 8), column = unit % (WIDTH / 8) * 8;
        if (row < at.left) *(int4*)(to + at.step(p, row, head) * WIDTH + column) = *(const int4*)(from + row * WIDTH_APART + column);
    }
}

template <int PARTS, int LENGTH>
__device__ __forceinline__ float sum_parts(const float (&parts)[PARTS][LENGTH], int at) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[part][at];
    return sum;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

// ddt, and the chunk's parts of dA and ddt_bias, by one warp: a lane has two steps. What goes through the decay of a
// step is what goes from steps before it, or from S, to later ones, or to G.
__device__ __forceinline__ void write_steps(const Parts& parts, const Stage& stage, const Params& p, const Work& at, int head) {
    int lane = threadIdx.x % 32;
    float total = 0, later[2], earlier[2], a = p.a[head];
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += parts.through[warp];
    total *= exp2_fast(stage.decay[CHUNK - 1]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = 2 * lane + e;
        later[e] = sum_parts(parts.from_state, i) + sum_parts(parts.later, i) - sum_parts(parts.earlier, i);
        earlier[e] = sum_parts(parts.to_state, i);
    }
    float from = later[0] + later[1], until = earlier[0] + earlier[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float above = __shfl_down_sync(~0u, from, distance), below = __shfl_up_sync(~0u, until, distance);
        if (lane + distance < 32) from += above;
        if (lane >= distance) until += below;
    }
    float above = __shfl_down_sync(~0u, from, 1), below = __shfl_up_sync(~0u, until, 1);
    if (lane == 31) above = 0;
    if (lane == 0) below = 0;
    later[1] += above, later[0] += later[1];
    float before[2] = {below, below + earlier[0]}, da = 0, bias = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = 2 * lane + e;
        if (i >= at.left) continue;
        float decay = total + later[e] + before[e];
        da = fmaf(stage.delta[i], decay, da);
        i64 id = at.step(p, i, head);
        float slope = step_slope(widen(p.dt[id]), HAS_BIAS ? p.dt_bias[head] : 0.0f, p.lo, p.hi);
        float ddt = fmaf(a, decay, sum_parts(parts.input, i)) * slope;
        narrow(ddt, p.ddt[id]);
        bias += ddt;
    }
    da = warp_sum(da), bias = warp_sum(bias);
    i64 to = ((i64)at.batch * p.chunks + at.chunk) * p.heads + head;
    if (lane == 0) p.part_a[to] = da;
    if (lane == 0 && HAS_BIAS) p.part_bias[to] = bias;
    if (!SKIP) return;
    float skip = 0;
#pragma unroll
    for (int column = lane; column < WIDTH; column += 32) {
        float sum = sum_parts(parts.skip, column);
        if (p.wide_skip) p.part_d[to * WIDTH + column] = sum;
        skip += sum;
    }
    skip = warp_sum(skip);
    if (lane == 0 && !p.wide_skip) p.part_d[to] = skip;
}

// Writes dB or dC of a warp's steps, or the block's part of them.
__device__ __forceinline__ void write_states(STORAGE* to, float* part, const Others& sums, const Params& p, const Work& at) {
    part += at.part * p.batch * p.length * p.groups * STATE;
#pragma unroll
    for (int n = 0; n < OWN_STATES / 8; n++) {
        int column = at.column * OWN_STATES + sum_column(n);
        if (at.column * OWN_STATES + 8 * n >= STATE) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = at.row + sum_row(0, half);
            if (i >= at.left) continue;
            i64 id = (at.step(p, i) * p.groups + at.group) * STATE + column;
            float low = sums[0][n][2 * half], high = sums[0][n][2 * half + 1];
            if (p.parts > 1) *(float2*)(part + id) = {low, high};
            else *(unsigned*)(to + id) = pack(low, high);
        }
    }
}

// The sums of a head that lead to all its gradients; those of B and C go into db, dc and `sum`.
__device__ __forceinline__ void head_gradients(Shared& shared, Stage& stage, const Params& p, const Work& at, int head,
                                               const Scores& cb, Scores& sum, Others& db, Others& dc) {
    Parts& parts = shared.parts;
    const STORAGE* dy = GATE ? shared.gated : stage.dy;
    if (GATE) {
        gate(shared.gated, stage);
        __syncthreads();
    }
    {
        Scores dyx;
        clear(dyx);
        if (at.column * SCORES < at.row + 16)
            add_products<SCORES, WIDTH, WIDTH_APART>(
                dyx, left_at<WIDTH_APART>(dy + at.row * WIDTH_APART),
                right_at<WIDTH_APART>(stage.x + at.column * SCORES * WIDTH_APART));
        weigh(sum, shared.weights, parts, stage, at, cb, dyx);
    }
    float from_state[2] = {}, to_state[2] = {}, until[2], after[2], input[2], total = stage.decay[CHUNK - 1];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = at.row + sum_row(0, half);
        until[half] = exp2_fast(stage.decay[i]);
        after[half] = exp2_fast(total - stage.decay[i]);
        input[half] = after[half] * stage.delta[i];
    }
    Rows u, y;
    read_state(y, from_state, shared.c, stage.before, dy, until, at);
    read_state(u, to_state, shared.b, stage.after, stage.x, after, at);
#pragma unroll
    for (int half = 0; half < 2; half++) to_state[half] *= stage.delta[at.row + sum_row(0, half)];
    write_rows(parts.from_state[at.column], at.row, from_state);
    write_rows(parts.to_state[at.column], at.row, to_state);
    add_states(dc, dy, stage.before, until, at);
    add_states(db, stage.x, stage.after, input, at);
    float all = through(stage);
    if (threadIdx.x % 32 == 0) parts.through[threadIdx.x / 32] = all;
    __syncthreads();
    add_later<OWN_WIDTH, WIDTH_APART>(u, shared.weights, dy, at);
    if (GATE) add_earlier<OWN_WIDTH, WIDTH_APART>(y, shared.weights, stage.x, stage.delta, at);
    finish(stage, parts, p, at, head, u, y);
    __syncthreads();
    write_out(p.dx, stage.before, p, at, head);
    if (GATE) write_out(p.dz, stage.after, p, at, head);
    if (threadIdx.x / 32 == WARPS - 1) write_steps(parts, stage, p, at, head);
}

// The weights summed over heads, for all warps.
__device__ __forceinline__ void share(STORAGE* weights, const Scores& sum, const Work& at) {
#pragma unroll
    for (int n = 0; n < SCORES / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(unsigned*)(weights + (at.row + sum_row(0, half)) * WIDTH_APART + at.column * SCORES + sum_column(n)) =
                pack(sum[0][n][2 * half], sum[0][n][2 * half + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ssd_gradient(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Work at(p);
    fetch_group(shared, p, at);
    fetch(shared.stages[0], p, at, at.first);
    copied<0>();
    __syncthreads();
    Scores cb, sum;
    Others db, dc;
    clear(cb);
    clear(sum);
    clear(db);
    clear(dc);
    if (at.column * SCORES < at.row + 16)
        add_products<SCORES, STATE, STATE_APART>(cb, left_at<STATE_APART>(shared.c + at.row * STATE_APART),
                                                 right_at<STATE_APART>(shared.b + at.column * SCORES * STATE_APART));
#pragma unroll 1
    for (int head = at.first; head < at.last; head++) {
        int turn = (head - at.first) % STAGES;
        if (STAGES == 2 && head + 1 < at.last) fetch(shared.stages[1 - turn], p, at, head + 1);
        head_gradients(shared, shared.stages[turn], p, at, head, cb, sum, db, dc);
        if (STAGES == 1) {
            __syncthreads();
            if (head + 1 < at.last) fetch(shared.stages[0], p, at, head + 1);
        }
        copied<0>();
        __syncthreads();
    }
    share(shared.weights, sum, at);
    __syncthreads();
    add_earlier<OWN_STATES, STATE_APART>(dc, shared.weights, shared.b, nullptr, at);
    add_later<OWN_STATES, STATE_APART>(db, shared.weights, shared.c, at);
    write_states(p.db, p.part_b, db, p, at);
    write_states(p.dc, p.part_c, dc, p, at);
}
