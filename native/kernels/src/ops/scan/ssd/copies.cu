// Queues copies of the step sizes and decays of a chunk; `chunk` counts those of all heads.
__device__ __forceinline__ void copy_steps(float* delta, float* decay, const Params& p, i64 chunk) {
    if (threadIdx.x >= CHUNK / 4) return;
    copy(delta + 4 * threadIdx.x, p.delta + chunk * CHUNK + 4 * threadIdx.x, true);
    copy(decay + 4 * threadIdx.x, p.decay + chunk * CHUNK + 4 * threadIdx.x, true);
}

