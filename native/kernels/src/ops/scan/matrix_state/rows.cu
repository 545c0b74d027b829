// Gradients of q and k of each head, before they are summed over a group: the passes that sum over values. The inputs
// of states and cotangents are known by now, so that no step waits for a sum. A lane holds some columns of a row of a
// head's state in registers; PARTS neighbouring lanes share a row.
//   COLUMNS, PARTS   columns of a lane, and lanes of a row
//   ROWS             rows of a block
//   BACKWARD         0: S dy, and -a S (beta de), which is one half of dk; 1: the other half, G (beta e)
// Without DELTA beta e is v, dk is G v alone, and these passes do what dg needs: 0 keeps states after chunks, and 1 writes
// their inner products with cotangents for each row.
// Limit: four multiply-adds for each element of the state and step, or three without DELTA, for which a lane also loads
// 3 values from shared memory, or 2.

// Padding, so that the parts of a row begin at different banks.
constexpr int APART = COLUMNS + 16 / sizeof(REAL);

struct alignas(16) Stage {
#if DELTA
    REAL input[STEPS][PARTS][APART], dv[STEPS][PARTS][APART], dy[STEPS][PARTS][APART]; // beta e, beta de, dy
#else
    REAL input[STEPS][PARTS][APART], dy[STEPS][PARTS][APART]; // v, dy
#endif
    REAL q[STEPS][ROWS], k[STEPS][ROWS];
    REAL decay[STEPS][BY_KEY ? ROWS : 1];
};

// The head of a block, its first row and its slice of columns.
struct Part {
    Head head;
    int row, slice;
};

__device__ __forceinline__ Part part(const Params& p) {
    int of_head = (p.keys + ROWS - 1) / ROWS;
    i64 rest = blockIdx.x / of_head;
    i64 head = rest / p.slices;
    return {{head / p.heads, head % p.heads}, (int)(blockIdx.x % of_head) * ROWS, (int)(rest % p.slices)};
}

__device__ __forceinline__ void fetch_step(Stage& stage, const Params& p, const Part& at, int step, i64 t) {
    i64 group = of_group(p, at.head, t), head = of_step(p, at.head, t);
    int lane = threadIdx.x % 32;
#if DELTA
    REAL beta = widen(p.beta[head]);
#endif
    REAL q_factor = p.scale, k_factor = 1;
    if (NORM) q_factor *= p.q_factors[group], k_factor = p.k_factors[group];
#pragma unroll
    for (int i = lane; i < PARTS * COLUMNS; i += 32) {
        int column = at.slice * PARTS * COLUMNS + i;
        bool there = column < p.values;
        i64 place = head * p.values + column;
#if DELTA
        stage.input[step][i / COLUMNS][i % COLUMNS] = there ? beta * p.errors[place] : (REAL)0;
        stage.dv[step][i / COLUMNS][i % COLUMNS] = there ? beta * p.derrors[place] : (REAL)0;
#else
        stage.input[step][i / COLUMNS][i % COLUMNS] = there ? widen(p.v[place]) : (REAL)0;
#endif
        stage.dy[step][i / COLUMNS][i % COLUMNS] = there ? widen(p.dy[place]) : (REAL)0;
    }
#pragma unroll
    for (int i = lane; i < ROWS; i += 32) {
        bool there = at.row + i < p.keys;
        i64 place = group * p.keys + at.row + i;
        stage.q[step][i] = there ? widen(p.q[place]) * q_factor : (REAL)0;
        stage.k[step][i] = there ? widen(p.k[place]) * k_factor : (REAL)0;
        if (BY_KEY) stage.decay[step][i] = there ? decay(p.g[head * p.keys + at.row + i]) : (REAL)0;
    }
    if (!BY_KEY && lane == 0) stage.decay[step][0] = decay(p, head);
}

__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Part& at, i64 n) {
    int steps = steps_of(p, n);
    for (int step = threadIdx.x / 32 - WORKERS; step < steps; step += FETCHERS)
        fetch_step(stage, p, at, step, n * STEPS + step);
}

__device__ __forceinline__ int own_row() { return threadIdx.x / PARTS; }
__device__ __forceinline__ int own_part() { return threadIdx.x % PARTS; }

// Calls `use` with each of the lane's columns within the head's state, and its offset in the states.
template <class Use>
__device__ __forceinline__ void each_there(const Params& p, const Part& at, Use use) {
    int first = (at.slice * PARTS + own_part()) * COLUMNS;
    i64 place = of_state(p, at.head) + (i64)(at.row + own_row()) * p.values + first;
    if (at.row + own_row() >= p.keys) return;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (first + c < p.values) use(c, place + c);
}

