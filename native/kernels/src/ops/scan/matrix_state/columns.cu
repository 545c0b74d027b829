// A recurrence and that of its cotangents: the passes that sum over keys. A warp holds some columns of a head's state
// in registers: LANES lanes share a column, ROWS rows each, and each lane has EACH columns.
//   WANTED           0: y and last_state; 1: e, and states after chunks; 2: de, and sum G S at the ends of chunks; dv
//                    without DELTA, which needs no 1
//   VECTOR           whether a lane's columns of a state are loaded and stored as one vector
// Limits: a step takes 4 ROWS EACH multiply-adds of a warp, or 3 without DELTA, and waits for a sum over LANES lanes. With 8 warps on a
// multiprocessor the multiply-adds are the limit; with fewer heads it is the latency of one step after the other.

constexpr int PADDED = LANES * ROWS;
constexpr int OF_WARP = 32 / LANES * EACH, COLUMNS = WORKERS * OF_WARP;

struct alignas(16) Stage {
    REAL q[STEPS][PADDED], k[STEPS][PADDED];
#if BY_KEY
    REAL decays[STEPS][PADDED];
#endif
    REAL v[STEPS][COLUMNS]; // or dy
#if !BY_KEY
    REAL decay[STEPS];
#endif
    REAL beta[STEPS];
};

// The head of a block, and its block of columns.
struct Part {
    Head head;
    int block;
};

__device__ __forceinline__ Part part(const Params& p) {
    i64 head = blockIdx.x / p.blocks;
    return {{head / p.heads, head % p.heads}, (int)(blockIdx.x % p.blocks)};
}

// Reads a row of q or k, its elements spread over the lanes of a warp; returns the inverse of its norm, or 1 without
// NORM.
__device__ __forceinline__ REAL read_key(REAL (&row)[PADDED / 32], const STORAGE* from, int keys) {
    REAL square = 0;
#pragma unroll
    for (int n = 0; n < PADDED / 32; n++) {
        int i = threadIdx.x % 32 + 32 * n;
        row[n] = i < keys ? widen(from[i]) : (REAL)0;
        square = fma(row[n], row[n], square);
    }
    return NORM ? rsqrt(warp_sum(square) + (REAL)EPS) : (REAL)1;
}

__device__ __forceinline__ void write_key(REAL* to, const REAL (&row)[PADDED / 32], REAL factor) {
#pragma unroll
    for (int n = 0; n < PADDED / 32; n++) to[threadIdx.x % 32 + 32 * n] = row[n] * factor;
}

__device__ __forceinline__ void fetch_step(Stage& stage, const Params& p, const Part& at, int step, i64 t) {
    i64 group = of_group(p, at.head, t), head = of_step(p, at.head, t);
    int lane = threadIdx.x % 32;
    REAL q[PADDED / 32], k[PADDED / 32];
    REAL q_factor = read_key(q, p.q + group * p.keys, p.keys), k_factor = read_key(k, p.k + group * p.keys, p.keys);
    const STORAGE* values = (WANTED == 2 ? p.dy : p.v) + head * p.values;
#pragma unroll
    for (int i = lane; i < COLUMNS; i += 32) {
        int column = at.block * COLUMNS + i;
        stage.v[step][i] = column < p.values ? widen(values[column]) : (REAL)0;
    }
    write_key(stage.q[step], q, (REAL)p.scale * q_factor);
    write_key(stage.k[step], k, k_factor);
#if BY_KEY
#pragma unroll
    for (int i = lane; i < PADDED; i += 32) stage.decays[step][i] = i < p.keys ? decay(p.g[head * p.keys + i]) : (REAL)0;
#endif
    if (lane != 0) return;
#if !BY_KEY
    stage.decay[step] = decay(p, head);
#endif
    if (DELTA) stage.beta[step] = widen(p.beta[head]);
    if (WANTED == 1 && NORM && at.block == 0 && at.head.index % (p.heads / p.groups) == 0) {
        p.q_factors[group] = q_factor;
        p.k_factors[group] = k_factor;
    }
}

__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Part& at, i64 n) {
    int steps = steps_of(p, n);
#pragma unroll 1
    for (int step = threadIdx.x / 32 - WORKERS; step < steps; step += FETCHERS)
        fetch_step(stage, p, at, step, n * STEPS + step);
}

struct State {
    REAL s[ROWS][EACH];
};

// The lane's rank among those that share its column; its first column in the block, and in the head.
__device__ __forceinline__ int share() { return threadIdx.x % LANES; }
__device__ __forceinline__ int first_column() {
    return threadIdx.x / 32 * OF_WARP + threadIdx.x % 32 / LANES * EACH;
}
__device__ __forceinline__ int first_column(const Part& at) { return at.block * COLUMNS + first_column(); }

// The key of a lane's row: groups of four successive keys, for vector loads, alternate between the lanes of a column.
__device__ __forceinline__ int key_of(int row) { return 4 * (share() + LANES * (row / 4)) + row % 4; }

