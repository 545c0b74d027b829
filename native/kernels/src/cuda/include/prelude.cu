// The common part of every kernel. The host names the element types: -DSTORAGE=bf16 -DREAL=float. No header is
// included, so the kernels compile where only NVRTC is installed.

typedef long long i64;

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

// The shared-memory address of an object, for instructions that take no generic address.
__device__ __forceinline__ unsigned address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ double widen(double v) { return v; }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float((unsigned)v.bits << 16); }
__device__ __forceinline__ float widen(f16 v) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ void narrow(float v, float& to) { to = v; }
__device__ __forceinline__ void narrow(double v, double& to) { to = v; }
__device__ __forceinline__ void narrow(float v, f16& to) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
}
__device__ __forceinline__ void narrow(float v, bf16& to) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
#else
    unsigned bits = __float_as_uint(v);
    unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to.bits = v == v ? rounded : 0x7fff;
#endif
}

// Widens two adjacent elements at once: a pair of 16-bit ones is a single word, which need not be split and rejoined.
template <class T, class R>
__device__ __forceinline__ void widen(const T* from, R& low, R& high) {
    low = widen(from[0]);
    high = widen(from[1]);
}
__device__ __forceinline__ void widen(const bf16* from, float& low, float& high) {
    unsigned both = *(const unsigned*)from;
    low = __uint_as_float(both << 16);
    high = __uint_as_float(both & 0xffff0000);
}
__device__ __forceinline__ void widen(const f16* from, float& low, float& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high) : "r"(*(const unsigned*)from));
}

template <class T, class R>
__device__ __forceinline__ void narrow(R low, R high, T* to) {
    narrow(low, to[0]);
    narrow(high, to[1]);
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void narrow(float low, float high, bf16* to) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*(unsigned*)to) : "f"(high), "f"(low));
}
__device__ __forceinline__ void narrow(float low, float high, f16* to) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*(unsigned*)to) : "f"(high), "f"(low));
}
#endif

// 2^v in one instruction, within 2 ulp; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
__device__ __forceinline__ double exp2_fast(double v) { return exp2(v); }

__device__ __forceinline__ float reciprocal(float v) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
}
__device__ __forceinline__ double reciprocal(double v) { return 1.0 / v; }

constexpr double LOG2_E = 1.4426950408889634074;

// max(v, 0) + log1p(e) with e = exp(-|v|), where log1p(e) = 2 atanh(e / (2 + e)) and the argument of atanh is at most
// 1/3. Five terms of a minimax polynomial, exact to 4e-9, at both ends too.
__device__ __forceinline__ float softplus(float v) {
    float e = exp2_fast(-fabsf(v) * (float)LOG2_E);
    float s = e * reciprocal(2.0f + e);
    float w = s * s;
    float series = fmaf(w, 0.14087328632f, 0.13980709417f);
    series = fmaf(w, series, 0.20012426862f);
    series = fmaf(w, series, 0.33333157968f);
    series = fmaf(w, series, 1.0f);
    // Not fmaxf, which would turn NaN into 0.
    return fmaf(2.0f * s, series, v < 0.0f ? 0.0f : v);
}
__device__ __forceinline__ double softplus(double v) {
    return (v < 0.0 ? 0.0 : v) + log1p(exp(-fabs(v)));
}

__device__ __forceinline__ float silu(float v) {
    return v * reciprocal(1.0f + exp2_fast(-v * (float)LOG2_E));
}
__device__ __forceinline__ double silu(double v) { return v / (1.0 + exp(-v)); }
