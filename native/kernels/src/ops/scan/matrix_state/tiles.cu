// A block's columns of a head's state, in f32 in the accumulators of its warps, and the rows of a chunk's steps. For
// products over steps a warp has 16 steps and a part of the columns; of the state it has 16 keys and a part of the
// columns.
//   QUERIES   whether stages have q and P

// Parts of the columns of the state, and of the steps' rows, between warps.
constexpr int WARPS = THREADS / 32, PARTS = WARPS * 16 / KEYS, STATE_WIDTH = WIDTH / PARTS;
constexpr int HALVES = WARPS * 16 / CHUNK, OWN_WIDTH = WIDTH / HALVES;
static_assert(PARTS * KEYS == WARPS * 16 && HALVES * CHUNK == WARPS * 16, "warps have whole tiles");

typedef Sums State[1][STATE_WIDTH / 8];
typedef Sums Rows[1][OWN_WIDTH / 8];

// The segment of a block, and its first chunk, or with `reverse` its last, which an empty sequence lacks.
__device__ __forceinline__ Part part_of_block(const Params& p) { return Part(p, blockIdx.x / p.blocks); }
__device__ __forceinline__ Chunk first_chunk(const Params& p, const Part& part, bool reverse) {
    return Chunk(p, part.of, part.head, reverse ? part.last - 1 : part.first);
}

// The block's first column of values. After the blocks of values there may be those of a transition, by its columns.
__device__ __forceinline__ bool is_transition(const Params& p) { return blockIdx.x % p.blocks >= p.of_values; }
__device__ __forceinline__ int first_column(const Params& p) {
    return (blockIdx.x % p.blocks - (is_transition(p) ? p.of_values : 0)) * WIDTH;
}

// The inputs of a chunk: `values` are v, or dy.
template <int COUNT>
constexpr int OF_QUERIES = QUERIES ? COUNT : 8;
struct Stage {
    STORAGE q[OF_QUERIES<CHUNK * KEY_APART>], k[CHUNK * KEY_APART], values[CHUNK * VALUE_APART];
    STORAGE inverse[OF_DELTA<CHUNK * STEP_APART>], scores[OF_QUERIES<OF_SCORES<CHUNK * STEP_APART>>];
    Factors factors;
};

// Queues copies of a chunk as one group; without `values` these are zeros.
__device__ __forceinline__ void fetch(Stage& stage, const STORAGE* values, const Params& p, const Chunk& at) {
    if (QUERIES) copy_keys(stage.q, p.q, p, at);
    copy_keys(stage.k, p.k, p, at);
    int first = first_column(p);
    copy_rows<WIDTH / 8, VALUE_APART>(stage.values, values + at.values(p) + first, (i64)p.heads * p.values,
                                      values ? at.left() : 0, p.values - first);
    if (DELTA) copy_rows<CHUNK / 8, STEP_APART>(stage.inverse, p.inverses + at.id(p) * SQUARE, CHUNK, CHUNK);
    if (QUERIES && (DELTA || BY_KEY))
        copy_rows<CHUNK / 8, STEP_APART>(stage.scores, p.scores + at.id(p) * SQUARE, CHUNK, CHUNK);
    copy_factors(stage.factors, p, at);
    commit();
}

// The row and the first column of a warp's part of the state.
__device__ __forceinline__ int state_row() { return warp() / PARTS * 16; }
__device__ __forceinline__ int state_column() { return warp() % PARTS * STATE_WIDTH; }

// Calls `use` with each pair of a lane's elements that is within the head's state, and its offset in the state.
template <class Use>
__device__ __forceinline__ void each_of_state(State& state, const Params& p, Use use) {
#pragma unroll
    for (int n = 0; n < STATE_WIDTH / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = state_row() + sum_row(0, half);
            int column = first_column(p) + state_column() + sum_column(n);
            if (key < p.keys && column < p.values) use(&state[0][n][2 * half], (i64)key * p.values + column);
        }
}

__device__ __forceinline__ void load(State& state, const float* from, const Params& p) {
    clear(state);
    if (!from) return;
    each_of_state(state, p, [&](float* pair, i64 at) {
        float2 both = *(const float2*)(from + at);
        pair[0] = both.x, pair[1] = both.y;
    });
}

// The state that a segment starts from if nothing is known of the others: `initial` if it is the first, else zeros.
__device__ __forceinline__ void begin_alone(State& state, const float* initial, bool is_first, const Params& p,
                                            const Part& part) {
    load(state, is_first && initial ? initial + part.state(p) : nullptr, p);
}

// The state that a segment starts from, `initial` if it is the whole sequence.
__device__ __forceinline__ void begin(State& state, const float* initial, const Params& p, const Part& part) {
    if (part.segments > 1) load(state, p.starts + part.id * p.size, p);
    else load(state, initial ? initial + part.state(p) : nullptr, p);
}

__device__ __forceinline__ void store(State& state, float* to, const Params& p) {
    each_of_state(state, p, [&](float* pair, i64 at) { *(float2*)(to + at) = {pair[0], pair[1]}; });
}

