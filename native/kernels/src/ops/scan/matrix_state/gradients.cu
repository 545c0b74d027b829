// The gradients of a chunk's steps from states and their cotangents, on tensor cores; after products.cu, with all keys in a
// block. A block takes one chunk of a head after the other, and fetches the next while it computes. It also writes dbeta
// with DELTA, and dg with GATE.
// Limit: memory, since both states of a chunk, in the storage type, are as long as four of its rows of keys.

// Sums over keys of each step, by part of the keys: inner products of its q or k and parts of their gradients.
typedef float Parts[SPLIT][CHUNK];
struct Dots {
    Parts from_state, to_error, from_error, to_state, q, k;
};

// What follows from products of steps: weights of q and k in their gradients, and what passes between steps for dg.
struct Scores {
    STORAGE of_q[CHUNK * STEP_APART], of_k[CHUNK * STEP_APART];
    STORAGE of_error[OF_DELTA<CHUNK * STEP_APART>], of_other[OF_DELTA<CHUNK * STEP_APART>];
    float through[CHUNK * (CHUNK + 1)];
};

// What a chunk needs for all values.
struct Inputs {
    STORAGE q[CHUNK * KEY_APART], k[CHUNK * KEY_APART];
    Factors factors;
};

// Sums over keys, over values (dZ . v), and over a warp's part of both states.
struct Totals {
    Dots dots;
    float dbeta[CHUNK], ends[THREADS / 32];
};

// Products of steps take the place of the chunk's last stage.
union Slot {
    Stage stage;
    Scores scores;
};

struct Shared {
    Slot slots[2];
    Inputs inputs[2];
    Totals totals;
};

// The work on a chunk after its values.
struct Work {
    Inputs& inputs;
    Scores& scores;
    Totals& totals;
};

// A sum over the parts of the keys.
__device__ __forceinline__ float whole(const Parts& parts, int step) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SPLIT; i++) sum += parts[i][step];
    return sum;
}

// A thread's part of a step's dZ . v; neighbouring threads share a step.
__device__ __forceinline__ float with_values(const Stage& stage) {
    int row = threadIdx.x / SHARE * VALUE_APART;
    float sum = 0;
#pragma unroll
    for (int i = threadIdx.x % SHARE * 8; i < WIDTH; i += 8 * SHARE) sum += dot(stage.v + row + i, stage.dz + row + i);
    return sum;
}

// A thread's part of the inner product of the state before the chunk and the cotangent of that after it.
__device__ __forceinline__ float between_states(const Stage& stage) {
    float sum = 0;
#pragma unroll 4
    for (int unit = threadIdx.x; unit < KEYS * WIDTH / 8; unit += THREADS) {
        int place = unit / (WIDTH / 8) * VALUE_APART + unit % (WIDTH / 8) * 8;
        sum += dot(stage.before + place, stage.after + place);
    }
    return sum;
}

// q k', and with DELTA k k', of a warp's steps and a part of the others.
__device__ __forceinline__ void multiply_keys(Squares& by_q, Squares& by_k, const Inputs& inputs) {
    unsigned q_at = left_at<KEY_APART>(inputs.q + own_step() * KEY_APART);
    unsigned k_at = left_at<KEY_APART>(inputs.k + own_step() * KEY_APART);
    unsigned others = right_at<KEY_APART>(inputs.k + own_part() * OWN_SCORES * KEY_APART);
    clear(by_q);
    clear(by_k);
#pragma unroll
    for (int d = 0; d < KEYS; d += 16) {
        Left q, k;
        load_tiles(q, q_at + 2 * d);
        if (DELTA) load_tiles(k, k_at + 2 * d);
#pragma unroll
        for (int n = 0; n < OWN_SCORES; n += 16) {
            unsigned right[4];
            load_tiles(right, others + 2 * (n * KEY_APART + d));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                multiply_add(by_q[0][n / 8 + e], q, right[2 * e], right[2 * e + 1]);
                if (DELTA) multiply_add(by_k[0][n / 8 + e], k, right[2 * e], right[2 * e + 1]);
            }
        }
    }
}

// Writes the weights of products with q and k, and what passes from each step to each later one.
__device__ __forceinline__ void write_scores(Scores& scores, const Inputs& inputs, const Products& products, float scale) {
    const Factors& factors = inputs.factors;
    Squares by_q, by_k;
    multiply_keys(by_q, by_k, inputs);
#pragma unroll
    for (int n = 0; n < OWN_SCORES / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = own_step() + sum_row(0, half), first = own_part() * OWN_SCORES + sum_column(n);
            float of_q[2], of_k[2], of_error[2], of_other[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int column = first + e, element = 2 * half + e;
                float decay = column <= row ? exp2_fast(factors.log[row] - factors.log[column]) : 0.0f;
                float dp = column <= row ? products.dy_u[0][n][element] * decay : 0.0f;
                float dl = DELTA && column < row ? -products.dz_u[0][n][element] * decay : 0.0f;
                of_q[e] = dp * factors.k[column];
                of_k[e] = dp * scale * factors.q[row];
                of_error[e] = dl * factors.k[column];
                of_other[e] = DELTA ? dl * factors.beta[row] * factors.k[row] : 0.0f;
                float of_pair = of_k[e] * by_q[0][n][element];
                if (DELTA) of_pair += of_other[e] * by_k[0][n][element];
                scores.through[row * (CHUNK + 1) + column] = column < row ? of_pair * factors.k[column] : 0.0f;
            }
            auto write = [&](STORAGE* to, const float (&pair)[2]) {
                *(unsigned*)(to + row * STEP_APART + first) = pack(pair[0], pair[1]);
            };
            write(scores.of_q, of_q);
            write(scores.of_k, of_k);
            if (DELTA) write(scores.of_error, of_error), write(scores.of_other, of_other);
        }
}

