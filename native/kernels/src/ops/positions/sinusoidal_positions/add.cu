// Adds sines and cosines of positions to rows, after angle.cu and pack.cu. A thread has a pack of columns of one
// position, and computes their angles once for all of its block's rows at that position. It reads TOGETHER rows before
// it writes one, to keep loads in flight.

constexpr int TOGETHER = 4;

template <int COUNT>
__device__ __forceinline__ void add_to(const Params& p, const REAL (&waves)[VEC], i64 row, i64 first) {
    Pack in[COUNT];
    i64 apart = p.length * p.width;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) in[k] = *(const Pack*)(p.x + (row + k * gridDim.y) * apart + first);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        REAL v[VEC];
        widen(in[k], v);
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[e] += waves[e];
        *(Pack*)(p.y + (row + k * gridDim.y) * apart + first) = narrow(v);
    }
}

extern "C" __global__ void sinusoidal_positions(Params p) {
    i64 packs = p.width / VEC, id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= packs * p.length) return;
    i64 column = id % packs * VEC, position = id / packs;
    REAL waves[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e += 2) {
        REAL sine, cosine;
        sine_and_cosine((p.first_position + (double)position) * p.rates[(column + e) / 2], sine, cosine);
        waves[e] = VEC == 1 && column % 2 ? cosine : sine;
        if (e + 1 < VEC) waves[e + 1] = cosine;
    }
    i64 row = blockIdx.y, first = position * p.width + column;
    for (; row + (TOGETHER - 1) * gridDim.y < p.batch; row += TOGETHER * gridDim.y) add_to<TOGETHER>(p, waves, row, first);
    for (; row < p.batch; row += gridDim.y) add_to<1>(p, waves, row, first);
}