// Writes a warp's part of the state to shared memory for all warps, rounded to storage.
__device__ __forceinline__ void share_state(STORAGE* to, const State& state) {
#pragma unroll
    for (int n = 0; n < STATE_WIDTH / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(unsigned*)(to + (state_row() + sum_row(0, half)) * VALUE_APART + state_column() + sum_column(n)) =
                pack(state[0][n][2 * half], state[0][n][2 * half + 1]);
}

// The first step and the first column of a warp's part of the rows of steps.
__device__ __forceinline__ int own_step() { return warp() % (CHUNK / 16) * 16; }
__device__ __forceinline__ int own_column() { return warp() / (CHUNK / 16) * OWN_WIDTH; }

// Calls `use` with each pair of a lane's elements of rows of steps: their step and their place in rows of values.
template <class Use>
__device__ __forceinline__ void each_of_rows(Rows& rows, Use use) {
#pragma unroll
    for (int n = 0; n < OWN_WIDTH / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int step = own_step() + sum_row(0, half);
            use(&rows[0][n][2 * half], step, step * VALUE_APART + own_column() + sum_column(n));
        }
}

// Writes a warp's part of the rows to shared memory for all warps, rounded to storage.
__device__ __forceinline__ void share_rows(STORAGE* to, Rows& rows) {
    each_of_rows(rows, [&](const float* pair, int, int place) { *(unsigned*)(to + place) = pack(pair[0], pair[1]); });
}

// Multiplies the row of each step by its factor.
template <class Factor>
__device__ __forceinline__ void scale(Rows& rows, Factor of) {
    each_of_rows(rows, [&](float* pair, int step, int) {
        float factor = of(step);
        pair[0] *= factor, pair[1] *= factor;
    });
}

// Stages a warp's part of the rows of steps in shared memory and writes it, so that stores are coalesced.
__device__ __forceinline__ void write_rows(STORAGE* to, STORAGE* staged, Rows& rows, const Params& p, const Chunk& at) {
    share_rows(staged, rows);
    __syncwarp();
    int first = first_column(p) + own_column();
#pragma unroll
    for (int unit = threadIdx.x % 32; unit < 16 * OWN_WIDTH / 8; unit += 32) {
        int step = own_step() + unit / (OWN_WIDTH / 8), column = unit % (OWN_WIDTH / 8) * 8;
        if (step < at.left() && first + column < p.values)
            *(int4*)(to + at.values(p) + (i64)step * p.heads * p.values + first + column) =
                *(const int4*)(staged + step * VALUE_APART + own_column() + column);
    }
}

// Copies the block's columns of a state in shared memory to those of a chunk.
__device__ __forceinline__ void write_state(STORAGE* to, const STORAGE* state, const Params& p, const Chunk& at) {
    int first = first_column(p);
    to += at.id(p) * p.keys * p.values + first;
#pragma unroll
    for (int unit = threadIdx.x; unit < KEYS * WIDTH / 8; unit += THREADS) {
        int key = unit / (WIDTH / 8), column = unit % (WIDTH / 8) * 8;
        if (key < p.keys && first + column < p.values)
            *(int4*)(to + (i64)key * p.values + column) = *(const int4*)(state + key * VALUE_APART + column);
    }
}

// K S with BY_K, and Q S with BY_Q.
template <bool BY_K, bool BY_Q>
__device__ __forceinline__ void read_out(Rows& by_k, Rows& by_q, const Stage& stage, const STORAGE* state) {
    unsigned k_at = left_at<KEY_APART>(stage.k + own_step() * KEY_APART);
    unsigned q_at = left_at<KEY_APART>(stage.q + own_step() * KEY_APART);
    unsigned state_at = turned_at<VALUE_APART>(state + own_column());
    if (BY_K) clear(by_k);
    if (BY_Q) clear(by_q);
#pragma unroll
    for (int d = 0; d < KEYS; d += 16) {
        Left k, q;
        if (BY_K) load_tiles(k, k_at + 2 * d);
        if (BY_Q) load_tiles(q, q_at + 2 * d);
#pragma unroll
        for (int n = 0; n < OWN_WIDTH; n += 16) {
            unsigned right[4];
            load_turned_tiles(right, state_at + 2 * (d * VALUE_APART + n));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (BY_K) multiply_add(by_k[0][n / 8 + e], k, right[2 * e], right[2 * e + 1]);
                if (BY_Q) multiply_add(by_q[0][n / 8 + e], q, right[2 * e], right[2 * e + 1]);
            }
        }
    }
}

// to += a b, where `a` is lower triangular.
__device__ __forceinline__ void add_lower(Rows& to, const STORAGE* a, const STORAGE* b) {
    unsigned left = left_at<STEP_APART>(a + own_step() * STEP_APART), right = turned_at<VALUE_APART>(b + own_column());
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (k > own_step()) break;
        Left own[1][1];
        load_tiles(own[0][0], left + 2 * k);
        add_weighted<OWN_WIDTH, 16, VALUE_APART>(to, own, right + 2 * k * VALUE_APART);
    }
}

