// States at the ends of segments, starting from zeros, or in REVERSE cotangents of states at their starts; those of a
// sequence's first segment, in REVERSE the last, start from where the sequence does. Also the decays of segments.
//   STATES_FIRST   whether all segments start from zeros
// Limit: memory, since keys and values pass through it once.

// What a chunk adds to the state: k and v, or q and dy.
struct Inputs {
    STORAGE keys[CHUNK * KEY_APART], values[CHUNK * VALUE_APART];
    Factors factors;
};

// Queues copies of a chunk as one group.
__device__ __forceinline__ void fetch(Inputs& to, const Params& p, const Chunk& at) {
    int first = first_column(p);
    copy_keys(to.keys, REVERSE ? p.q : p.k, p, at);
    copy_rows<WIDTH / 8, VALUE_APART>(to.values, (REVERSE ? p.dy : p.v) + at.values(p) + first, (i64)p.heads * p.values,
                                      at.left(), p.values - first);
    copy_factors(to.factors, p, at);
    commit();
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_ends(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Inputs* stages = (Inputs*)memory;
    Part part = part_of_block(p);
    if (part.segments == 1 && !STATES_FIRST) return;
    Chunk at = first_chunk(p, part, REVERSE);
    fetch(stages[0], p, at);
    State state;
    begin_alone(state, STATES_FIRST ? nullptr : REVERSE ? p.dlast : p.initial, part.segment == (REVERSE ? part.segments - 1 : 0), p, part);
    float sum = 0;
    int key = BY_KEY ? threadIdx.x : 0; // a thread for each decay
#pragma unroll 1
    for (int turn = 0, chunks = part.last - part.first; turn < chunks; turn++) {
        const Inputs& inputs = stages[turn % 2];
        const Factors& factors = inputs.factors;
        copied<0>();
        __syncthreads();
        at.index += REVERSE ? -1 : 1;
        if (turn + 1 < chunks) fetch(stages[1 - turn % 2], p, at);
        decay(state, factors);
        add_outer(state, inputs.keys, inputs.values, [&](int t) {
            return REVERSE ? weight_of_state(factors, t, p.scale) : weight_of_key(factors, t);
        });
        if (key < p.decays) sum += total(factors, key);
    }
    store(state, p.starts + part.id * p.size, p);
    if (threadIdx.x < p.decays && first_column(p) == 0) p.totals[part.id * p.decays + threadIdx.x] = sum;
}
