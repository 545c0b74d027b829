// Passes over the rows of tensors that add a column for z and take it away.
//   DIVIDE           whether values are divided by the last number of their row, d + EPS
// Limit: memory, each element once.

__device__ __forceinline__ i64 thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// Widens rows, and writes the number more of each. A thread for each element.
extern "C" __global__ void linear_attention_append(Params p) {
    i64 id = thread(), wide = p.width + p.more, row = id / wide, column = id % wide;
    if (row >= p.rows) return;
    REAL value = 0;
    if (column == p.width) value = p.last_from ? p.last_from[row] : (REAL)p.otherwise;
    else if (p.from) value = widen(p.from[row * p.width + column]);
    p.wide_to[id] = value;
}

// Rounds rows, and takes the number more of each. A thread for each element.
extern "C" __global__ void linear_attention_split(Params p) {
    i64 id = thread(), wide = p.width + p.more, row = id / wide, column = id % wide;
    if (row >= p.rows) return;
    REAL value = p.wide_from[id];
    if (column == p.width) {
        if (p.last_to) p.last_to[row] = value;
        return;
    }
    if (DIVIDE) value /= p.wide_from[row * wide + p.width] + (REAL)EPS;
    if (p.to) narrow(value, p.to[row * p.width + column]);
}

// The cotangents of rows of n and d: dn = dy / (d + EPS) and dd = -(dn . n) / (d + EPS), or dy and 0. A warp for each row.
extern "C" __global__ void linear_attention_cotangents(Params p) {
    i64 row = thread() / 32, wide = p.width + 1;
    if (row >= p.rows) return;
    const REAL* products = p.wide_from + row * wide;
    REAL divisor = DIVIDE ? products[p.width] + (REAL)EPS : (REAL)1, along = 0;
    for (int column = threadIdx.x % 32; column < p.width; column += 32) {
        REAL d = widen(p.from[row * p.width + column]) / divisor;
        p.wide_to[row * wide + column] = d;
        along = fma(d, products[column], along);
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) along += __shfl_xor_sync(~0u, along, distance);
    if (threadIdx.x % 32 == 0) p.wide_to[row * wide + p.width] = DIVIDE ? -along / divisor : (REAL)0;
}
