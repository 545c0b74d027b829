// Step sizes by head, and log2 of the decays from the start of each chunk. A warp has a chunk of CHUNK steps of a head;
// steps past the end have a step size of 0.

// The least log2 of a step's decay: past it a state is 0 in f32. Larger magnitudes would cost sums the digits of the
// steps that follow.
constexpr float MOST_DECAY = -160.0f;

extern "C" __global__ void ssd_steps(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (id >= (i64)p.all_chunks * p.heads) return;
    int head = id % p.heads, chunk = id / p.heads, lane = threadIdx.x % 32;
    Sequence of = sequence_of(p, chunk);
    float rate = p.a[head] * (float)LOG2_E, bias = HAS_BIAS ? p.dt_bias[head] : 0.0f, before = 0;
#pragma unroll
    for (int first = 0; first < CHUNK; first += 32) {
        int t = (chunk - of.chunk) * CHUNK + first + lane;
        float delta = 0;
        if (t < of.length) delta = step_size(widen(p.dt[(i64)(of.first + t) * p.heads + head]), bias, p.lo, p.hi);
        float decay = delta * rate;
        decay = decay < MOST_DECAY ? MOST_DECAY : decay;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            float other = __shfl_up_sync(0xffffffff, decay, distance);
            if (lane >= distance) decay += other;
        }
        decay += before;
        before = __shfl_sync(0xffffffff, decay, 31);
        i64 at = id * CHUNK + first + lane;
        p.delta[at] = delta;
        p.decay[at] = decay;
    }
}
