// Replaces the states at the ends of segments, by the delta rule, with those at their starts. On entry the first segment's
// state starts from the initial state, and those of the others from zeros; a segment takes a state S to M S plus its own. In
// REVERSE, cotangents of states from the last segment to the first, by M'. A thread has EACH columns of a key's row of a
// state; those of a sequence's first segment go through all of them.

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

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_carry(Params p) {
    __shared__ __align__(16) float states[KEYS][COLUMNS];
    Part at(p, blockIdx.x / p.blocks);
    if (at.segment > 0 || at.segments == 1) return;
    int key = threadIdx.x % KEYS, own = threadIdx.x / KEYS * EACH, column = blockIdx.x % p.blocks * COLUMNS + own;
    bool there = key < p.keys && column < p.values;
    i64 place = (i64)key * p.values + column;
    const float* initial = REVERSE ? p.dlast : p.initial;
    Row carry = {};
    if (there && initial) carry.load(initial + at.state(p) + place);
    for (int turn = 0; turn < at.segments; turn++) {
        i64 of = at.id + (i64)p.heads * (REVERSE ? at.segments - 1 - turn : turn);
        bool moves = turn > 0 && turn < at.segments - 1;
        Row end = {};
        if (there && turn < at.segments - 1) end.load(p.starts + of * p.size + place);
        if (there) carry.store(p.starts + of * p.size + place);
        carry.store(&states[key][own]);
        __syncthreads();
        const float* turned = p.transitions + of * p.keys * p.keys; // M'
#pragma unroll 8
        for (int other = 0; moves && there && other < p.keys; other++) {
            float factor = turned[REVERSE ? key * p.keys + other : other * p.keys + key];
            for (int i = 0; i < EACH; i++) end.of[i] = fmaf(factor, states[other][own + i], end.of[i]);
        }
        __syncthreads();
        carry = end;
    }
}
