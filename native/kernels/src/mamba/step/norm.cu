// The rows that a step of a backbone ends with: normed by the root mean square. A block has a row.

struct Params {
    const REAL* sum;    // (batch, width)
    const REAL* norm;   // (width)
    STORAGE* y;         // (batch, width)
    i64 width;
    REAL eps, to_mean;
};

extern "C" __global__ void __launch_bounds__(THREADS) step_norm(Params p) {
    let_others_begin();
    wait_for_others();
    const REAL* sum = p.sum + blockIdx.x * p.width;
    REAL square = 0;
    for (i64 at = threadIdx.x; at < p.width; at += THREADS) square = fma(sum[at], sum[at], square);
    REAL r = 1 / sqrt(block_sum(square) * p.to_mean + p.eps);
    for (i64 at = threadIdx.x; at < p.width; at += THREADS)
        narrow(sum[at] * r * p.norm[at], p.y[blockIdx.x * p.width + at]);
}
