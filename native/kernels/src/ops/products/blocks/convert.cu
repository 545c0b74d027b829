// Converts rows of floats to blocks and back: one warp per block, one lane per value. The host gives FORMAT, 8 or 4,
// BYTES of a block, and LIMIT, the least magnitude whose scale overflows.
// Every operation is rounded as the formats say and none is contracted, so that every device gives equal bytes.

constexpr unsigned ALL = 0xffffffff;

// The largest magnitude of the warp, as bits: NaN ranks above infinity.
__device__ __forceinline__ unsigned largest(unsigned bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, bits);
#else
    for (int step = 16; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(ALL, bits, step));
    return bits;
#endif
}

// Every NaN is stored as one bit pattern.
__device__ __forceinline__ unsigned short stored(float d) {
    f16 half;
    narrow(d, half);
    return d == d ? half.bits : 0x7e00;
}

__device__ __forceinline__ float inverse(float d) { return d == 0 ? 0 : __fdiv_rn(1, d); }

// Not fminf and fmaxf: NaN must pass through here, and then becomes 0.
__device__ __forceinline__ int whole(float v, float low, float high) {
    return (int)(v < low ? low : v > high ? high : v);
}

// Rounds halves away from zero.
__device__ __forceinline__ int to_q8(float x, float id) {
    float v = __fmul_rn(x, id);
    return whole(__fadd_rn(v, copysignf(0.49999997f, v)), -127, 127);
}

__device__ __forceinline__ int to_q4(float x, float id) { return whole(__fadd_rn(__fmul_rn(x, id), 8.5f), 0, 15); }

#if QUANTIZE
extern "C" __global__ void blocks_quantize(Convert p) {
    i64 block = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (block >= p.blocks) return;
    float x = widen(p.x[block * 32 + lane]);
    unsigned magnitude = __float_as_uint(x) & 0x7fffffff, most = largest(magnitude);
    float amax = __uint_as_float(most);
    unsigned char* to = p.q + block * BYTES;
    float d;
    if (FORMAT == 8) {
        d = __fdiv_rn(amax, 127);
        to[2 + lane] = (unsigned char)to_q8(x, inverse(d));
    } else {
        // The first value of largest magnitude, with its sign. In a block of zeros, -0 counts as positive.
        float first = __shfl_sync(ALL, x, __ffs(__ballot_sync(ALL, magnitude == most)) - 1);
        d = __fdiv_rn(most ? first : 0, -8);
        int nibble = to_q4(x, inverse(d)), other = __shfl_down_sync(ALL, nibble, 16);
        if (lane < 16) to[2 + lane] = nibble | other << 4;
    }
    if (lane == 0) *(unsigned short*)to = stored(d);
    unsigned bad = __ballot_sync(ALL, !(fabsf(x) < LIMIT));
    if (p.first && bad && lane == 0) atomicMin(p.first, (unsigned long long)(block * 32 + __ffs(bad) - 1));
}
#else
extern "C" __global__ void blocks_dequantize(Convert p) {
    i64 block = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (block >= p.blocks) return;
    const unsigned char* from = p.q + block * BYTES;
    float d = widen(f16{*(const unsigned short*)from});
    int q = FORMAT == 8 ? (int)(signed char)from[2 + lane] : (from[2 + lane % 16] >> lane / 16 * 4 & 15) - 8;
    p.back[block * 32 + lane] = __fmul_rn(d, (float)q);
}
#endif
