// The recurrence over chunks on tensor cores.
//   SAVE   0: writes y and the last state; 1: writes states before chunks and U
// Limit: four products of a chunk wait for each other.

// Rows of v are reused for R, then for y.
struct Shared {
    Stage stages[2];
    STORAGE state[KEYS * VALUE_APART], u[CHUNK * VALUE_APART];
};

// Replaces v by R = beta (v - exp(G) K S).
__device__ __forceinline__ void write_rests(Stage& stage, Rows& by_k) {
    const Factors& factors = stage.factors;
    each_of_rows(by_k, [&](const float* pair, int step, int place) {
        float beta = factors.beta[step], factor = beta * factors.k[step] * exp2_fast(factors.log[step]), low, high;
        widen(stage.values + place, low, high);
        *(unsigned*)(stage.values + place) = pack(fmaf(-factor, pair[0], beta * low), fmaf(-factor, pair[1], beta * high));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_chunked(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Chunk at = chunk_of_block(p, false);
    int chunks = at.of.chunks();
    i64 of_head = at.state(p);
    if (chunks > 0) fetch(shared.stages[0], p.v, p, at);
    State state;
    load(state, p.initial ? p.initial + of_head : nullptr, p);
#pragma unroll 1
    for (; at.index < chunks; at.index++) {
        Stage& stage = shared.stages[at.index % 2];
        const Factors& factors = stage.factors;
        share_state(shared.state, state);
        copied<0>();
        __syncthreads();
        Chunk next = at;
        next.index++;
        if (next.index < chunks) fetch(shared.stages[next.index % 2], p.v, p, next);
        if (SAVE) write_state(p.before, shared.state, p, at);
        Rows y, rows;
        read_out<!SAVE>(rows, y, stage, shared.state);
        write_rests(stage, rows);
        __syncthreads();
        clear(rows);
        add_lower(rows, stage.inverse, stage.values);
        if (SAVE) write_rows(p.inputs, shared.u, rows, p, at);
        else share_rows(shared.u, rows);
        __syncthreads();
        if (!SAVE) {
            scale(y, [&](int t) { return (float)p.scale * factors.q[t] * exp2_fast(factors.log[t]); });
            add_lower(y, stage.scores, shared.u);
            write_rows(p.y, stage.values, y, p, at);
        }
        float total = factors.log[CHUNK - 1];
        decay(state, total);
        add_outer(state, stage.k, shared.u, [&](int t) { return factors.k[t] * exp2_fast(total - factors.log[t]); });
    }
    if (!SAVE && p.last) store(state, p.last + of_head, p);
}
