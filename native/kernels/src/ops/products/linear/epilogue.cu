// The epilogue of a dense layer with the sums z = x w^T + b: y = f(z), or with GRADIENT dz = f'(z) dy. The host selects
// the function as FN. A thread has one column of every gridDim.y-th row.

extern "C" __global__ void linear_epilogue(Params p) {
    i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= p.columns) return;
    REAL b = p.b ? widen(p.b[column]) : 0;
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        i64 at = row * p.columns + column;
        REAL z = p.sums[at] + b;
#if GRADIENT
        narrow(slope<FN>(z) * widen(p.dy[at]), p.to[at]);
#else
        narrow(activate<FN>(z), p.to[at]);
#endif
    }
}
