// The sums over all slots of the gradient of a norm, always in one order: dw if the y index of a block is 0, db if it
// is 1. A block has COLUMNS columns, one memory transaction, and adds SLOTS slots at a time.

constexpr int SLOTS = THREADS / COLUMNS;

extern "C" __global__ void __launch_bounds__(THREADS) norm_sums(Sums p) {
    int own = threadIdx.x % COLUMNS, slot = threadIdx.x / COLUMNS;
    i64 column = (i64)blockIdx.x * COLUMNS + own;
    const REAL* from = blockIdx.y ? p.from[1] : p.from[0];
    REAL sum = 0;
    if (column < p.columns)
#pragma unroll 8
        for (i64 at = slot; at < p.slots; at += SLOTS) sum += from[at * p.columns + column];
    __shared__ REAL sums[SLOTS][COLUMNS];
    sums[slot][own] = sum;
    __syncthreads();
    if (slot || column >= p.columns) return;
    for (int other = 1; other < SLOTS; ++other) sum += sums[other][own];
    (blockIdx.y ? p.to[1] : p.to[0])[column] = sum;
}
