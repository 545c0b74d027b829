// RMS norm of the residual stream; with ADD, the output of the last layer is added to the stream first. One block per
// row; a thread handles HELD elements.

extern "C" __global__ void __launch_bounds__(THREADS) step_norm(Norm p) {
    let_others_begin();
    i64 row = blockIdx.x * p.width;
    REAL v[HELD], w[HELD], square = 0;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 at = threadIdx.x + k * THREADS;
        bool there = at < p.width;
        w[k] = there ? p.norm[at] : (REAL)0;
        // Loaded before the wait: another kernel runs between the one that wrote the stream and this one.
        v[k] = ADD && there ? p.sum[row + at] : (REAL)0;
    }
    wait_for_others();
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 at = threadIdx.x + k * THREADS;
        if (at < p.width) v[k] = ADD ? v[k] + widen(p.x[row + at]) : p.sum[row + at];
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
