// Adds rows to sums and normalises the sums by their root mean square. A block handles a row, which stays in the
// first-level cache between its two passes.

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(Add p) {
    i64 first = (i64)blockIdx.x * p.columns;
    REAL squares = 0;
    for (i64 column = threadIdx.x; column < p.columns; column += THREADS) {
        REAL sum = p.sum[first + column] + widen(p.x[first + column]);
        p.sum[first + column] = sum;
        REAL scaled = sum * p.scale;
        squares += scaled * scaled;
    }
    REAL square = block_sum(squares) * p.to_mean;
#if OUTSIDE
    REAL r = 1 / (sqrt(square) + p.eps);
#else
    REAL r = 1 / sqrt(square + p.eps);
#endif
    // A thread reads only elements that it wrote itself, so no barrier is needed.
    for (i64 column = threadIdx.x; column < p.columns; column += THREADS)
        narrow(p.sum[first + column] * r * p.w[column], p.y[first + column]);
}