template <int N>
struct alignas(N * sizeof(REAL)) Vector {
    REAL of[N];
};

// Calls `use` with each of the lane's elements within the head's state: its row, its column and its offset in the
// states.
template <class Use>
__device__ __forceinline__ void each_there(const Params& p, const Part& at, Use use) {
    int first = first_column(at);
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int c = 0; c < EACH; c++)
            if (key_of(row) < p.keys && first + c < p.values)
                use(row, c, of_state(p, at.head) + (i64)key_of(row) * p.values + first + c);
}

// Calls `use` with each of the lane's rows within the state. With VECTOR either all columns of a lane exist or none.
template <class Use>
__device__ __forceinline__ void each_row_there(const Params& p, const Part& at, Use use) {
    if (first_column(at) >= p.values) return;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        if (key_of(row) < p.keys) use(row, of_state(p, at.head) + (i64)key_of(row) * p.values + first_column(at));
}

__device__ __forceinline__ void load(State& state, const REAL* from, const Params& p, const Part& at) {
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int c = 0; c < EACH; c++) state.s[row][c] = 0;
    if (!from) return;
    if (VECTOR)
        each_row_there(p, at, [&](int row, i64 place) {
            Vector<EACH> columns = *(const Vector<EACH>*)(from + place);
#pragma unroll
            for (int c = 0; c < EACH; c++) state.s[row][c] = columns.of[c];
        });
    else each_there(p, at, [&](int row, int c, i64 place) { state.s[row][c] = from[place]; });
}

__device__ __forceinline__ void store(const State& state, REAL* to, const Params& p, const Part& at) {
    if (VECTOR)
        each_row_there(p, at, [&](int row, i64 place) {
            Vector<EACH> columns;
#pragma unroll
            for (int c = 0; c < EACH; c++) columns.of[c] = state.s[row][c];
            *(Vector<EACH>*)(to + place) = columns;
        });
    else each_there(p, at, [&](int row, int c, i64 place) { to[place] = state.s[row][c]; });
}

// Loads a lane's rows of q or k.
__device__ __forceinline__ void load_rows(REAL (&rows)[ROWS], const REAL* from) {
#pragma unroll
    for (int row = 0; row < ROWS; row += 4) load_four(rows + row, from + key_of(row));
}

// For each of the lane's columns the product of the state and a key, summed over all lanes of the column.
__device__ __forceinline__ void read_out(REAL (&sums)[EACH], const State& state, const REAL (&key)[ROWS]) {
#pragma unroll
    for (int c = 0; c < EACH; c++) sums[c] = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int c = 0; c < EACH; c++) sums[c] = fma(key[row], state.s[row][c], sums[c]);
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
#pragma unroll
        for (int c = 0; c < EACH; c++) sums[c] += __shfl_xor_sync(~0u, sums[c], distance);
}

// The decays of a step: of all rows, or of each of the lane's rows.
__device__ __forceinline__ REAL of_row(REAL decay, int) { return decay; }
__device__ __forceinline__ REAL of_row(const REAL (&decays)[ROWS], int row) { return decays[row]; }

// S = decay S + key input^T.
template <class Decay>
__device__ __forceinline__ void add(State& state, const Decay& decay, const REAL (&key)[ROWS],
                                    const REAL (&input)[EACH]) {
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int c = 0; c < EACH; c++) state.s[row][c] = fma(key[row], input[c], of_row(decay, row) * state.s[row][c]);
}

// Writes a step's values of a lane's columns. All lanes of a column hold them, and the first one writes.
template <class T>
__device__ __forceinline__ void write(T* to, const REAL (&values)[EACH], const Params& p, const Part& at, i64 t) {
    if (share() != 0) return;
    i64 row = of_step(p, at.head, t) * p.values;
#pragma unroll
    for (int c = 0; c < EACH; c++)
        if (first_column(at) + c < p.values) narrow(values[c], to[row + first_column(at) + c]);
}

#if DELTA
__device__ __forceinline__ void go_forwards(State& state, const Stage& stage, int step, const Params& p, const Part& at,
                                            i64 t) {
    REAL key[ROWS], input[EACH], decay = stage.decay[step];
    load_rows(key, stage.k[step]);
    read_out(input, state, key);
#pragma unroll
    for (int c = 0; c < EACH; c++) input[c] = stage.v[step][first_column() + c] - decay * input[c];
    if (WANTED == 1) write(p.errors, input, p, at, t);
#pragma unroll
    for (int c = 0; c < EACH; c++) input[c] *= stage.beta[step];
    add(state, decay, key, input);
    if (WANTED == 0) {
        load_rows(key, stage.q[step]);
        read_out(input, state, key);
        write(p.y, input, p, at, t);
    }
}

