// Floats of a row to bytes: what all that makes bytes of activations shares.

__device__ __forceinline__ unsigned size_of(float value) { return __float_as_uint(value) & 0x7fffffff; }
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// What a row is measured with, by the bits of its largest size. One that is not finite has zeros, and its scale is NaN.
struct Measure {
    bool finite;
    float inverse, scale;

    __device__ __forceinline__ Measure(unsigned most, float floor) {
        finite = most < 0x7f800000;
        float largest = fmaxf(__uint_as_float(most), floor);
        inverse = finite ? __fdiv_rn(127.0f, largest) : 0.0f;
        scale = finite ? __fdiv_rn(largest, 127.0f) : __uint_as_float(0x7fc00000);
    }

    __device__ __forceinline__ int byte_of(float x) const {
        int value = __float2int_rn(__fmul_rn(x, inverse));
        return !finite ? 0 : value > 127 ? 127 : value < -127 ? -127 : value;
    }
};

// Eight neighbours as they lie, which nobody waits for before they are looked at.
struct Eight {
    uint4 words[sizeof(STORAGE) / 2];

    __device__ __forceinline__ float operator[](int b) const { return widen(((const STORAGE*)words)[b]); }

    // From here on they may be looked at.
    __device__ __forceinline__ void here() {
#pragma unroll
        for (int k = 0; k < sizeof(STORAGE) / 2; k++)
            asm volatile("" : "+r"(words[k].x), "+r"(words[k].y), "+r"(words[k].z), "+r"(words[k].w)::"memory");
    }
};

// Zeros past the end of a row.
__device__ __forceinline__ Eight eight(const STORAGE* x, i64 i, i64 n) {
    Eight all = {};
    if (i + 8 <= n && (unsigned long long)(x + i) % 16 == 0) {
#pragma unroll
        for (int k = 0; k < sizeof(STORAGE) / 2; k++) all.words[k] = ((const uint4*)(x + i))[k];
        return all;
    }
#pragma unroll
    for (int b = 0; b < 8; b++)
        if (i + b < n) ((STORAGE*)all.words)[b] = x[i + b];
    return all;
}

__device__ __forceinline__ unsigned largest_of(const Eight& x) {
    unsigned most = 0;
#pragma unroll
    for (int b = 0; b < 8; b++) most = larger(most, size_of(x[b]));
    return most;
}

// Their bytes; also as they lie, on demand.
struct Bytes {
    unsigned low, high;
    int total;
};

__device__ __forceinline__ Bytes bytes_of(const Measure& measure, const Eight& x, signed char* q, i64 i, i64 n) {
    unsigned words[2] = {0, 0};
    int total = 0;
#pragma unroll
    for (int b = 0; b < 8; b++) {
        int value = measure.byte_of(x[b]);
        total += value;
        words[b / 4] |= (unsigned)(value & 255) << (8 * (b % 4));
    }
    if (q && i + 8 <= n && (unsigned long long)(q + i) % 8 == 0) {
        *(uint2*)(q + i) = make_uint2(words[0], words[1]);
    } else if (q) {
#pragma unroll
        for (int b = 0; b < 8; b++)
            if (i + b < n) q[i + b] = words[b / 4] >> (8 * (b % 4));
    }
    return {words[0], words[1], total};
}

// What the threads of OF warps, neighbours, have, joined; OF is a power of two.
template <int OF, class T, class F>
__device__ __forceinline__ T joined(T value, T* shared, F join) {
    for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[threadIdx.x / (32 * OF) * OF + threadIdx.x % OF];
    for (int step = OF / 2; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}
