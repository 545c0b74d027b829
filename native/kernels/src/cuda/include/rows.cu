// Copies to shared memory, and factors of products, for kernels over chunks of CHUNK steps on tensor cores; after mma.cu.
//   THREADS   of a block

// Queues an asynchronous copy of 16 bytes, or of zeros unless `there`.
__device__ __forceinline__ void copy(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

// Queues copies of the chunk's rows of 8 UNITS elements; rows from `left` on, and columns from `width` on, a multiple of
// 8, become zeros.
template <int UNITS, int APART>
__device__ __forceinline__ void copy_rows(STORAGE* to, const STORAGE* from, i64 stride, int left,
                                          int width = 8 * UNITS) {
#pragma unroll
    for (int unit = threadIdx.x; unit < CHUNK * UNITS; unit += THREADS) {
        int row = unit / UNITS, column = unit % UNITS * 8;
        bool there = row < left && column < width;
        copy(to + row * APART + column, from + (there ? row * stride + column : 0), there);
    }
}

// Ends the group of copies queued so far, and waits for all but the latest LEFT groups.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copied() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A pair of factors times their weights, rounded to storage.
__device__ __forceinline__ unsigned weighted(unsigned pair, float low, float high) {
    float a, b;
    widen((const STORAGE*)&pair, a, b);
    return pack(a * low, b * high);
}
