// The factors of steps without the delta rule: decays alone. A warp for each chunk of a head.

extern "C" __global__ void matrix_state_factors(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (id >= (i64)p.all_chunks * p.heads) return;
    Factors& factors = ((Factors*)p.factors)[id];
    sum_decays(factors, p, Chunk(p, id));
#pragma unroll
    for (int i = threadIdx.x % 32; i < CHUNK; i += 32) factors.q[i] = factors.k[i] = factors.beta[i] = 1;
}
