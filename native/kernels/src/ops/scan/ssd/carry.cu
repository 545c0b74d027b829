// Puts the states at the starts of segments in place of those at their ends, which all but the first segment reached
// from zeros. A thread has one number of a state.

extern "C" __global__ void ssd_carry(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x, head = id / SIZE;
    if (head >= (i64)p.batch * p.heads) return;
    float carry = p.initial ? p.initial[id] : 0.0f;
    for (int segment = 0; segment < p.segments; segment++) {
        i64 of = head * p.segments + segment;
        float* start = p.starts + of * SIZE + id % SIZE;
        float end = *start;
        *start = carry;
        carry = segment == 0 ? end : fmaf(exp2_fast(p.totals[of]), carry, end);
    }
}
