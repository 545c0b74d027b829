// The sum over a block of THREADS threads, returned to each of them. The order of additions is fixed.

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ REAL block_sum(REAL sum) {
    __shared__ REAL sums[WARPS];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp];
    return sum;
}
