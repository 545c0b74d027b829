// Rotation of pairs, after angle.cu and pack.cu. A thread has VEC pairs of one position, and computes their angles once
// for all of its block's rows at that position. It reads TOGETHER rows before it writes one, to keep loads in flight.

constexpr int TOGETHER = 2;

// The offsets of a thread's pairs in a row: two packs, which are adjacent if pairs are interleaved; and sines and
// cosines.
struct Own {
    i64 position, low, apart;
    REAL sin[VEC], cos[VEC];

    __device__ __forceinline__ void rotate(REAL (&v)[2][VEC]) const {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            int i = INTERLEAVED ? 2 * e : e, j = INTERLEAVED ? i + 1 : i + VEC;
            REAL &a = v[i / VEC][i % VEC], &b = v[j / VEC][j % VEC], first = a;
            a = first * cos[e] - b * sin[e];
            b = first * sin[e] + b * cos[e];
        }
    }
};

template <int COUNT>
__device__ __forceinline__ void rotate_rows(const Params& p, const Own& own, i64 row) {
    i64 at[COUNT];
    Pack in[COUNT][2];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        i64 of = row + k * gridDim.y;
        at[k] = ((of / p.inner * p.length + own.position) * p.inner + of % p.inner) * p.width + own.low;
        for (int half = 0; half < 2; ++half) in[k][half] = *(const Pack*)(p.x + at[k] + half * own.apart);
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        REAL v[2][VEC];
        for (int half = 0; half < 2; ++half) widen(in[k][half], v[half]);
        own.rotate(v);
        for (int half = 0; half < 2; ++half) *(Pack*)(p.y + at[k] + half * own.apart) = narrow(v[half]);
    }
}

extern "C" __global__ void rope(Params p) {
    i64 pairs = p.width / 2, packs = pairs / VEC, id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= packs * p.length) return;
    i64 pair = id % packs * VEC;
    Own own = {id / packs, INTERLEAVED ? 2 * pair : pair, INTERLEAVED ? VEC : pairs};
#pragma unroll
    for (int e = 0; e < VEC; ++e)
        sine_and_cosine(p.sign * (p.first_position + (double)own.position) * p.rates[pair + e], own.sin[e], own.cos[e]);
    i64 row = blockIdx.y;
    for (; row + (TOGETHER - 1) * gridDim.y < p.rows; row += TOGETHER * gridDim.y) rotate_rows<TOGETHER>(p, own, row);
    for (; row < p.rows; row += gridDim.y) rotate_rows<1>(p, own, row);
}
