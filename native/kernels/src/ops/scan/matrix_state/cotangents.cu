// The cotangents of states and of inputs over chunks on tensor cores, from the last chunk to the first. Writes those of
// the states after chunks, dv, dinitial_state, and with DELTA dZ.
//   ENDS   whether to write, by the delta rule, only the cotangents of states at the starts of segments that start from zeros
// Limit: as in chunked.cu.

struct Shared {
    Stage stages[2];
    STORAGE state[KEYS * VALUE_APART], du[OF_DELTA<CHUNK * VALUE_APART>], dz[OF_DELTA<CHUNK * VALUE_APART>];
};

// The cotangents of a chunk's values from that of the state after it.
__device__ __forceinline__ void read_back(Rows& rows, const Shared& shared, const Stage& stage) {
    const Factors& factors = stage.factors;
    read_out<true, false>(rows, rows, stage, shared.state);
    scale(rows, [&](int t) { return weight_of_key(factors, t); });
}

// Takes the cotangent of the state back through a chunk.
__device__ __forceinline__ void retreat(State& state, const Stage& stage, const Params& p) {
    const Factors& factors = stage.factors;
    decay(state, factors);
    add_outer(state, stage.q, stage.values, [&](int t) { return weight_of_state(factors, t, p.scale); });
}

#if DELTA
__device__ __forceinline__ void through_chunk(State& state, Shared& shared, Stage& stage, const Params& p, const Chunk& at) {
    const Factors& factors = stage.factors;
    Rows rows;
    read_back(rows, shared, stage);
    add_upper(rows, stage.scores, stage.values);
    share_rows(shared.du, rows);
    __syncthreads();
    clear(rows);
    add_upper(rows, stage.inverse, shared.du);
    if (ENDS) share_rows(shared.dz, rows);
    else write_rows(p.dz, shared.dz, rows, p, at);
    __syncthreads();
    if (!ENDS) {
        scale(rows, [&](int t) { return factors.beta[t]; });
        write_rows(p.dv, shared.du, rows, p, at);
    }
    retreat(state, stage, p);
    add_outer(state, stage.k, shared.dz, [&](int t) {
        return -factors.beta[t] * factors.k[t] * exp2_fast(factors.log[t]);
    });
}

#else
// Rows of dy are reused for dv.
__device__ __forceinline__ void through_chunk(State& state, Shared& shared, Stage& stage, const Params& p, const Chunk& at) {
    Rows rows;
    read_back(rows, shared, stage);
    add_own<true>(rows, stage, p.scale);
    retreat(state, stage, p);
    __syncthreads();
    write_rows(p.dv, stage.values, rows, p, at);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_cotangents(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Part part = part_of_block(p);
    if (ENDS && !STATES_FIRST && part.segment == 0) return; // nothing precedes it
    Chunk at = first_chunk(p, part, true);
    if (at.index >= part.first) fetch(shared.stages[at.index % 2], p.dy, p, at);
    State state;
    if (ENDS) begin_alone(state, STATES_FIRST ? nullptr : p.dlast, part.segment == part.segments - 1, p, part);
    else begin(state, p.dlast, p, part);
#pragma unroll 1
    for (; at.index >= part.first; at.index--) {
        Stage& stage = shared.stages[at.index % 2];
        share_state(shared.state, state);
        copied<0>();
        __syncthreads();
        Chunk next = at;
        next.index--;
        if (next.index >= part.first) fetch(shared.stages[next.index % 2], p.dy, p, next);
        if (!ENDS) write_state(p.after, shared.state, p, at);
        through_chunk(state, shared, stage, p, at);
    }
    if (ENDS) store(state, p.starts + part.id * p.size, p);
    else if (p.dinitial && part.segment == 0) store(state, p.dinitial + part.state(p), p);
}
