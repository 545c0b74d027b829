// Converts rows of floats to blocks, one warp per block, one lane per value, and back. The host gives FORMAT, 8 or 4,
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
// Two values of a block from its bytes `i` and `i + 1`, in `upper` nibbles of Q4_0.
__device__ __forceinline__ void two(const unsigned char* bytes, int i, bool upper, float d, float& low, float& high) {
    int both = *(const unsigned short*)(bytes + i);
    if (FORMAT == 4) both = (both >> (upper ? 4 : 0)) & 0x0f0f;
    int first = FORMAT == 8 ? (signed char)both : (both & 255) - 8, second = FORMAT == 8 ? (signed char)(both >> 8) : (both >> 8) - 8;
    low = __fmul_rn(d, (float)first), high = __fmul_rn(d, (float)second);
}

// A thread has a quarter of a block.
extern "C" __global__ void blocks_dequantize(Convert p) {
    struct alignas(8 * sizeof(STORAGE) < 16 ? 8 * sizeof(STORAGE) : 16) Eight { STORAGE of[8]; } eight;
    i64 id = blockIdx.x * (i64)blockDim.x + threadIdx.x, block = id / 4;
    int quarter = id % 4;
    if (block >= p.blocks) return;
    const unsigned char* from = p.q + block * BYTES;
    float d = widen(f16{*(const unsigned short*)from});
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float low, high;
        two(from + 2, quarter % (FORMAT == 8 ? 4 : 2) * 8 + i, quarter >= 2, d, low, high);
        narrow(low, eight.of[i]), narrow(high, eight.of[i + 1]);
    }
    *(Eight*)(p.back + id * 8) = eight;
}
#endif