// The sum over the lanes of a row.
__device__ __forceinline__ REAL row_sum(REAL sum) {
#pragma unroll
    for (int distance = PARTS / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// Writes the sum of each row to p.sums[kind], by slice, batch, step, head and key.
__device__ __forceinline__ void write(REAL sum, int kind, const Params& p, const Part& at, i64 t) {
    sum = row_sum(sum);
    if (own_part() != 0 || at.row + own_row() >= p.keys) return;
    i64 of_slice = (i64)at.slice * p.batch * p.length * p.heads + of_step(p, at.head, t);
    p.sums[kind][of_slice * p.keys + at.row + own_row()] = sum;
}

__device__ __forceinline__ void go(REAL (&state)[COLUMNS], const Stage& stage, int step, const Params& p, const Part& at,
                                   i64 t) {
    REAL q = stage.q[step][own_row()], k = stage.k[step][own_row()], decay = stage.decay[step][BY_KEY ? own_row() : 0];
    REAL dq = 0, dk = 0;
    const REAL* inputs = stage.input[step][own_part()];
#if DELTA
    const REAL* dvs = stage.dv[step][own_part()];
#endif
    const REAL* dys = stage.dy[step][own_part()];
#pragma unroll
    for (int first = 0; first < COLUMNS; first += 4) {
        REAL input[4], dv[4] = {}, dy[4];
        load_four(input, inputs + first);
#if DELTA
        load_four(dv, dvs + first);
#endif
        load_four(dy, dys + first);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            REAL& s = state[first + c];
            if (BACKWARD) {
                s = fma(q, dy[c], s);
                dk = fma(s, input[c], dk);
                s = decay * (DELTA ? fma(-k, dv[c], s) : s);
            } else {
                s *= decay;
                if (DELTA) dk = fma(-s, dv[c], dk);
                s = fma(k, input[c], s);
                dq = fma(s, dy[c], dq);
            }
        }
    }
    if (DELTA || BACKWARD) write(dk, BACKWARD ? 2 : 1, p, at, t);
    if (!BACKWARD) write(dq, 0, p, at, t);
}

// The offset of a head's chunk among those of all heads.
__device__ __forceinline__ i64 of_chunk(const Params& p, const Part& at, i64 chunk) {
    return (at.head.batch * p.heads + at.head.index) * p.chunks + chunk;
}

// The base from which `each_there`, which adds the head's offset, reaches the state after a chunk. p.ends is ordered by
// batch, head and chunk.
__device__ __forceinline__ REAL* after_chunk(const Params& p, const Part& at, i64 chunk) {
    return p.ends + of_chunk(p, at, chunk) * p.keys * p.values - of_state(p, at.head);
}

// The inner product of the cotangent and the state after a chunk, for each row.
__device__ __forceinline__ void multiply_end(const REAL (&carry)[COLUMNS], const Params& p, const Part& at, i64 chunk) {
    const REAL* after = after_chunk(p, at, chunk);
    REAL sum = 0;
    each_there(p, at, [&](int c, i64 place) { sum = fma(carry[c], after[place], sum); });
    sum = row_sum(sum);
    if (own_part() != 0 || at.row + own_row() >= p.keys) return;
    i64 of_slice = (i64)at.slice * p.batch * p.heads * p.chunks + of_chunk(p, at, chunk);
    p.products[of_slice * p.keys + at.row + own_row()] = sum;
}

__device__ __forceinline__ void work(REAL (&state)[COLUMNS], const Stage& stage, const Params& p, const Part& at, i64 n) {
    int steps = steps_of(p, n);
    i64 end = n * STEPS + steps;
    bool ends = !DELTA && GATE && (end % CHUNK == 0 || end == p.length);
    if (BACKWARD && ends) multiply_end(state, p, at, (end - 1) / CHUNK);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        int step = BACKWARD ? steps - 1 - i : i;
        go(state, stage, step, p, at, n * STEPS + step);
    }
    if (!BACKWARD && ends) {
        REAL* after = after_chunk(p, at, (end - 1) / CHUNK);
        each_there(p, at, [&](int c, i64 place) { after[place] = state[c]; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 ? 2 : 1) matrix_state_rows(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Part at = part(p);
    REAL state[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) state[c] = 0;
    const REAL* from = BACKWARD ? p.dlast : p.initial;
    if (threadIdx.x < 32 * WORKERS && from) each_there(p, at, [&](int c, i64 place) { state[c] = from[place]; });
    through_time(p, (Stage*)memory, [&](Stage& stage, i64 n) { fetch(stage, p, at, n); },
                 [&](const Stage& stage, i64 n) { work(state, stage, p, at, n); });
}
