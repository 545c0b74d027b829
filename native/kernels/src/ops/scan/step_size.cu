// delta from dt. Comparisons rather than min and max, which would swallow NaN.
__device__ __forceinline__ REAL step_size(REAL v, REAL bias, REAL lo, REAL hi) {
    if (HAS_BIAS) v += bias;
    if (SOFTPLUS) v = softplus(v);
    if (CLAMP) v = v < lo ? lo : v, v = v > hi ? hi : v;
    return v;
}
