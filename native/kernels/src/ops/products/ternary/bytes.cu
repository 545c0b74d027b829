// Quantizes floats of a row to bytes: the common part of all kernels that do so with activations.

__device__ __forceinline__ unsigned size_of(float value) { return __float_as_uint(value) & 0x7fffffff; }
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// The scale of a row, from the bits of its largest magnitude. A row that is not finite gets zeros, and NaN as its
// scale.
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

    // Like `byte_of`, as the lowest byte of a word; valid only if `plain()`. Then no product exceeds 127 by more than
    // rounding removes. Adding a number whose last bit is worth 1 rounds x, in a fraction of the time of a conversion.
    __device__ __forceinline__ unsigned low_byte_of(float x) const {
        return __float_as_uint(__fadd_rn(__fmul_rn(x, inverse), 12582912.0f));
    }
    __device__ __forceinline__ bool plain() const { return finite && size_of(inverse) < 0x7f800000; }
};

// Eight adjacent elements in storage format. Nothing waits for the load until an element is read.
struct Eight {
    uint4 words[sizeof(STORAGE) / 2];

    __device__ __forceinline__ float operator[](int b) const { return widen(((const STORAGE*)words)[b]); }

    // The elements may be read from here on; the compiler cannot move reads before it.
    __device__ __forceinline__ void here() {
#pragma unroll
        for (int k = 0; k < sizeof(STORAGE) / 2; k++)
            asm volatile("" : "+r"(words[k].x), "+r"(words[k].y), "+r"(words[k].z), "+r"(words[k].w)::"memory");
    }
};

// Eight elements from `i` on, with zeros past the end of the row.
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

// The bytes of eight elements.
struct Bytes {
    unsigned low, high;

    __device__ __forceinline__ int total() const { return __dp4a((int)low, 0x01010101, __dp4a((int)high, 0x01010101, 0)); }
};

__device__ __forceinline__ Bytes bytes_of(const Measure& measure, const Eight& x, signed char* q, i64 i, i64 n) {
    unsigned words[2], of[8];
#pragma unroll
    for (int b = 0; b < 8; b++) of[b] = measure.low_byte_of(x[b]);
    if (!measure.plain()) {
#pragma unroll
        for (int b = 0; b < 8; b++) of[b] = measure.byte_of(x[b]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned low = __byte_perm(of[4 * i], of[4 * i + 1], 0x0040), high = __byte_perm(of[4 * i + 2], of[4 * i + 3], 0x0040);
        words[i] = __byte_perm(low, high, 0x5410);
    }
    if (q && i + 8 <= n && (unsigned long long)(q + i) % 8 == 0) {
        *(uint2*)(q + i) = make_uint2(words[0], words[1]);
    } else if (q) {
#pragma unroll
        for (int b = 0; b < 8; b++)
            if (i + b < n) q[i + b] = words[b / 4] >> (8 * (b % 4));
    }
    return {words[0], words[1]};
}

// Reduces the values of the threads of OF adjacent warps by `join`; OF is a power of two.
template <int OF, class T, class F>
__device__ __forceinline__ T joined(T value, T* shared, F join) {
    for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[threadIdx.x / (32 * OF) * OF + threadIdx.x % OF];
    for (int step = OF / 2; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}
