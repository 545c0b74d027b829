// The activation functions and their derivatives, by the numbers of `Activation::ALL`; -1 is none.

__device__ __forceinline__ float exponential(float v) { return exp2_fast(v * (float)LOG2_E); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

__device__ __forceinline__ REAL sigmoid(REAL v) { return reciprocal(1 + exponential(-v)); }

// Of the tanh form of GELU: (1 + tanh(u)) / 2 is the sigmoid of 2 u, and 1 / (1 + e) where e is exp(-2 u).
constexpr double SQRT_8_BY_PI = 1.5957691216057307117;
__device__ __forceinline__ REAL gelu_power(REAL v) {
    constexpr REAL linear = -SQRT_8_BY_PI * LOG2_E, cubic = 0.044715 * linear;
    return exp2_fast(v * (cubic * (v * v) + linear));
}

constexpr double SQRT_HALF = 0.70710678118654752440;
__device__ __forceinline__ float error_function(float v) { return erff(v); }
__device__ __forceinline__ double error_function(double v) { return erf(v); }
__device__ __forceinline__ REAL normal(REAL v) {
    return (REAL)0.5 * (1 + error_function(v * (REAL)SQRT_HALF));
}

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

template <int F>
__device__ __forceinline__ REAL activate(REAL v) {
    if (F == 0) return sigmoid(v);
    if (F == 1) return v * sigmoid(v);
    if (F == 2) return v * reciprocal(1 + gelu_power(v));
    if (F == 3) return v * normal(v);
    if (F == 4) return softplus(v);
    if (F == 5) return v < 0 ? 0 : v;
    return v;
}

template <int F>
__device__ __forceinline__ REAL slope(REAL v) {
    if (F == 0) {
        REAL e = exponential(v < 0 ? v : -v), s = reciprocal(1 + e);
        return e * s * s;
    }
    if (F == 1) {
        REAL s = sigmoid(v);
        return s * (1 + v * (1 - s));
    }
    if (F == 2) {
        // Beyond 10 it is 0 or 1; and within, e is finite. e s is 1 - s without the loss of digits.
        REAL x = clamped(v, 10), e = gelu_power(x), s = reciprocal(1 + e);
        constexpr REAL linear = SQRT_8_BY_PI, cubic = 3 * 0.044715 * SQRT_8_BY_PI;
        return s + s * (e * s) * (x * (cubic * (x * x) + linear));
    }
    if (F == 3) {
        // The density is 0 beyond 40, where the product of 0 and infinity must not be met.
        REAL x = clamped(v, 40);
        return normal(v) + x * exponential((REAL)-0.5 * x * x) * (REAL)(0.25 * SQRT_8_BY_PI);
    }
    if (F == 4) return sigmoid(v);
    if (F == 5) return v > 0 ? 1 : 0;
    return 1;
}
