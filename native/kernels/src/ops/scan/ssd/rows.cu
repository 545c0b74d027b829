// Copies to shared memory, and factors of products, for the kernels over chunks of CHUNK steps.
//   THREADS   of a block

// Queues an asynchronous copy of 16 bytes, or of zeros unless `there`.
__device__ __forceinline__ void copy(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

// Queues copies of the chunk's rows of 8 UNITS elements; rows from `left` on become zeros.
template <int UNITS, int APART>
__device__ __forceinline__ void copy_rows(STORAGE* to, const STORAGE* from, i64 stride, int left) {
#pragma unroll
    for (int unit = threadIdx.x; unit < CHUNK * UNITS; unit += THREADS) {
        int row = unit / UNITS, column = unit % UNITS * 8;
        bool there = row < left;
        copy(to + row * APART + column, from + (there ? row * stride + column : 0), there);
    }
}

// Ends the group of copies queued so far, and waits for all but the latest LEFT groups.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copied() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Queues copies of the step sizes and decays of a chunk; `chunk` counts those of all heads.
__device__ __forceinline__ void copy_steps(float* delta, float* decay, const Params& p, i64 chunk) {
    if (threadIdx.x >= CHUNK / 4) return;
    copy(delta + 4 * threadIdx.x, p.delta + chunk * CHUNK + 4 * threadIdx.x, true);
    copy(decay + 4 * threadIdx.x, p.decay + chunk * CHUNK + 4 * threadIdx.x, true);
}

// A pair of factors times their weights, rounded to storage.
__device__ __forceinline__ unsigned weighted(unsigned pair, float low, float high) {
    float a, b;
    widen((const STORAGE*)&pair, a, b);
    return pack(a * low, b * high);
}
