// Dot products of rows of planes, column sums, proofs by them, and the largest element of a row.

template <class T>
__device__ __forceinline__ T total(T sum) {
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    return sum;
}

// One warp per row.
extern "C" __global__ void ternary_dot(Sums p) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= p.rows) return;
    int sum = 0;
    for (i64 i = row * p.bytes + threadIdx.x % 32; i < (row + 1) * p.bytes; i += 32) {
        unsigned both = (p.a[0][i] ^ p.a[1][i]) & (p.b[0][i] ^ p.b[1][i]);
        sum += __popc(both) - 2 * __popc(both & (p.a[1][i] ^ p.b[1][i]));
    }
    sum = total(sum);
    if (threadIdx.x % 32 == 0) p.to[row] = sum;
}

// One thread per column and `part` rows; sums must start at 0.
extern "C" __global__ void ternary_columns(Sums p) {
    i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= p.n) return;
    i64 begin = blockIdx.y * p.part, end = begin + p.part < p.rows ? begin + p.part : p.rows;
    int sum = 0, bit = column % 8;
    for (i64 row = begin; row < end; row++) {
        i64 at = row * p.bytes + column / 8;
        sum += (p.a[0][at] >> bit & 1) - (p.a[1][at] >> bit & 1);
    }
    atomicAdd(p.to + column, sum);
}

// One warp per row.
extern "C" __global__ void ternary_proof(Sums p) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= p.rows) return;
    i64 sum = 0;
    for (i64 i = threadIdx.x % 32; i < p.outs; i += 32) sum += p.acc[row * p.outs + i];
    for (i64 i = threadIdx.x % 32; i < p.n; i += 32) sum -= (i64)p.xq[row * p.n + i] * p.columns[i];
    sum = total(sum);
    if (threadIdx.x % 32 == 0) {
        p.difference[row] = sum;
        if (sum != 0) atomicMin(p.bad, (unsigned long long)row);
    }
}

// One thread per row. NaN is never larger.
extern "C" __global__ void argmax(Sums p) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    i64 best = 0;
    REAL most = widen(p.x[row * p.n]);
    for (i64 i = 1; i < p.n; i++) {
        REAL value = widen(p.x[row * p.n + i]);
        if (value > most || (most != most && value == value)) {
            most = value;
            best = i;
        }
    }
    p.to[row] = (int)best;
}
