// Replaces the states at the ends of segments by those at their starts. On entry the first segment's state starts from
// the initial state, and those of the others from zeros. In REVERSE, cotangents of states from the last segment to the
// first. A thread has one element of a state, that of a sequence's first segment goes through all of them. A state has
// p.decays decays, each of as many successive elements.
//   STATES_FIRST   whether all segments start from zeros, and the last state (in REVERSE the first cotangent) is written

extern "C" __global__ void carry_states(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id / p.size >= (i64)p.all_segments * p.heads) return;
    Part at(p, id / p.size);
    int element = id % p.size;
    if (at.segment > 0 || (at.segments == 1 && !STATES_FIRST)) return;
    const float* initial = REVERSE ? p.dlast : p.initial;
    int decay = element / (p.size / p.decays);
    float carry = initial ? initial[at.state(p) + element] : 0.0f;
    for (int turn = 0; turn < at.segments; turn++) {
        i64 of = at.id + (i64)p.heads * (REVERSE ? at.segments - 1 - turn : turn);
        float* start = p.starts + of * p.size + element;
        float end = *start;
        *start = carry;
        carry = turn == 0 && !STATES_FIRST ? end : fmaf(exp2_fast(p.totals[of * p.decays + decay]), carry, end);
    }
    float* last = REVERSE ? p.dinitial : p.last;
    if (STATES_FIRST && last) last[at.state(p) + element] = carry;
}