// One step backwards. On entry `carry` is the cotangent of the state after the step, as far as it comes from later
// steps; on return it is that of the state before the step.
__device__ __forceinline__ void go_backwards(State& carry, const Stage& stage, int step, const Params& p, const Part& at,
                                             i64 t) {
    REAL key[ROWS], sums[EACH], decay = stage.decay[step];
    load_rows(key, stage.q[step]);
#pragma unroll
    for (int c = 0; c < EACH; c++) sums[c] = stage.v[step][first_column() + c];
    add(carry, (REAL)1, key, sums);
    load_rows(key, stage.k[step]);
    read_out(sums, carry, key);
    write(p.derrors, sums, p, at, t);
#pragma unroll
    for (int c = 0; c < EACH; c++) sums[c] *= -decay * stage.beta[step];
    add(carry, decay, key, sums);
}
#else
#if BY_KEY
// The decays of a step, in registers.
#define DECAY(stage, step) \
    REAL decay[ROWS];      \
    load_rows(decay, stage.decays[step])
#else
#define DECAY(stage, step) REAL decay = stage.decay[step]
#endif

// One step without the delta rule.
__device__ __forceinline__ void sum_forwards(State& state, const Stage& stage, int step, const Params& p, const Part& at,
                                             i64 t) {
    REAL key[ROWS], input[EACH];
    DECAY(stage, step);
    load_rows(key, stage.k[step]);
#pragma unroll
    for (int c = 0; c < EACH; c++) input[c] = stage.v[step][first_column() + c];
    add(state, decay, key, input);
    load_rows(key, stage.q[step]);
    read_out(input, state, key);
    write(p.y, input, p, at, t);
}

// One step backwards without the delta rule. On entry `carry` is the cotangent of the state after the step, as far as it comes
// from later steps; on return it is that of the state before the step.
__device__ __forceinline__ void sum_backwards(State& carry, const Stage& stage, int step, const Params& p, const Part& at,
                                              i64 t) {
    REAL key[ROWS], sums[EACH];
    load_rows(key, stage.q[step]);
#pragma unroll
    for (int c = 0; c < EACH; c++) sums[c] = stage.v[step][first_column() + c];
    add(carry, (REAL)1, key, sums);
    load_rows(key, stage.k[step]);
    read_out(sums, carry, key);
    write(p.dv, sums, p, at, t);
    DECAY(stage, step);
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int c = 0; c < EACH; c++) carry.s[row][c] *= of_row(decay, row);
}
#endif

// The base from which `load` and `store`, which add the head's offset, reach the state after a chunk. p.ends is ordered
// by batch, head and chunk.
__device__ __forceinline__ REAL* after_chunk(const Params& p, const Part& at, i64 chunk) {
    i64 head = at.head.batch * p.heads + at.head.index;
    return p.ends + (head * p.chunks + chunk) * p.keys * p.values - of_state(p, at.head);
}

// The inner product of the cotangent and the state after a chunk, over the warp's columns.
__device__ __forceinline__ void multiply_end(const State& carry, const Params& p, const Part& at, i64 chunk) {
    const REAL* after = after_chunk(p, at, chunk);
    REAL sum = 0;
    each_there(p, at, [&](int row, int c, i64 place) { sum = fma(carry.s[row][c], after[place], sum); });
    sum = warp_sum(sum);
    i64 of = (at.head.batch * p.heads + at.head.index) * p.chunks + chunk;
    if (threadIdx.x % 32 == 0) p.products[(of * p.blocks + at.block) * WORKERS + threadIdx.x / 32] = sum;
}

__device__ __forceinline__ void work(State& state, const Stage& stage, const Params& p, const Part& at, i64 n) {
    int steps = steps_of(p, n);
    i64 first = n * STEPS, end = first + steps;
    bool ends = DELTA && GATE && (end % CHUNK == 0 || end == p.length);
    if (WANTED == 2 && ends) multiply_end(state, p, at, (end - 1) / CHUNK);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        int step = BACKWARD ? steps - 1 - i : i;
#if DELTA
        if (BACKWARD) go_backwards(state, stage, step, p, at, first + step);
        else go_forwards(state, stage, step, p, at, first + step);
#else
        if (BACKWARD) sum_backwards(state, stage, step, p, at, first + step);
        else sum_forwards(state, stage, step, p, at, first + step);
#endif
    }
    if (WANTED == 1 && ends) store(state, after_chunk(p, at, (end - 1) / CHUNK), p, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) matrix_state_columns(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Part at = part(p);
    bool works = threadIdx.x < 32 * WORKERS;
    State state;
    if (works) load(state, BACKWARD ? p.dlast : p.initial, p, at);
    through_time(p, (Stage*)memory, [&](Stage& stage, i64 n) { fetch(stage, p, at, n); },
                 [&](const Stage& stage, i64 n) { work(state, stage, p, at, n); });
    REAL* to = BACKWARD ? p.dinitial : p.last;
    if (works && to) store(state, to, p, at);
}
