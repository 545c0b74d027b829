// The cotangents of states and of inputs over chunks on tensor cores, from the last chunk to the first. Writes those of
// the states after chunks, dZ, dv and dinitial_state.
// Limit: as in chunked.cu.

struct Shared {
    Stage stages[2];
    STORAGE state[KEYS * VALUE_APART], du[CHUNK * VALUE_APART], dz[CHUNK * VALUE_APART];
};

extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_cotangents(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Chunk at = chunk_of_block(p, true);
    i64 of_head = at.state(p);
    if (at.index >= 0) fetch(shared.stages[at.index % 2], p.dy, p, at);
    State state;
    load(state, p.dlast ? p.dlast + of_head : nullptr, p);
#pragma unroll 1
    for (; at.index >= 0; at.index--) {
        Stage& stage = shared.stages[at.index % 2];
        const Factors& factors = stage.factors;
        share_state(shared.state, state);
        copied<0>();
        __syncthreads();
        float total = factors.log[CHUNK - 1];
        Chunk next = at;
        next.index--;
        if (next.index >= 0) fetch(shared.stages[next.index % 2], p.dy, p, next);
        write_state(p.after, shared.state, p, at);
        Rows rows;
        read_out<false>(rows, rows, stage, shared.state);
        scale(rows, [&](int t) { return factors.k[t] * exp2_fast(total - factors.log[t]); });
        add_upper(rows, stage.scores, stage.values);
        share_rows(shared.du, rows);
        __syncthreads();
        clear(rows);
        add_upper(rows, stage.inverse, shared.du);
        write_rows(p.dz, shared.dz, rows, p, at);
        __syncthreads();
        scale(rows, [&](int t) { return factors.beta[t]; });
        write_rows(p.dv, shared.du, rows, p, at);
        decay(state, total);
        add_outer(state, stage.q, stage.values, [&](int t) {
            return (float)p.scale * factors.q[t] * exp2_fast(factors.log[t]);
        });
        add_outer(state, stage.k, shared.dz, [&](int t) {
            return -factors.beta[t] * factors.k[t] * exp2_fast(factors.log[t]);
        });
    }
    if (p.dinitial) store(state, p.dinitial + of_head, p);
}
