// Replaces the states at the ends of segments, by the delta rule, with those at their starts. On entry the first segment's
// state starts from the initial state, and those of the others from zeros; a segment takes a state S to M S plus its own. In
// REVERSE, cotangents of states from the last segment to the first, by M'. A thread has EACH columns of a key's row of a
// state; those of a sequence's first segment go through all of them.
//   STATES_FIRST   whether all segments start from zeros, and the last state (in REVERSE the first cotangent) is written

constexpr int EACH = 8, COLUMNS = THREADS / KEYS * EACH;

struct Row {
    float of[EACH];

    __device__ __forceinline__ void load(const float* from) {
        for (int i = 0; i < EACH; i += 4) *(float4*)(of + i) = *(const float4*)(from + i);
    }
    __device__ __forceinline__ void store(float* to) const {
        for (int i = 0; i < EACH; i += 4) *(float4*)(to + i) = *(const float4*)(of + i);
    }
};

// Queues a copy of a segment's transition, so that a product does not wait for each of its elements.
__device__ __forceinline__ void fetch(float* to, const Params& p, i64 of) {
    int size = p.keys * p.keys;
    for (int i = 4 * threadIdx.x; i < size; i += 4 * THREADS) copy(to + i, p.transitions[REVERSE] + of * size + i, true);
    commit();
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_carry(Params p) {
    extern __shared__ __align__(16) float transition[]; // M', or in REVERSE M: its columns are rows of the product
    __shared__ __align__(16) float states[KEYS][COLUMNS];
    Part part(p, blockIdx.x / p.blocks);
    if (part.segment > 0 || (part.segments == 1 && !STATES_FIRST)) return;
    int key = threadIdx.x % KEYS, own = threadIdx.x / KEYS * EACH, column = blockIdx.x % p.blocks * COLUMNS + own;
    bool there = key < p.keys && column < p.values;
    i64 place = (i64)key * p.values + column;
    const float* initial = REVERSE ? p.dlast : p.initial;
    auto of_turn = [&](int turn) { return part.id + (i64)p.heads * (REVERSE ? part.segments - 1 - turn : turn); };
    Row carry = {};
    if (there && initial) carry.load(initial + part.state(p) + place);
    // The end of the first segment starts from `initial` already, and nothing follows the last one.
    auto moves = [&](int turn) { return STATES_FIRST || (turn > 0 && turn < part.segments - 1); };
    if (moves(0)) fetch(transition, p, of_turn(0));
#pragma unroll 1
    for (int turn = 0; turn < part.segments; turn++) {
        float* start = p.starts + of_turn(turn) * p.size + place;
        Row end = {};
        if (there && (STATES_FIRST || turn < part.segments - 1)) end.load(start);
        if (there) carry.store(start);
        carry.store(&states[key][own]);
        copied<0>();
        __syncthreads();
        for (int other = 0; moves(turn) && there && other < p.keys; other++)
            for (int i = 0; i < EACH; i++)
                end.of[i] = fmaf(transition[other * p.keys + key], states[other][own + i], end.of[i]);
        carry = end;
        __syncthreads();
        if (turn + 1 < part.segments && moves(turn + 1)) fetch(transition, p, of_turn(turn + 1));
    }
    float* last = REVERSE ? p.dinitial : p.last;
    if (STATES_FIRST && there && last) carry.store(last + part.state(p) + place);
}