template <class Factor>
__device__ __forceinline__ void scale(Keys& keys, Factor of) {
    each_pair(keys, [&](float* pair, int, int step, int) {
        float factor = of(step);
        pair[0] *= factor, pair[1] *= factor;
    });
}

// to += a b, or a' b where TURNED; `a` is lower triangular, `b` are rows of keys.
template <bool TURNED>
__device__ __forceinline__ void add_keys(Keys& to, const STORAGE* a, const STORAGE* b) {
    unsigned left = TURNED ? right_at<STEP_APART>(a + own_step()) : left_at<STEP_APART>(a + own_step() * STEP_APART);
    unsigned right = turned_at<KEY_APART>(b + own_part() * OWN_KEYS);
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (TURNED ? k < own_step() : k > own_step()) continue;
        Left own[1][1];
        if (TURNED) load_turned_tiles(own[0][0], left + 2 * k * STEP_APART);
        else load_tiles(own[0][0], left + 2 * k);
        add_weighted<OWN_KEYS, 16, KEY_APART>(to, own, right + 2 * k * KEY_APART);
    }
}

// Writes the inner product of each step's sums and its own key, over a part of the keys.
__device__ __forceinline__ void write_dots(Parts& to, Keys& keys, const STORAGE* rows) {
    float sums[2] = {};
    each_pair(keys, [&](const float* pair, int half, int step, int key) {
        float low, high;
        widen(rows + step * KEY_APART + key, low, high);
        sums[half] = fmaf(pair[0], low, fmaf(pair[1], high, sums[half]));
    });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sums[half] = sum_over<4>(sums[half]);
        if (threadIdx.x % 4 == 0) to[own_part()][own_step() + sum_row(0, half)] = sums[half];
    }
}

// Adds what passes to the errors to the gradient of k.
__device__ __forceinline__ void add_errors(Keys& dk, const Keys& errors, const Work& on) {
    add_keys<true>(dk, on.scores.of_other, on.inputs.k);
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            dk[0][n][e] = fmaf(on.inputs.factors.beta[own_step() + sum_row(0, e / 2)], errors[0][n][e], dk[0][n][e]);
}

// The gradients of normalized q (without scale) and k, in place of the first and the last of the sums of keys.
__device__ __forceinline__ void find_gradients(const Work& on, Products& products) {
    const Factors& factors = on.inputs.factors;
    const Scores& scores = on.scores;
    Dots& dots = on.totals.dots;
    const STORAGE *q = on.inputs.q, *k = on.inputs.k;
    Keys &dq = products.dy_before, &errors = products.dz_before, &dk = products.u_after;
    float total = factors.log[CHUNK - 1];
    scale(dq, [&](int step) { return exp2_fast(factors.log[step]); });
    write_dots(dots.from_state, dq, q);
    add_keys<false>(dq, scores.of_q, k);
    if (DELTA) {
        scale(errors, [&](int step) { return -exp2_fast(factors.log[step]); });
        write_dots(dots.to_error, errors, k);
        add_keys<false>(errors, scores.of_error, k);
        write_dots(dots.from_error, errors, k);
    }
    scale(dk, [&](int step) { return exp2_fast(total - factors.log[step]); });
    write_dots(dots.to_state, dk, k);
    add_keys<true>(dk, scores.of_k, q);
    if (DELTA) add_errors(dk, errors, on);
    if (GROUPED || !NORM) return;
    write_dots(dots.q, dq, q);
    write_dots(dots.k, dk, k);
}

// Writes the gradient of x: with NORM `sums` is that of the normalized z = x f, and dx = f (dz - z (z . dz)).
__device__ __forceinline__ void write_keys(STORAGE* to, Keys& keys, STORAGE* rows, const Parts& dots, const float* factors,
                                           float scale, const Params& p, const Chunk& at) {
    float along[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int step = own_step() + sum_row(0, half);
        along[half] = NORM ? whole(dots, step) * factors[step] * factors[step] : 0.0f;
    }
    each_pair(keys, [&](const float* pair, int half, int step, int key) {
        float low, high, factor = NORM ? scale * factors[step] : scale;
        STORAGE* row = rows + step * KEY_APART + key;
        widen(row, low, high);
        *(unsigned*)row = pack(factor * fmaf(-along[half], low, pair[0]), factor * fmaf(-along[half], high, pair[1]));
    });
    __syncwarp();
    store_keys(to, rows, p, at);
}

