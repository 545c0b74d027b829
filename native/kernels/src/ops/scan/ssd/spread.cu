// Repeats elements of heads for each of their channels, and sums these: IN is the type read, OUT the type written.

// Writes each element p.times times.
extern "C" __global__ void spread(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id < p.count * p.times) narrow((REAL)widen(p.from[id / p.times]), p.to[id]);
}

// Sums each p.times elements: a warp for each sum.
extern "C" __global__ void fold(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (id >= p.count) return;
    REAL sum = 0;
    for (i64 i = threadIdx.x % 32; i < p.times; i += 32) sum += widen(p.from[id * p.times + i]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 == 0) narrow(sum, p.to[id]);
}
