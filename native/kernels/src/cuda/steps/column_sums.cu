// Sums of the columns of each chunk of rows, added in row order: IN is the type read, OUT the type written.

extern "C" __global__ void column_sums(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= p.columns * p.chunks) return;
    i64 column = id % p.columns, first = id / p.columns * p.chunk;
    i64 last = first + p.chunk < p.rows ? first + p.chunk : p.rows;
    REAL sum = 0;
#pragma unroll 8
    for (i64 row = first; row < last; ++row) sum += widen(p.values[row * p.columns + column]);
    narrow(sum, p.sums[id]);
}
