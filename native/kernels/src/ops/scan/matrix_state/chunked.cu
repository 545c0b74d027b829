// The recurrence over chunks on tensor cores.
//   WRITES   OUTPUTS: y and the last state; STATES: states before chunks, and U by the delta rule; ENDS: by the delta rule
//            states at the ends of segments that start from zeros, and the transitions of segments
//   STATES_FIRST   whether ENDS does so for all segments, else for those that others need
// Limit: the products of a chunk wait for each other, by the delta rule four.

enum { OUTPUTS, STATES, ENDS };

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
    read_out<true, WRITES == OUTPUTS>(rows, y, stage, shared.state);
    write_rests(stage, rows);
    __syncthreads();
    clear(rows);
    add_lower(rows, stage.inverse, stage.values);
    if (WRITES == STATES) write_rows(p.inputs, shared.u, rows, p, at);
    else share_rows(shared.u, rows);
    __syncthreads();
    if (WRITES == OUTPUTS) {
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
    if (WRITES == OUTPUTS) {
        read_out<false, true>(y, y, stage, shared.state);
        scale(y, [&](int t) { return weight_of_state(factors, t, p.scale); });
        add_own<false>(y, stage, p.scale);
    }
    decay(state, factors);
    add_outer(state, stage.k, stage.values, [&](int t) { return weight_of_key(factors, t); });
    __syncthreads();
    if (WRITES == OUTPUTS) write_rows(p.y, stage.values, y, p, at);
}
#endif

// A block of ENDS has columns of values, or as many of the keys of the segment's transition M: it takes a state S to M S,
// plus what its own steps give. M is what the delta rule makes of I without values.
__device__ __forceinline__ void begin_end(State& state, const Params& p, const Part& part, bool transition) {
    if (!transition) return begin_alone(state, STATES_FIRST ? nullptr : p.initial, part.segment == 0, p, part);
    clear(state);
    each_of_state(state, p, [&](float* pair, i64 at) {
        int key = at / p.values, column = at % p.values;
        pair[0] = column == key, pair[1] = column + 1 == key;
    });
}

__device__ __forceinline__ void store_end(State& state, const Params& p, const Part& part, bool transition) {
    if (!transition) return store(state, p.starts + part.id * p.size, p);
    i64 own = part.id * p.keys * p.keys;
    store(state, p.transitions[1] + own, p);
    each_of_state(state, p, [&](float* pair, i64 at) {
        int key = at / p.values, column = at % p.values;
        float* to = p.transitions[0] + own + column * p.keys + key;
        to[0] = pair[0], to[p.keys] = pair[1];
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_chunked(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Part part = part_of_block(p);
    bool transition = WRITES == ENDS && is_transition(p);
    // Nothing follows the last segment, and the first starts from a known state.
    if (WRITES == ENDS && !STATES_FIRST && (part.segment == part.segments - 1 || (transition && part.segment == 0))) return;
    if (transition) p.v = nullptr, p.values = p.keys;
    Chunk at = first_chunk(p, part, false);
    if (at.index < part.last) fetch(shared.stages[at.index % 2], p.v, p, at);
    State state;
    if (WRITES == ENDS) begin_end(state, p, part, transition);
    else begin(state, p.initial, p, part);
#pragma unroll 1
    for (; at.index < part.last; at.index++) {
        Stage& stage = shared.stages[at.index % 2];
        share_state(shared.state, state);
        copied<0>();
        __syncthreads();
        Chunk next = at;
        next.index++;
        if (next.index < part.last) fetch(shared.stages[next.index % 2], p.v, p, next);
        if (WRITES == STATES) write_state(p.before, shared.state, p, at);
        advance(state, shared, stage, p, at);
    }
    if (WRITES == ENDS) store_end(state, p, part, transition);
    if (WRITES == OUTPUTS && p.last && part.segment == part.segments - 1) store(state, p.last + part.state(p), p);
}
