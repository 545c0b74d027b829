// The rows that a step of a backbone ends with: normed by the root mean square. A block has a row.

struct Params {
    const REAL* sum;    // (batch, width)
    const REAL* norm;   // (width)
    STORAGE* y;         // (batch, width)
    i64 width;
    REAL eps, to_mean;
};

extern "C" __global__ void __launch_bounds__(THREADS) step_norm(Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const REAL* sum = p.sum + blockIdx.x * p.width;
    __shared__ REAL squares[THREADS / 32];
    REAL square = 0;
    for (i64 at = threadIdx.x; at < p.width; at += THREADS) square = fma(sum[at], sum[at], square);
#pragma unroll
    for (int distance = 16; distance; distance /= 2) square += __shfl_xor_sync(~0u, square, distance);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0;
    for (int warp = 0; warp < THREADS / 32; ++warp) square += squares[warp];
    REAL r = 1 / sqrt(square * p.to_mean + p.eps);
    for (i64 at = threadIdx.x; at < p.width; at += THREADS)
        narrow(sum[at] * r * p.norm[at], p.y[blockIdx.x * p.width + at]);
}
