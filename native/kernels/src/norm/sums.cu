// The sums over all slots of the gradient of a norm, in order: dw of the first row of blocks, db of the second.
// A block has 32 columns; each of its warps sums up every eighth slot.

struct Params {
    const REAL* from[2];
    REAL* to[2];
    i64 slots, columns;
};

extern "C" __global__ void norm_sums(Params p) {
    __shared__ REAL sums[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 column = (i64)blockIdx.x * 32 + lane;
    REAL sum = 0;
    if (column < p.columns)
#pragma unroll 4
        for (i64 slot = warp; slot < p.slots; slot += 8) sum += p.from[blockIdx.y][slot * p.columns + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= p.columns) return;
    for (int other = 1; other < 8; ++other) sum += sums[other][lane];
    p.to[blockIdx.y][column] = sum;
}
