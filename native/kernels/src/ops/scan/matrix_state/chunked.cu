// The recurrence over chunks on tensor cores.
//   SAVE   0: writes y and the last state; 1: writes states before chunks, and U by the delta rule
// Limit: the products of a chunk wait for each other, by the delta rule four.

struct Shared {
    Stage stages[2];
    STORAGE state[KEYS * VALUE_APART], u[OF_DELTA<CHUNK * VALUE_APART>];
};

#if DELTA
// Replaces v by R = beta (v - exp(G) K S).
__device__ __forceinline__ void write_rests(Stage& stage, Rows& by_k) {
    const Factors& factors = stage.factors;
    each_of_rows(by_k, [&](const float* pair, int step, int place) {
        float beta = factors.beta[step], factor = beta * factors.k[step] * exp2_fast(factors.log[step]), low, high;
        widen(stage.values + place, low, high);
        *(unsigned*)(stage.values + place) = pack(fmaf(-factor, pair[0], beta * low), fmaf(-factor, pair[1], beta * high));
    });
}

// Takes the state through a chunk by the delta rule. Rows of v are reused for R, then for y.
__device__ __forceinline__ void advance(State& state, Shared& shared, Stage& stage, const Params& p, const Chunk& at) {
    const Factors& factors = stage.factors;
    Rows y, rows;
    read_out<true, !SAVE>(rows, y, stage, shared.state);
    write_rests(stage, rows);
    __syncthreads();
    clear(rows);
    add_lower(rows, stage.inverse, stage.values);
    if (SAVE) write_rows(p.inputs, shared.u, rows, p, at);
    else share_rows(shared.u, rows);
    __syncthreads();
    if (!SAVE) {
        scale(y, [&](int t) { return weight_of_state(factors, t, p.scale); });
        add_lower(y, stage.scores, shared.u);
        write_rows(p.y, stage.values, y, p, at);
    }
    decay(state, factors);
    add_outer(state, stage.k, shared.u, [&](int t) { return weight_of_key(factors, t); });
}
#else
// Takes the state through a chunk as a sum. Rows of v are reused for y.
__device__ __forceinline__ void advance(State& state, Shared& shared, Stage& stage, const Params& p, const Chunk& at) {
    const Factors& factors = stage.factors;
    Rows y;
    if (!SAVE) {
        read_out<false, true>(y, y, stage, shared.state);
        scale(y, [&](int t) { return weight_of_state(factors, t, p.scale); });
        add_own<false>(y, stage, p.scale);
    }
    decay(state, factors);
    add_outer(state, stage.k, stage.values, [&](int t) { return weight_of_key(factors, t); });
    __syncthreads();
    if (!SAVE) write_rows(p.y, stage.values, y, p, at);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_chunked(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Part part = part_of_block(p);
    Chunk at = first_chunk(p, part, false);
    if (at.index < part.last) fetch(shared.stages[at.index % 2], p.v, p, at);
    State state;
    begin(state, p.initial, p, part);
#pragma unroll 1
    for (; at.index < part.last; at.index++) {
        Stage& stage = shared.stages[at.index % 2];
        share_state(shared.state, state);
        copied<0>();
        __syncthreads();
        Chunk next = at;
        next.index++;
        if (next.index < part.last) fetch(shared.stages[next.index % 2], p.v, p, next);
        if (SAVE) write_state(p.before, shared.state, p, at);
        advance(state, shared, stage, p, at);
    }
    if (!SAVE && p.last && part.segment == part.segments - 1) store(state, p.last + part.state(p), p);
}
