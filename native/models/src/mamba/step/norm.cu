// RMS norm of the residual stream, or of each group of rows; with ADD, the output of the last layer is added to the
// stream first. One block per group of a row; a thread handles HELD elements.

extern "C" __global__ void __launch_bounds__(THREADS) step_norm(Norm p) {
    let_others_begin();
    i64 row = (blockIdx.x * gridDim.y + blockIdx.y) * p.width;
    const REAL* norm = p.norm + blockIdx.y * p.width;
    REAL v[HELD], w[HELD], square = 0;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 at = threadIdx.x + k * THREADS;
        w[k] = at < p.width ? norm[at] : (REAL)0;
    }
    // The stream too is read after the wait: where all kernels begin early, this one may begin before the kernel that wrote
    // the stream is done, even with others between them.
    wait_for_others();
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 at = threadIdx.x + k * THREADS;
        v[k] = at < p.width ? p.sum[row + at] : (REAL)0;
        if (ADD && at < p.width) v[k] += widen(p.x[row + at]);
        square = fma(v[k], v[k], square);
    }
    REAL r = 1 / sqrt(block_sum(square) * p.to_mean + p.eps);
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 at = threadIdx.x + k * THREADS;
        if (at >= p.width) break;
        if (ADD) p.sum[row + at] = v[k];
        narrow(v[k] * r * w[k], p.y[row + at]);
    }
}
