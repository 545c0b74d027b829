// The activation functions and their derivatives.

// The host selects a function by the name of its variant.
enum class Activation { None, Sigmoid, Silu, GeluTanh, GeluErf, Softplus, Relu };

__device__ __forceinline__ float exponential(float v) { return exp2_fast(v * (float)LOG2_E); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

__device__ __forceinline__ REAL sigmoid(REAL v) { return reciprocal(1 + exponential(-v)); }

// For the tanh form of GELU: (1 + tanh(u)) / 2 is the sigmoid of 2 u, which is 1 / (1 + e) with e = exp(-2 u).
constexpr double SQRT_8_BY_PI = 1.5957691216057307117;
__device__ __forceinline__ REAL gelu_power(REAL v) {
    constexpr REAL linear = -SQRT_8_BY_PI * LOG2_E, cubic = 0.044715 * linear;
    return exp2_fast(v * (cubic * (v * v) + linear));
}

// For the normal distribution: `bell` is exp(-a^2 / 2), `tail` the probability beyond a >= 0. Their quotient is t P(t)
// with t = 1 / (1 + 0.3 a), where P is a minimax polynomial for a up to 14, within 1.5e-7 of the quotient.
__device__ __forceinline__ REAL bell(REAL a) { return exp2_fast(a * ((REAL)(-0.5 * LOG2_E) * a)); }
__device__ __forceinline__ float tail(float a, float bell) {
    float t = reciprocal(fmaf(0.3f, a, 1.0f)), series;
    if (sizeof(STORAGE) == 2) {
        // Within 8.3e-6, which is below the resolution of 16-bit types.
        series = fmaf(t, -0.0770973489f, 0.216036864f);
        series = fmaf(t, series, -0.0169478822f);
        series = fmaf(t, series, 0.144196295f);
        series = fmaf(t, series, 0.113741945f);
        return bell * t * fmaf(t, series, 0.120074231f);
    }
    series = fmaf(t, 0.0356747888f, -0.157203143f);
    series = fmaf(t, series, 0.206353606f);
    series = fmaf(t, series, -0.0536837316f);
    series = fmaf(t, series, 0.12856167f);
    series = fmaf(t, series, 0.0999134799f);
    series = fmaf(t, series, 0.120753958f);
    return bell * t * fmaf(t, series, 0.119629299f);
}
__device__ __forceinline__ double tail(double a, double) { return 0.5 * erfc(a * 0.70710678118654752440); }

// Not fmin and fmax: they would turn NaN into a number.
__device__ __forceinline__ double clamped(double v, double end) { return v < -end ? -end : v > end ? end : v; }
__device__ __forceinline__ float clamped(float v, float end) {
#if __CUDA_ARCH__ >= 800
    asm("{ max.NaN.f32 %0, %1, %3; min.NaN.f32 %0, %0, %2; }" : "=f"(v) : "f"(v), "f"(end), "f"(-end));
    return v;
#else
    return v < -end ? -end : v > end ? end : v;
#endif
}

// |v|, clamped to 40: beyond that the density is 0, and 0 times infinity would be NaN.
__device__ __forceinline__ double magnitude(double v) { return clamped(fabs(v), 40); }
__device__ __forceinline__ float magnitude(float v) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(fabsf(v)), "f"(40.0f));
    return v;
#else
    return clamped(fabsf(v), 40);
#endif
}

template <Activation F>
__device__ __forceinline__ REAL activate(REAL v) {
    if (F == Activation::Sigmoid) return sigmoid(v);
    if (F == Activation::Silu) return v * sigmoid(v);
    if (F == Activation::GeluTanh) return v * reciprocal(1 + gelu_power(v));
    if (F == Activation::GeluErf) {
        // NaN survives in both terms, so fmax may drop it in one.
        REAL a = magnitude(v);
        return fmax(v, (REAL)0) - a * tail(a, bell(a));
    }
    if (F == Activation::Softplus) return softplus(v);
    if (F == Activation::Relu) return v < 0 ? 0 : v;
    return v;
}

template <Activation F>
__device__ __forceinline__ REAL slope(REAL v) {
    if (F == Activation::Sigmoid) {
        REAL e = exponential(v < 0 ? v : -v), s = reciprocal(1 + e);
        return e * s * s;
    }
    if (F == Activation::Silu) {
        REAL s = sigmoid(v);
        return s * (1 + v * (1 - s));
    }
    if (F == Activation::GeluTanh) {
        // Beyond 10 the derivative is 0 or 1, and within, e stays finite. e s equals 1 - s without cancellation.
        REAL x = clamped(v, 10), e = gelu_power(x), s = reciprocal(1 + e);
        constexpr REAL linear = SQRT_8_BY_PI, cubic = 3 * 0.044715 * SQRT_8_BY_PI;
        return s + s * (e * s) * (x * (cubic * (x * x) + linear));
    }
    if (F == Activation::GeluErf) {
        REAL a = magnitude(v), e = bell(a), below = tail(a, e) - a * e * (REAL)(0.25 * SQRT_8_BY_PI);
        return v < 0 ? below : 1 - below;
    }
    if (F == Activation::Softplus) return sigmoid(v);
    if (F == Activation::Relu) return v > 0 ? 1 : 0;
    return 1;
}
