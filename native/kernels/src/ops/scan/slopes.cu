// Derivatives of silu, and of step_size in step_size.cu. With MASK that of a clamped step size is 0.
__device__ __forceinline__ REAL sigmoid(REAL v) {
    return reciprocal(REAL(1) + exp2_fast(-v * REAL(LOG2_E)));
}

__device__ __forceinline__ REAL silu_slope(REAL v) {
    REAL s = sigmoid(v);
    return s * fma(v, REAL(1) - s, REAL(1));
}

// The derivative of step_size by its argument. Both bounds of the clamp are inclusive.
__device__ __forceinline__ REAL step_slope(REAL v, REAL bias, REAL lo, REAL hi) {
    if (HAS_BIAS) v += bias;
    REAL slope = SOFTPLUS ? sigmoid(v) : REAL(1);
    if (CLAMP && MASK) {
        REAL size = SOFTPLUS ? softplus(v) : v;
        if (size < lo || size > hi) slope = 0;
    }
    return slope;
}
