// Prepares rows of x for products: four adjacent lanes share a block, eight values each.

constexpr unsigned ALL = 0xffffffff;

__device__ __forceinline__ void eight(const STORAGE* x, float (&to)[8]) {
    constexpr int EACH = 16 / sizeof(STORAGE);
    struct alignas(16) Pack { STORAGE of[EACH]; };
    if ((unsigned long long)x % 16 == 0) {
#pragma unroll
        for (int i = 0; i < 8; i += EACH) {
            Pack pack = *(const Pack*)(x + i);
#pragma unroll
            for (int e = 0; e < EACH; ++e) to[i + e] = widen(pack.of[e]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = widen(x[i]);
    }
}

// Eight values: their bytes, and the scale and the sum of all bytes of their block.
struct Eight {
    unsigned words[2];
    float scale;
    int sum;
};

__device__ __forceinline__ Eight quantized(const float (&x)[8]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffff);
    most = max(most, __shfl_xor_sync(ALL, most, 1));
    most = max(most, __shfl_xor_sync(ALL, most, 2));
    float d = __fdiv_rn(__uint_as_float(most), 127), id = d == 0 ? 0 : __frcp_rn(d);
    Eight to = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float v = __fmul_rn(x[i], id), r = __fadd_rn(v, copysignf(0.49999997f, v));
        // NaN becomes 0; the scale of such a block is NaN.
        int q = (int)(r < -127 ? -127 : r > 127 ? 127 : r);
        to.words[i / 4] |= (unsigned)(q & 255) << 8 * (i % 4);
    }
    to.sum = __dp4a((int)to.words[0], 0x01010101, __dp4a((int)to.words[1], 0x01010101, 0));
    to.sum += __shfl_xor_sync(ALL, to.sum, 1);
    to.sum += __shfl_xor_sync(ALL, to.sum, 2);
    f16 half;
    narrow(d, half);
    to.scale = widen(half);
    return to;
}

// Writes a quarter of block `block`, one of 32 adjacent blocks of a row, in the order of walks: the first halves of their
// values, then the second halves, 16 bytes each, so that lanes with a block each read adjacent bytes; each block's scale
// and the start value of its sum follow. Weights are too large by `offset`.
__device__ __forceinline__ void put_ready(const Eight& all, unsigned char* to, int block, int quarter, int offset) {
    *(uint2*)(to + (quarter / 2 * 32 + block) * 16 + quarter % 2 * 8) = make_uint2(all.words[0], all.words[1]);
    if (quarter == 0) ((int2*)(to + 1024))[block] = {__float_as_int(all.scale), -offset * all.sum};
}

// Writes a quarter of a block, unless `to` is null; with FLOATS the first values of all blocks, then their second ones,
// and so on.
__device__ __forceinline__ void make_ready(const float (&x)[8], unsigned char* to, int block, int quarter, int offset) {
#if FLOATS
    if (!to) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) ((float*)to)[(quarter * 8 + i) * 32 + block] = x[i];
#else
    Eight all = quantized(x);
    if (to) put_ready(all, to, block, quarter, offset);
#endif
}
