// The step size delta from dt, which is `v`. Comparisons instead of fmin and fmax, which would drop NaN.
__device__ __forceinline__ REAL step_size(REAL v, REAL bias, REAL lo, REAL hi) {
    if (HAS_BIAS) v += bias;
    if (SOFTPLUS) v = softplus(v);
    if (CLAMP) v = v < lo ? lo : v, v = v > hi ? hi : v;
    return v;
}