// Replaces the elements of each row by the sums of those before them.
__device__ __forceinline__ void sum_rows(float* through) {
    constexpr int EACH = CHUNK / SHARE;
    float* own = through + threadIdx.x / SHARE * (CHUNK + 1) + threadIdx.x % SHARE * EACH;
    float values[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        values[i] = sum;
        sum += own[i];
    }
    float before = 0;
#pragma unroll
    for (int i = 0; i < SHARE - 1; i++) {
        float other = __shfl_sync(~0u, sum, i, SHARE);
        if (i < threadIdx.x % SHARE) before += other;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = before + values[i];
}

// dg of step t sums what passes from before t to t or later: from the state before the chunk to steps and to the state
// after it, from earlier steps to these and to that.
__device__ __forceinline__ void write_gates(const Work& on, const Params& p, const Chunk& at) {
    const Factors& factors = on.inputs.factors;
    const Dots& dots = on.totals.dots;
    sum_rows(on.scores.through);
    __syncthreads();
    int step = threadIdx.x / SHARE, part = threadIdx.x % SHARE;
    float sum = 0, ends = 0;
    for (int i = part; i < CHUNK; i += SHARE) {
        float from_state = (float)p.scale * factors.q[i] * whole(dots.from_state, i);
        if (DELTA) from_state += factors.beta[i] * factors.k[i] * whole(dots.to_error, i);
        if (i < step) sum += factors.k[i] * whole(dots.to_state, i);
        else sum += from_state + on.scores.through[i * (CHUNK + 1) + step];
    }
    for (int i = part; i < THREADS / 32; i += SHARE) ends += on.totals.ends[i];
    sum = sum_over<SHARE>(fmaf(exp2_fast(factors.log[CHUNK - 1]), ends, sum));
    if (part == 0 && step < at.left()) p.dg[at.of_head(p) + (i64)step * p.heads] = sum;
}

__device__ __forceinline__ void write(const Work& on, Products& products, const Params& p, const Chunk& at) {
    const Factors& factors = on.inputs.factors;
    const Dots& dots = on.totals.dots;
    int step = threadIdx.x;
    if (DELTA && step < CHUNK && step < at.left()) {
        float dbeta = fmaf(factors.k[step], whole(dots.from_error, step), on.totals.dbeta[step]);
        narrow(dbeta, p.dbeta[at.of_head(p) + (i64)step * p.heads]);
    }
    if (GATE) write_gates(on, p, at);
    if (GROUPED) {
        write_for_group(p.sums[0], products.dy_before, p, at);
        write_for_group(p.sums[DELTA ? 1 : 2], products.u_after, p, at);
        return;
    }
    write_keys(p.dq, products.dy_before, on.inputs.q, dots.q, factors.q, p.scale, p, at);
    write_keys(p.dk, products.u_after, on.inputs.k, dots.k, factors.k, 1, p, at);
}

// Queues copies of what a chunk needs for all values, and of its first values, as one group.
__device__ __forceinline__ void fetch(Inputs& inputs, Stage& stage, const Params& p, const Chunk& at) {
    copy_keys(inputs.q, p.q, p, at);
    copy_keys(inputs.k, p.k, p, at);
    copy_factors(inputs.factors, p, at);
    fetch(stage, p, at, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_gradients(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Totals& totals = shared.totals;
    int id = blockIdx.x, count = p.all_chunks * p.heads;
    int turn = 0, stage = 0;
    fetch(shared.inputs[0], shared.slots[0].stage, p, Chunk(p, id));
#pragma unroll 1
    for (; id < count; id += gridDim.x, turn ^= 1, stage ^= 1) {
        Chunk at(p, id);
        Products products;
        clear(products.dy_before), clear(products.dz_before), clear(products.u_after);
        clear(products.dy_u), clear(products.dz_u);
        float dbeta = 0, ends = 0;
#pragma unroll 1
        for (int first = 0; first < p.values; first += WIDTH) {
            if (first > 0) stage ^= 1;
            bool last = first + WIDTH >= p.values;
            if (!last) fetch(shared.slots[1 - stage].stage, p, at, first + WIDTH);
            else if (id + gridDim.x < count)
                fetch(shared.inputs[1 - turn], shared.slots[1 - stage].stage, p, Chunk(p, id + gridDim.x));
            else commit();
            copied<1>();
            __syncthreads();
            add(products, shared.slots[stage].stage);
            if (DELTA) dbeta += with_values(shared.slots[stage].stage);
            if (GATE) ends += between_states(shared.slots[stage].stage);
            __syncthreads();
        }
        Work on = {shared.inputs[turn], shared.slots[stage].scores, totals};
        write_scores(on.scores, on.inputs, products, p.scale);
        dbeta = sum_over<SHARE>(dbeta), ends = sum_over<32>(ends);
        if (threadIdx.x % SHARE == 0) totals.dbeta[threadIdx.x / SHARE] = dbeta;
        if (threadIdx.x % 32 == 0) totals.ends[warp()] = ends;
        __syncthreads();
        find_gradients(on, products);
        __syncthreads();
        write(on, products, p, at);
        __syncthreads();
    }
}