// to += a' b, where `a` is lower triangular.
__device__ __forceinline__ void add_upper(Rows& to, const STORAGE* a, const STORAGE* b) {
    unsigned left = right_at<STEP_APART>(a + own_step()), right = turned_at<VALUE_APART>(b + own_column());
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        if (k < own_step()) continue;
        Left own[1][1];
        load_turned_tiles(own[0][0], left + 2 * k * STEP_APART);
        add_weighted<OWN_WIDTH, 16, VALUE_APART>(to, own, right + 2 * k * VALUE_APART);
    }
}

// The weights of a chunk's steps: of the state in y, and of keys in the state after the chunk. With BY_KEY they are in q
// and k.
__device__ __forceinline__ float weight_of_state(const Factors& factors, int t, float scale) {
#if BY_KEY
    return 1;
#else
    return scale * factors.q[t] * exp2_fast(factors.log[t]);
#endif
}
__device__ __forceinline__ float weight_of_key(const Factors& factors, int t) {
#if BY_KEY
    return 1;
#else
    return factors.k[t] * exp2_fast(factors.log[CHUNK - 1] - factors.log[t]);
#endif
}

// Adds to a warp's steps the rows of the steps up to each, or with LATER from it on, weighted by the product of keys of
// both and by `weight` of the earlier and the later step.
template <bool LATER, class Weight>
__device__ __forceinline__ void add_pairs(Rows& to, const STORAGE* left, const STORAGE* right, const STORAGE* rows,
                                          Weight weight) {
    Left own[KEYS / 16];
    unsigned own_at = left_at<KEY_APART>(left + own_step() * KEY_APART), others = right_at<KEY_APART>(right);
    unsigned rows_at = turned_at<VALUE_APART>(rows + own_column());
#pragma unroll
    for (int d = 0; d < KEYS / 16; d++) load_tiles(own[d], own_at + 2 * 16 * d);
#pragma unroll 1
    for (int j = LATER ? own_step() : 0; LATER ? j < CHUNK : j <= own_step(); j += 16) {
        Sums scores[1][2];
        clear(scores);
#pragma unroll
        for (int d = 0; d < KEYS / 16; d++) {
            unsigned tiles[4];
            load_tiles(tiles, others + 2 * (j * KEY_APART + 16 * d));
            multiply_add(scores[0][0], own[d], tiles[0], tiles[1]);
            multiply_add(scores[0][1], own[d], tiles[2], tiles[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int step = own_step() + sum_row(0, e / 2), of = j + sum_column(n) + e % 2;
                int earlier = LATER ? step : of, later = LATER ? of : step;
                scores[0][n][e] = earlier <= later ? scores[0][n][e] * weight(earlier, later) : 0.0f;
            }
        Left weights[1][1];
        round<16>(weights, scores);
        add_weighted<OWN_WIDTH, 16, VALUE_APART>(to, weights, rows_at + 2 * j * VALUE_APART);
    }
}

// Adds to a warp's steps what those of the chunk up to each give, or with LATER from each on.
template <bool LATER>
__device__ __forceinline__ void add_own(Rows& to, const Stage& stage, float scale) {
#if BY_KEY
    if (LATER) add_upper(to, stage.scores, stage.values);
    else add_lower(to, stage.scores, stage.values);
#else
    const STORAGE *left = LATER ? stage.k : stage.q, *right = LATER ? stage.q : stage.k;
    add_pairs<LATER>(to, left, right, stage.values, [&](int earlier, int later) {
        return scale * exp2_fast(stage.factors.log[later] - stage.factors.log[earlier]);
    });
#endif
}

// Adds rows of keys, transposed and each times its weight, times rows of values to the state.
template <class Weight>
__device__ __forceinline__ void add_outer(State& state, const STORAGE* keys, const STORAGE* values, Weight weight) {
    // Keys are stored step by step; transposed tiles are keys by steps.
    unsigned keys_at = right_at<KEY_APART>(keys + state_row());
    unsigned values_at = turned_at<VALUE_APART>(values + state_column());
#pragma unroll
    for (int k = 0; k < CHUNK; k += 16) {
        Left left[1][1];
        load_turned_tiles(left[0][0], keys_at + 2 * k * KEY_APART);
#pragma unroll
        for (int half = 0; half < 2 && !BY_KEY; half++) {
            int step = k + 8 * half + sum_column(0);
            float low = weight(step), high = weight(step + 1);
#pragma unroll
            for (int row = 2 * half; row < 2 * half + 2; row++)
                left[0][0][row] = weighted(left[0][0][row], low, high);
        }
        add_weighted<STATE_WIDTH, 16, VALUE_APART>(state, left, values_at + 2 * k * VALUE_APART);
    }
}

// log2 of the decay of a key's row over a chunk.
__device__ __forceinline__ float total(const Factors& factors, int key) { return factors.log[BY_KEY ? key : CHUNK - 1]; }

// Takes the decay of the state over a chunk.
__device__ __forceinline__ void decay(State& state, const Factors& factors) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float factor = exp2_fast(total(factors, state_row() + sum_row(0, half)));
#pragma unroll
        for (int n = 0; n < STATE_WIDTH / 8; n++) state[0][n][2 * half] *= factor, state[0][n][2 * half + 1] *= factor;
    }
}

