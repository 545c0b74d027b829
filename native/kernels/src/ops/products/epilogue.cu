// The end of all products with compressed weights: a bias, the activation FN and one rounding.

__device__ __forceinline__ STORAGE finished(REAL sum) {
    STORAGE y;
    narrow(activate<FN>(sum), y);
    return y;
}

// With the bias of an output, unless `b` is null.
__device__ __forceinline__ STORAGE finished(float sum, const float* b, i64 output) {
    return finished(b ? sum + b[output] : sum);
}
